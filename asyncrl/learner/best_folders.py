"""RUN/best and RUN/best.pending: which policies lie there, and which of them stay. Imports no torch.

RUN/best is the model folder of the best version so far, with best.json. RUN/best.pending/<version> are versions whose
evaluation is not over, and one that was overtaken by a version that a learner which goes on may undo. A folder that
has its name is complete: it is written aside and renamed last.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from asyncrl.types import Version

log = logging.getLogger(__name__)

BEST, PENDING, NOTE = "best", "best.pending", "best.json"
"""Names in a run folder, and of the file in a policy's folder."""

MAX_NAMED = 40
"""Metrics that a message names."""

MAX_PENDING = 3
"""Versions whose evaluation is awaited; beyond it the oldest ones go, but for those that are measured now."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What an evaluation said of a version: its metrics by name, and whether it was not cut short."""

    metrics: Mapping[str, float]
    complete: bool

    def rank(self, metric: str, version: Version) -> tuple[bool, float, Version] | None:
        """Higher is better; None where the metric is none. Of equal values the later version is better, and one that
        was cut short is worse than any that was not."""
        value = self.metrics.get(metric, math.nan)
        return (self.complete, value, version) if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Kept:
    """A complete folder. measured: None as long as its evaluation is awaited."""

    folder: Path
    version: Version
    measured: Measured | None


