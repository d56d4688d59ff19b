"""Names of sources in metrics, logs and prompt ids. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from asyncrl.sections.task import SourceSection


def names_of(sections: Sequence[SourceSection]) -> list[str]:
    """A different name for each: its own, else that of its procedure or its file, with -2 where that is taken."""
    taken = {s.name for s in sections if s.name is not None}
    names = []
    for section in sections:
        name = section.name
        if name is None:
            stem = _stem(section)
            name = next(n for n in (stem, *(f"{stem}-{i}" for i in range(2, len(sections) + 2))) if n not in taken)
            taken.add(name)
        names.append(name)
    return names


def _stem(section: SourceSection) -> str:
    """Of letters, digits, `.`, `_` and `-`, as the names that users give."""
    path = Path(section.path or "")
    for text in (section.procedural or "", path.stem, path.parent.name):
        word = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:56].strip("-.")
        if word:
            return word
    return "source"
