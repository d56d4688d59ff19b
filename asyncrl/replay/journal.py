"""committed.jsonl: one line per group that a learner's batch used up.

What stands here is done, also when replay was killed before its snapshot said so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from asyncrl.replay.queue import Committed

FILE = "committed.jsonl"
_LINE = 2**16


class Journal:
    """Appends to the run folder's file; every call is in the system's cache when it returns."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE
        _cut_torn_line(self._file)
        self._lines = self._file.open("ab")

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        return self._lines.tell()

    def write(self, committed: Iterable[Committed]) -> None:
        """One line per group: update, epoch, group_id, generator_id, outcome."""
        self._lines.write("".join(json.dumps(c._asdict()) + "\n" for c in committed).encode())
        self._lines.flush()

    def since(self, offset: int) -> list[Committed]:
        """What was written behind `offset`, a length of the file."""
        with self._file.open("rb") as lines:
            lines.seek(offset)
            return [Committed(**json.loads(line)) for line in lines]

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _cut_torn_line(file: Path) -> None:
    """A process that is killed while it writes may leave half a line, of which nobody was told."""
    size = file.stat().st_size if file.exists() else 0
    start = max(0, size - _LINE)
    with file.open("ab+") as lines:
        lines.seek(start)
        whole = start + lines.read().rfind(b"\n") + 1
        if whole < size:
            lines.truncate(whole)