class BestFolders:
    """The folders of one run. One process writes them. Methods raise OSError where the disk fails."""

    def __init__(self, run_dir: Path, metric: str) -> None:
        self._run_dir, self._metric = run_dir, metric
        self.best, self.pending = run_dir / BEST, run_dir / PENDING

    def place(self, version: Version) -> Path:
        """Where a version that is to be evaluated is written."""
        return self.pending / str(version)

    def set_aside(self) -> None:
        """The run begins anew: its best policy of before becomes best-1, best-2, ...; what was awaited goes."""
        shutil.rmtree(self.pending, ignore_errors=True)
        if self.best.exists():
            number = 1
            while (old := self._run_dir / f"{BEST}-{number}").exists():
                number += 1
            self.best.rename(old)

    def clean(self) -> None:
        """Remove what a killed process left half written."""
        for left in [*self.pending.glob("*.part"), *self._run_dir.glob(f"{BEST}.*.part")]:
            shutil.rmtree(left, ignore_errors=True)

    def kept(self) -> list[Kept]:
        """Every complete folder that says which version it is."""
        found = []
        for folder in [self.best, *self.pending.glob("*")]:
            version = _version(folder.name) if folder != self.best else _noted_version(folder)
            if version is not None and folder.is_dir():
                found.append(Kept(folder, version, _measured(folder)))
        return found

    def note(self, version: Version, measured: Measured) -> bool:
        """Write down what an evaluation said. False when that version is not kept."""
        kept = next((k for k in self.kept() if k.version == version), None)
        if kept is None:
            return False
        value = measured.metrics.get(self._metric, math.nan)
        text = {
            "metric": self._metric, "value": value if math.isfinite(value) else None, "version": str(version),
            "epoch": version.epoch, "update": version.update, "complete": measured.complete,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "metrics": {name: x for name, x in measured.metrics.items() if math.isfinite(x)},
        }  # fmt: skip
        aside = kept.folder / f"{NOTE}.part"
        aside.write_text(json.dumps(text, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(aside, kept.folder / NOTE)
        return True

    def arrange(self, safe: int, awaited: bool = True, measuring: Collection[Version] = ()) -> Kept | None:
        """Give the best version its name and remove what is not needed; the best one, None without any.

        safe: no learner that goes on undoes versions up to this update; the best of those stays beside the best of
        all. awaited: keep those whose evaluation is not over. measuring: versions whose evaluation has begun, or may.
        """
        kept = self.kept()
        ranked = sorted((k for k in kept if self._rank(k) is not None), key=lambda k: self._rank(k) or ())
        best = ranked[-1] if ranked else None
        needed = {k.version for k in ranked[-1:]}
        needed |= {k.version for k in [k for k in ranked if k.version.update <= safe][-1:]}
        waiting = sorted(k.version for k in kept if k.measured is None)
        needed |= {*waiting[-MAX_PENDING:], *measuring} if awaited else set()
        if best is not None and best.folder != self.best:
            self._promote(best, kept)
        for k in self.kept():
            # One of another metric stays until there is a better one to take its place.
            if k.version not in needed and k.folder != self.best:
                self.remove(k)
        if not awaited:
            # The process ends soon, and a thread with it.
            shutil.rmtree(self.pending, ignore_errors=True)
            self.clean()
        return None if best is None else replace(best, folder=self.best)

    def _rank(self, kept: Kept) -> tuple[bool, float, Version] | None:
        return None if kept.measured is None else kept.measured.rank(self._metric, kept.version)

    def _promote(self, best: Kept, kept: Sequence[Kept]) -> None:
        before = next((k for k in kept if k.folder == self.best), None)
        if before is not None:
            self.best.rename(self.place(before.version))
        elif self.best.exists():
            # Not ours: whatever it is, it stays.
            self.best.rename(self._run_dir / f"{BEST}.{best.version}.found")
        best.folder.rename(self.best)

    def remove(self, kept: Kept) -> None:
        """Remove a version, so that half of it never counts as one; the files go beside the training."""
        doomed = self._run_dir / f"{BEST}.{kept.version}.part"
        shutil.rmtree(doomed, ignore_errors=True)
        kept.folder.rename(doomed)
        threading.Thread(target=shutil.rmtree, args=(doomed, True), name="best-remove", daemon=True).start()


def read_note(folder: Path) -> dict[str, object] | None:
    """best.json of a folder; None without one that can be read."""
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def why_none(run_dir: Path, metric: str | None) -> str:
    """Why a run has no best policy, as far as its config and its records tell. metric: learner.keep_best."""
    if metric is None:
        return "learner.keep_best=null kept none"
    evaluations = _evaluations(run_dir / "metrics.jsonl")
    if not evaluations:
        return f"no evaluation is over yet that learner.keep_best={metric} could compare"
    known = {name for e in evaluations for name in e if name.startswith("eval/")}
    names = sorted(known - {"eval/version", "eval/epoch"})
    values = [e[metric] for e in evaluations if metric in e]
    if not values:
        return (
            f"none of its {len(evaluations)} evaluations gave learner.keep_best={metric}; they gave "
            f"{', '.join(names[:MAX_NAMED])}{', ...' * (len(names) > MAX_NAMED)}"
        )
    if not any(isinstance(v, int | float) and math.isfinite(v) for v in values):
        return f"none of its {len(evaluations)} evaluations gave a finite learner.keep_best={metric}"
    return f"the versions with a value of learner.keep_best={metric} could not be kept; the learner's log says why"


def _evaluations(records: Path) -> list[dict[str, object]]:
    """The records of evaluations in metrics.jsonl; none where it cannot be read."""
    found = []
    try:
        with records.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"eval/version"' in line and line.endswith("\n"):
                    found.append(json.loads(line))
    except (OSError, ValueError):
        return found
    return found


def _measured(folder: Path) -> Measured | None:
    note = read_note(folder)
    metrics = note.get("metrics") if note is not None else None
    if note is None or not isinstance(metrics, dict):
        return None
    numbers = {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
    return Measured(numbers, note.get("complete") is True)


def _noted_version(folder: Path) -> Version | None:
    note = read_note(folder)
    return None if note is None else _version(str(note.get("version")))


def _version(text: str) -> Version | None:
    """A version from its words, `<epoch>.<update>`."""
    epoch, _, update = text.partition(".")
    return Version(int(epoch), int(update)) if epoch.isdecimal() and update.isdecimal() else None
