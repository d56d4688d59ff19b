"""The progress line of `asyncrl run` and its summary, read from metrics.jsonl as it grows."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from asyncrl.learner.alarming import FILE as ALARMS

Record = dict[str, Any]

LARGE = 1e6
"""Numbers from here on are shown with an exponent."""


class Tail:
    """Reads the complete lines that were added to a JSONL file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def read(self) -> list[Record]:
        """New records, none while the file does not exist."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]


class View:
    """Latest values by name, and the held-out accuracy by update."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.latest: dict[str, float] = {}
        self.accuracy: dict[int, tuple[float, float]] = {}
        self.done = 0
        self.rewards: list[float] = []
        self.unanswered: dict[int, float] = {}
        """Held-out responses without an answer, by evaluated update."""

    def add(self, record: Record) -> None:
        """Take in one record of metrics.jsonl."""
        self.latest |= {k: v for k, v in record.items() if isinstance(v, int | float)}
        if "eval/sampled_accuracy" in record or "eval/greedy_accuracy" in record:
            pair = (number(record, "eval/sampled_accuracy"), number(record, "eval/greedy_accuracy"))
            self.accuracy[int(record["update"])] = pair
            self.unanswered[int(record["update"])] = number(record, "eval/failed")
        if "policy/reward" in record:
            self.rewards.append(number(record, "policy/reward"))
            self.done = int(record["update"]) + int(record.get("optim/stepped", 1))

    def line(self) -> str:
        """reward, held-out accuracy, lag, drift and token rates as one line."""
        last = self.accuracy[max(self.accuracy)][0] if self.accuracy else math.nan
        shown = {"reward": "policy/reward", "lag": "staleness/lag_mean", "drift": "drift/mean"}
        values = {word: number(self.latest, key) for word, key in shown.items()}
        parts = [f"{w} {_shown(v, d)}" for (w, v), d in zip(values.items(), (3, 1, 4), strict=True)]
        parts.insert(1, f"held-out {_shown(last, 3)}")
        for word in ("generator", "learner"):
            rate = number(self.latest, f"throughput/{word}_tokens_per_s")
            parts.append(f"{word} {_shown(rate, 0)} tok/s")
        return "  ".join(parts)


def _shown(value: float, digits: int) -> str:
    """A number, or a dash for what was not measured (yet)."""
    if math.isnan(value):
        return "-"
    # Rewards of users may be of any size.
    return f"{value:.{digits}f}" if abs(value) < LARGE else f"{value:.4g}"


def number(record: Record, key: str) -> float:
    """Value of a record, NaN when it is missing or not a number."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


@contextmanager
def progress_bar(view: View, console: Console, enabled: bool) -> Iterator[Any]:
    """Yields a function to call after new records: a live bar on a terminal, else sparse lines."""
    if not (enabled and console.is_terminal):
        state = {"printed": 0.0, "done": -1}

        def plain() -> None:
            now = time.monotonic()
            if (
                enabled
                and view.done
                and view.done != state["done"]
                and (now - state["printed"] > 10 or view.done >= view.updates)
            ):
                state["printed"], state["done"] = now, view.done
                console.print(f"update {view.done}/{view.updates}  {view.line()}", highlight=False, soft_wrap=True)

        yield plain
        return
    columns = (TextColumn("updates"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[line]}"), console=console) as bar:
        task = bar.add_task("train", total=view.updates, line="starting")
        yield lambda: bar.update(task, completed=view.done, line=view.line() if view.latest else "starting")


def print_summary(
    view: View, console: Console, run_dir: Path, wall_s: float, cpu_s: float, alarms: Sequence[str] = ()
) -> None:
    """Accuracy before and after, what the run cost, what was wrong, and how to open the dashboard.

    alarms: names of those that went on.
    """
    table = Table(title=f"run {run_dir}", show_header=False)
    table.add_row("updates", f"{view.done} of {view.updates}")
    if view.accuracy:
        first, last = min(view.accuracy), max(view.accuracy)
        table.add_row(f"held-out accuracy, sampled (update {first} -> {last})", _arrow(view, first, last, 0))
        table.add_row("held-out accuracy, greedy", _arrow(view, first, last, 1))
    if view.rewards:
        table.add_row("training reward (first -> last)", _change(view.rewards[0], view.rewards[-1]))
    for label, key in (
        ("mean lag, last measured", "staleness/lag_mean"),
        ("kl_k3, last measured", "mismatch/kl_k3"),
        ("mean drift, last measured", "drift/mean"),
        ("step time overlapped by generation", "throughput/overlap_fraction"),
    ):
        if not math.isnan(value := number(view.latest, key)):
            table.add_row(label, f"{value:.4g}")
    table.add_row("wall seconds / CPU seconds", f"{wall_s:.0f} / {cpu_s:.0f}")
    console.print(table)
    for line in _troubles(view, run_dir, alarms):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if (run_dir / "model").is_dir():
        console.print(f"model:     {run_dir / 'model'}", highlight=False, soft_wrap=True)
    console.print(dashboard(run_dir), highlight=False, soft_wrap=True)


def _troubles(view: View, run_dir: Path, alarms: Sequence[str]) -> list[str]:
    lines = [f"alarms:    {', '.join(alarms)} ({run_dir / ALARMS})"] if alarms else []
    last = max(view.unanswered, default=None)
    if last is not None and (missing := view.unanswered[last]) > 0:
        lines.append(
            f"held-out:  the last evaluation (update {last}) was cut short: {missing:.0f} responses are missing"
        )
    return lines


class Raised:
    """The alarms that went on since it was made, from RUN/alarms.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / ALARMS
        self._begin = self._file.stat().st_size if self._file.exists() else 0

    def names(self) -> list[str]:
        """Each once, in the order in which they went on first. Lines that are none are passed over."""
        if not self._file.exists():
            return []
        found: dict[str, None] = {}
        for line in self._file.read_bytes()[self._begin :].splitlines():
            try:
                entry = json.loads(line)
                found |= {str(entry["name"]): None} if entry["on"] else {}
            except (ValueError, KeyError, TypeError):
                continue
        return list(found)


def watching(run_dir: Path, tensorboard: bool) -> list[str]:
    """How to watch a run while it goes. tensorboard: whether it writes the dashboard."""
    status = f"watch:     {_command('asyncrl')} status {run_dir} --watch"
    return [status, dashboard(run_dir)] if tensorboard else [status]


def dashboard(run_dir: Path) -> str:
    """How to open the dashboard, on its ready pages."""
    command = f"{_command('tensorboard')} --logdir {run_dir / 'tb'}"
    return f"dashboard: {command}   then open http://127.0.0.1:6006/#custom_scalars"


def _command(name: str) -> str:
    """The command as this user can paste it: beside the running python unless it is on the PATH."""
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) or not beside.exists():
        return name
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def _arrow(view: View, first: int, last: int, which: int) -> str:
    return _change(view.accuracy[first][which], view.accuracy[last][which])


def _change(first: float, last: float) -> str:
    return f"{_shown(first, 3)} -> {_shown(last, 3)}"
