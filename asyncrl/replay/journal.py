"""committed.jsonl: one line per group that a learner's batch used up, and one where a learner went back.

What stands here is done, also when replay was killed before its snapshot said so. The lines alone say what is
part of the model: `surviving`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.errors import RunError
from asyncrl.replay.saved import Committed
from asyncrl.types import Version

FILE = "committed.jsonl"
_LINE = 2**16


class Rollback(NamedTuple):
    """A learner went on from `rolled_back_to` used batches as run epoch `epoch`, at `update`: later commits are void.

    source: of the epoch's first version. groups: what it undid (not written down).
    """

    rolled_back_to: int
    epoch: int
    update: int
    source: str = ""
    groups: tuple[Committed, ...] = ()


def surviving(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the decoded lines of a committed.jsonl the commits that no later rollback undid, in their order."""
    kept: list[Mapping[str, Any]] = []
    for line in lines:
        if "rolled_back_to" in line:
            kept = [c for c in kept if c.get("batch", 0) < line["rolled_back_to"]]
        else:
            kept.append(line)
    return kept


class Journal:
    """Appends to the run folder's file; every call is in the system's cache when it returns."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE
        cut_torn_line(self._file)
        # Unbuffered: what could not be written must not wait in a buffer to be tried again.
        self._lines = self._file.open("ab", buffering=0)
        self._num_bytes = self._lines.tell()

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        return self._num_bytes

    def begin(self) -> None:
        """A run that knows nothing of what stands here: its batches count from 0 again."""
        if self.num_bytes:
            self._append([Rollback(0, 0, 0)])

    def write(self, committed: Iterable[Committed]) -> None:
        """One line per group: update, epoch, group_id, generator_id, outcome, batch. RunError when it is impossible."""
        self._append(committed)

    def roll_back(self, batches: int, version: Version, source: str) -> Rollback:
        """One line that undoes what was committed after the first `batches` batches. Returns it with those groups."""
        rollback = Rollback(batches, version.epoch, version.update, source, tuple(_undone(self._read(0), batches)))
        self._append([rollback])
        return rollback

    def since(self, offset: int) -> list[Committed | Rollback]:
        """What was written behind `offset`, a length of the file."""
        out: list[Committed | Rollback] = []
        before: list[Mapping[str, Any]] | None = None
        for line in self._read(offset):
            if "rolled_back_to" not in line:
                out.append(Committed(**line))
            else:
                before = self._read(0, offset) if before is None else before
                known = [*before, *(c._asdict() if isinstance(c, Committed) else _written(c) for c in out)]
                out.append(Rollback(**line, groups=tuple(_undone(known, line["rolled_back_to"]))))
        return out

    def _append(self, lines: Iterable[Committed | Rollback]) -> None:
        data = memoryview("".join(json.dumps(_written(line)) + "\n" for line in lines).encode())
        size, rest = len(data), data
        try:
            while rest:
                rest = rest[self._lines.write(rest) :]
        except OSError as exc:
            # All of it or nothing: nobody was told of these commits, and the learner sends them again.
            with contextlib.suppress(OSError):
                self._lines.truncate(self._num_bytes)
            raise RunError(
                f"{self._file} cannot be written: {exc}; make room or give the run folder back, and start replay again"
            ) from exc
        self._num_bytes += size

    def _read(self, start: int, end: int = -1) -> list[Mapping[str, Any]]:
        with self._file.open("rb") as lines:
            lines.seek(start)
            return [json.loads(line) for line in lines.read(end - start if end >= 0 else -1).splitlines()]

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _written(line: Committed | Rollback) -> dict[str, Any]:
    return {k: v for k, v in line._asdict().items() if k != "groups"}


def _undone(lines: Iterable[Mapping[str, Any]], batches: int) -> list[Committed]:
    return [Committed(**c) for c in surviving(lines) if c.get("batch", 0) >= batches]


def cut_torn_line(file: Path) -> None:
    """A process that is killed while it writes may leave half a line, of which nobody was told."""
    size = file.stat().st_size if file.exists() else 0
    start = max(0, size - _LINE)
    with file.open("ab+") as lines:
        lines.seek(start)
        whole = start + lines.read().rfind(b"\n") + 1
        if whole < size:
            lines.truncate(whole)
