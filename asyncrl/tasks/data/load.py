"""The items of one file source: read, de-duplicated on the prompt, with the reasons why rows were left out.

Knows no tokenizer; a prompt's length is judged elsewhere.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import xxhash

from asyncrl.errors import TaskError
from asyncrl.sections.task import SourceSection
from asyncrl.tasks.base import Item
from asyncrl.tasks.data.files import File, Row, Seen, expand
from asyncrl.tasks.data.layouts import Layout, Wants, detect
from asyncrl.tasks.identity import besides

_FIRST = 4
"""Rows of each file that are read to see whether they can be."""


def load(source: SourceSection, key: str, wants: Wants) -> tuple[list[Item], Counter[str]]:
    """Items with different prompts in the order of the rows, and counts: rows, duplicate, conflicting.

    duplicate: rows that repeat a prompt with its answer. conflicting: rows of prompts that stand there with several
    different answers; nobody knows which one is right, so none is taken. With wants.tasks they are different tasks
    instead, as rows are that differ in other columns. key: `task.train[0]`. Raises TaskError that
    names the file, the row and the column.
    """
    seen, counts = Seen(), Counter[str]()
    found: dict[bytes, Item | None] = {}
    for path in _expand(source, key):
        file = _open(path, key)
        layout = detect(file.columns, source, key, str(path), wants)
        for row in file.rows(layout.wanted, layout.keys, seen):
            _add(found, _item(layout, row), counts, wants.tasks)
    counts["rows"] = seen.rows
    counts["duplicate"] += seen.repeats
    return [item for item in found.values() if item is not None], counts


def check(source: SourceSection, key: str, wants: Wants) -> None:
    """What can be seen at once: the files are there, have the columns, and their first rows can be read.

    Raises TaskError as `load` does.
    """
    for path in _expand(source, key):
        file = _open(path, key)
        layout = detect(file.columns, source, key, str(path), wants)
        for row in islice(file.rows(layout.wanted, layout.keys, Seen()), _FIRST):
            _item(layout, row)


def _item(layout: Layout, row: Row) -> Item:
    try:
        return layout.item(row.values, row.where)
    except RecursionError as exc:
        raise TaskError(f"{row.where} has a value that is nested too deeply") from exc


def _add(found: dict[bytes, Item | None], item: Item, counts: Counter[str], tasks: bool) -> None:
    said = "\0".join(f"{role}\0{' '.join(text.split())}" for role, text in item.messages or (("user", item.text),))
    said += f"\0{besides(item)}" if tasks else ""
    digest = xxhash.xxh3_128_digest(said.encode("utf-8", "surrogatepass"))
    if digest not in found:
        found[digest] = item
        return
    first = found[digest]
    if first is not None and first.answer.strip() == item.answer.strip():
        counts["duplicate"] += 1
        return
    counts["conflicting"] += 1 if first is None else 2
    found[digest] = None


def _expand(source: SourceSection, key: str) -> list[Path]:
    assert source.path is not None, "a source of items has a path"
    try:
        return expand(source.path)
    except TaskError as exc:
        raise TaskError(f"{key}.path={exc}") from exc


def _open(path: Path, key: str) -> File:
    try:
        return File(path)
    except TaskError as exc:
        raise TaskError(f"{key}.path: {exc}") from exc
