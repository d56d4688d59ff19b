"""RUN/tune.jsonl: one line per change of a live setting, and one when it took effect.

Written after replay saved the change and before anybody hears of it; what a killed process could not write any more,
the next one writes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.replay.journal import cut_torn_line
from asyncrl.replay.knobs import Change

FILE = "tune.jsonl"

log = logging.getLogger(__name__)


class TuneLog:
    """The file of one run folder. A disk that is full costs lines of it and no change."""

    def __init__(self, run_dir: Path | None) -> None:
        self._file = run_dir / FILE if run_dir is not None else None
        self.seq = self.applied = 0
        """Newest change, and newest one that took effect, of which there is a line."""
        if self._file is not None and self._file.exists():
            cut_torn_line(self._file)
        lines, bad = self._read()
        if bad:
            log.warning("%s: %d damaged lines are passed over", self._file, bad)
        for line in lines:
            self.seq = max(self.seq, int(line.get("seq", 0)) if "update" in line else 0)
            self.applied = max(self.applied, int(line.get("seq", 0)) if "applied_at" in line else 0)

    def lines(self) -> list[dict[str, Any]]:
        """What it holds. Damaged lines, as a crash of the host may leave them, are passed over."""
        return self._read()[0]

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The lines, and how many are damaged."""
        if self._file is None or not self._file.exists():
            return [], 0
        whole = [_decoded(line) for line in self._file.read_text(errors="replace").split("\n") if line]
        lines = [line for line in whole if line is not None]
        return lines, len(whole) - len(lines)

    def begin(self) -> None:
        """A run that begins anew in this folder: nothing was changed in it."""
        self.seq = self.applied = 0
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def changes(self, changes: Iterable[Change]) -> None:
        """Lines for those that have none yet."""
        for c in changes:
            if c.seq > self.seq:
                values = {key: [json.loads(old), json.loads(new)] for key, (old, new) in c.values.items()}
                line = {"seq": c.seq, "time": c.time, "update": c.update, "by": c.by, "changes": values}
                self._append(line | ({"undoes": list(c.undoes)} if c.undoes else {}))
                self.seq = c.seq

    def took_effect(self, seq: int, update: int) -> None:
        """All changes up to `seq` hold for the take at `update` and for later ones."""
        if seq > self.applied:
            self._append({"seq": seq, "applied_at": update})
            self.applied = seq

    def dropped(self, seq: int, keys: Mapping[str, tuple[str, str]]) -> None:
        """Tuned and configured value of keys that a resume with another config took over."""
        values = {key: [json.loads(old), json.loads(new)] for key, (old, new) in keys.items()}
        self._append({"seq": seq, "dropped": values})

    def _append(self, line: Mapping[str, Any]) -> None:
        log.info("tuned: %s", json.dumps(line))
        if self._file is None:
            return
        try:
            with self._file.open("ab", buffering=0) as out:
                size, data = out.tell(), json.dumps(line).encode() + b"\n"
                if out.write(data) < len(data):
                    out.truncate(size)
                    log.error("%s cannot be written: no room", self._file)
        except OSError as exc:
            log.error("%s cannot be written: %s", self._file, exc)


def _decoded(text: str) -> dict[str, Any] | None:
    """A line of the file; None for what is none."""
    try:
        line = json.loads(text.strip("\0"))
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("seq", 0)) is int else None
