"""Which commits count, recomputed from what the learner announced; independent of asyncrl.replay.

A learner that is started again publishes the first version of a new run epoch: the fork. What an older epoch
trained at the fork's update or later is undone.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from chaos_lib.evidence import Record


class Fork(NamedTuple):
    """A run epoch, the update at which it began, and how many batches made its first version."""

    update: int
    batches: int


def forks(tap: list[Record]) -> dict[int, Fork]:
    """Fork of every run epoch, as its first publication says."""
    found: dict[int, Fork] = {}
    for event in tap:
        if event["kind"] == "published":
            epoch, update = event["version"]
            found.setdefault(epoch, Fork(update, event["batches"]))
    return found


def split(committed: list[Record], fork: dict[int, Fork]) -> tuple[list[Record], list[Record]]:
    """Lines of committed.jsonl that count, and those that a later epoch undid."""
    kept, undone = [], []
    for line in committed:
        later = [f for epoch, f in fork.items() if epoch > line["epoch"]]
        (undone if any(is_undone(line, f) for f in later) else kept).append(line)
    return kept, undone


def is_undone(line: Record, fork: Fork) -> bool:
    """True for a commit of an older epoch that the one which began at `fork` undid."""
    # A skipped batch leaves the update where it was; only the count of batches tells on which side of the fork it is.
    if line.get("batch") is not None:
        return bool(line["batch"] >= fork.batches)
    return bool(line["update"] >= fork.update)


def is_lost(version: tuple[int, int], epoch: int, fork: dict[int, Fork]) -> bool:
    """True for a version that run epoch `epoch` cannot know: trained after a fork between the two."""
    return any(version[0] < e <= epoch and version[1] > f.update for e, f in fork.items())


def repeated(ids: list[str]) -> list[str]:
    """Ids that occur more than once."""
    return [i for i, count in Counter(ids).items() if count > 1]


def last_told(updates: list[int]) -> list[int]:
    """Updates as they were recorded, without those that were recorded again from an earlier one on."""
    kept: list[int] = []
    for update in updates:
        while kept and kept[-1] >= update:
            kept.pop()
        kept.append(update)
    return kept
