"""Held-out tasks apart from training: refused in users' files, left out of what a procedure makes."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import TaskError
from asyncrl.tasks.base import Item
from asyncrl.tasks.data.wrappers import bare
from asyncrl.tasks.identity import besides, digest_of, same
from asyncrl.tasks.source import Source

Known = dict[bytes, tuple[Source, Item]]
"""Held-out items, by their text and by all that makes them a task of their own."""


def keep_apart(train: Sequence[Source], held_out: Sequence[Source], whole: bool) -> None:
    """Take items of the held-out sources out of the training ones. Raises TaskError for a file that has some.

    whole: the answer and the extra make a task, too. Then a text that stands for several tasks on one side says
    nothing of its task, as the fixed prompt of a game, and only equal tasks overlap; any other text does by itself.
    """
    several = _of_several_tasks(train) | _of_several_tasks(held_out) if whole else set()
    known: Known = {}
    for source in held_out:
        for item in source.items:
            text = bare(item.text)
            known |= dict.fromkeys((digest_of(text), digest_of(same(text, item, whole))), (source, item))
    for source in train:
        _part(source, known, several)


def _of_several_tasks(sources: Sequence[Source]) -> set[bytes]:
    """Texts that several tasks of these sources have."""
    several: set[bytes] = set()
    seen: dict[bytes, str] = {}
    for item in (item for source in sources for item in source.items):
        digest, rest = digest_of(bare(item.text)), besides(item)
        if seen.setdefault(digest, rest) != rest:
            several.add(digest)
    return several


def _part(source: Source, held_out: Known, several: set[bytes]) -> None:
    shared = []
    for item in source.items:
        text = bare(item.text)
        digest = digest_of(text)
        if digest in several:
            digest = digest_of(same(text, item, True))
        if digest in held_out:
            shared.append((item, held_out[digest]))
    if not shared:
        return
    if source.section.procedural is not None:
        out = {item.text for item, _ in shared}
        for item, _ in shared:
            source.leave_out(item, "held_out")
        source.items = [item for item in source.items if item.text not in out]
        return
    item, (other, theirs) = shared[0]
    raise TaskError(
        f"{other.key} ({other.origin}) shares {len(shared)} of its questions with {source.key} ({source.origin}), for "
        f"example {bare(item.text)[:100]!r} ({theirs.where or other.origin} and {item.where}); held-out accuracy would "
        "measure memory: remove them from one of the files, or evaluate on another set"
    )
