"""Which texts a run's dashboard holds already, so that a resumed writer does not repeat one. Knows no text by name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

FILE = "texts.json"
"""Name of the list in the TensorBoard folder."""

_KEPT = 256


class Texts:
    """Tag -> (update, digest) of what was written, on disk after every text.

    first_update: what an earlier writer put at this update and later is gone, as readers of the events see it.
    """

    def __init__(self, directory: Path, first_update: int) -> None:
        self._path = directory / FILE
        known: dict[str, list[tuple[int, str]]] = {}
        if first_update and self._path.exists():
            known = json.loads(self._path.read_text(encoding="utf-8"))
        self._known = {tag: [(u, d) for u, d in items if u < first_update] for tag, items in known.items()}
        self._fresh = {tag for tag, items in self._known.items() if items}

    def is_new(self, update: int, tag: str, text: str) -> bool:
        """False when this writer's first text of a tag is the last one that is there. Notes it otherwise."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        items = self._known.setdefault(tag, [])
        repeated = tag in self._fresh and items[-1][1] == digest
        self._fresh.discard(tag)
        if repeated:
            return False
        self._known[tag] = [*items, (update, digest)][-_KEPT:]
        aside = self._path.with_suffix(".new")
        aside.write_text(json.dumps(self._known), encoding="utf-8")
        os.replace(aside, self._path)
        return True
