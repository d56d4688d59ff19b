"""committed.jsonl: one line per group that a learner's batch used up. Written, never read here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from asyncrl.replay.queue import Committed

FILE = "committed.jsonl"


class Journal:
    """Appends to the run folder's file; every call is on disk's cache when it returns."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = (run_dir / FILE).open("a", encoding="utf-8")

    def write(self, committed: Iterable[Committed]) -> None:
        """One line per group: update, epoch, group_id, generator_id, outcome."""
        self._lines.writelines(json.dumps(c._asdict()) + "\n" for c in committed)
        self._lines.flush()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
