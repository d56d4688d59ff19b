"""Where records are written: one JSON line per update, and the same numbers for TensorBoard.

One writer per run folder. A failing disk or TensorBoard is logged once and never stops training.
Knows no metric by name except its own count of NaNs.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from numpy.typing import NDArray

from asyncrl.errors import RunError
from asyncrl.metrics.events import EventWriter
from asyncrl.metrics.layout import dashboard
from asyncrl.metrics.texts import Texts

log = logging.getLogger(__name__)

FILE = "metrics.jsonl"
"""Name of the JSON-lines file in the run folder."""
EVENTS = "tb"
"""Name of the TensorBoard folder in the run folder."""

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_RESERVED = ("update", "time")


class Sink:
    """The one writer of a run folder's metrics.

    first_update: records of this update and later that an earlier writer left are set aside (a
    repeated run), so that a reader sees each update once; with resumed they stay, for the run goes on there:
    `timeline` leaves out what was undone. lock: of `hold`, when the caller has it already. absent: of
    `metrics.layout.dashboard`. Raises RunError when another process writes the same folder.
    """

    def __init__(
        self,
        run_dir: str | Path,
        tensorboard: bool = True,
        first_update: int = 0,
        resumed: bool = False,
        lock: IO[str] | None = None,
        absent: Collection[str] = (),
    ) -> None:
        self._dir = Path(run_dir)
        self._lock = lock if lock is not None else hold(self._dir)
        self._failed: set[str] = set()
        self._events: EventWriter | None = None
        self._texts: Texts | None = None
        try:
            if resumed:
                _cut_torn_line(self._dir / FILE)
            else:
                _set_aside(self._dir / FILE, first_update)
            self._lines: IO[str] = (self._dir / FILE).open("a", encoding="utf-8")
        except BaseException:
            self._lock.close()
            raise
        if tensorboard:
            self._start_events(first_update, absent)
        if resumed and self._events is not None:
            self._repeat_evaluation(first_update)

    def write(
        self,
        update: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, NDArray[Any]] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Write one record and flush it. Histograms and texts go to TensorBoard only.

        A value that is not finite is written as NaN or Infinity and counted in `metrics/nan`.
        """
        assert not any(name in _RESERVED for name in scalars), "update and time are set by the sink"
        values = {name: float(value) for name, value in scalars.items()}
        if broken := sum(not math.isfinite(v) for v in values.values()):
            values["metrics/nan"] = float(broken)
        try:
            self._lines.write(to_line(update, time.time(), values) + "\n")
            self._lines.flush()
        except Exception as exc:  # a full disk must not stop training
            self._report(FILE, exc)
        if self._events is not None:
            try:
                self._events.write(update, values, histograms, texts)
            except Exception as exc:
                self._report("TensorBoard", exc)

    def text(self, update: int, tag: str, text: str) -> None:
        """Show a text (markdown) on the dashboard's TEXT tab. One that is there already after a resume is left out."""
        if self._events is None or self._texts is None:
            return
        try:
            if self._texts.is_new(update, tag, text):
                self._events.write(update, {}, texts={tag: text})
        except Exception as exc:
            self._report("TensorBoard", exc)

    def close(self) -> None:
        """Close the files and release the folder."""
        for close in (self._lines.close, *([self._events.close] if self._events else ())):
            try:
                close()
            except Exception as exc:  # buffered bytes that the disk refuses
                self._report("close", exc)
        self._lock.close()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start_events(self, first_update: int, absent: Collection[str]) -> None:
        try:
            self._events = EventWriter(self._dir / EVENTS, dashboard(absent), first_update)
            self._texts = Texts(self._dir / EVENTS, first_update)
        except Exception as exc:  # tensorboard is a convenience, the JSON lines hold the same
            self._report("TensorBoard", exc)

    def _repeat_evaluation(self, update: int) -> None:
        """TensorBoard forgets step `update` of before; the version that the learner goes on from stays evaluated."""
        assert self._events is not None
        try:
            records = timeline(read_jsonl(self._dir / FILE))
            for record in (r for r in records if r["update"] == update and "eval/version" in r):
                self._events.write(update, {k: v for k, v in record.items() if k not in _RESERVED})
        except (OSError, ValueError) as exc:
            self._report("TensorBoard", exc)

    def _report(self, what: str, exc: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            log.error("metrics: %s cannot be written, training goes on without it", what, exc_info=exc)


def to_line(update: int, now: float, values: Mapping[str, float]) -> str:
    """One record as strict JSON: numbers that JSON lacks become the words NaN, Infinity, -Infinity."""
    record: dict[str, Any] = {"update": update, "time": round(now, 3)}
    for name, value in values.items():
        record[name] = value if math.isfinite(value) else _word(value)
    return json.dumps(record, allow_nan=False)


def read_jsonl(path: str | Path) -> list[dict[str, float]]:
    """Records of a metrics.jsonl, the words of `to_line` turned back into floats.

    A last line without its end (the writer was killed in it) is left out. Raises ValueError on any
    other line that is no record.
    """
    records = []
    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            raw = json.loads(line)
            records.append({k: _WORDS[v] if isinstance(v, str) else v for k, v in raw.items()})
    return records


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def timeline(records: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """The records of a metrics.jsonl without those of updates that a later run epoch undid, in their order."""
    kept: list[dict[str, float]] = []
    epoch = 0.0
    for record in records:
        if record.get("run/epoch", epoch) > epoch:
            epoch, first = record["run/epoch"], record["update"]
            # The version of update `first` is the one that the learner went on from: its evaluation stays.
            kept = [r for r in kept if r["update"] < first + ("eval/version" in r) or r.get("eval/epoch", 0) == epoch]
        kept.append(record)
    return kept


def hold(run_dir: Path) -> IO[str]:
    """Lock a run folder's metrics for this process, as long as the handle is open. RunError when another has them."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "metrics.lock"
    handle = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        handle.close()
        raise RunError(f"another process writes metrics in {path.parent}; give this run another run.name") from exc
    return handle


def _cut_torn_line(path: Path) -> None:
    """What is appended must not be glued to half a line of a writer that was killed."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def _set_aside(path: Path, first_update: int) -> None:
    """Keep the records before first_update; what else the file held stays in a numbered copy."""
    if not path.exists():
        return
    old = read_jsonl(path)
    kept = [r for r in old if r["update"] < first_update]
    text = "".join(
        to_line(int(r["update"]), r["time"], {k: v for k, v in r.items() if k not in _RESERVED}) + "\n" for r in kept
    )
    if path.read_text(encoding="utf-8") == text:
        return
    number = 1
    while (backup := path.with_name(f"metrics-{number}.jsonl")).exists():
        number += 1
    aside = path.with_suffix(".new")
    aside.write_text(text, encoding="utf-8")
    shutil.copyfile(path, backup)
    os.replace(aside, path)
