"""What a run folder says of a run whose replay is not there: is it running, finished, to be resumed. Asks nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.learner.stored import newest
from asyncrl.process import OWN_ERROR
from asyncrl.replay.snapshot import FILE as SNAPSHOT
from asyncrl.resume import LOCKS, OWNER, is_held

TAIL_BYTES = 65536
"""Of a file, to find its last lines."""


class Report(NamedTuple):
    """A run folder. updates: steps that its metrics have; checkpoint: update of the newest one; errors: last of each
    role's log."""

    running: bool
    finished: bool
    updates: int
    total: int
    checkpoint: int | None
    snapshot: bool
    errors: dict[str, str]


def look(folder: Path) -> Report:
    """Read what is there; a folder that is being written is read as far as it goes."""
    try:
        total = load_config(folder / "config.yaml").learner.updates
    except ConfigError:
        total = 0
    progress = newest(folder)
    snapshot = (folder / SNAPSHOT).exists()
    return Report(
        running=any(is_held(folder / name) for name in (*LOCKS, OWNER)),
        finished=(folder / "model").is_dir() and not snapshot,
        updates=_updates(folder / "metrics.jsonl"),
        total=total,
        checkpoint=progress.update if progress is not None else None,
        snapshot=snapshot,
        errors={log.stem: line for log in sorted((folder / "logs").glob("*.log")) if (line := _error(log))},
    )


def words(folder: Path, report: Report) -> list[str]:
    """The same for people, and what they can do."""
    r = report
    if r.running:
        return [
            f"{folder} has running processes, but its replay does not answer: it is being started, or started again",
            f"what it does: {folder / 'logs' / 'replay.log'}",
        ]
    made = f"{r.updates} of {r.total} updates"
    if r.finished:
        return [
            f"{folder} is finished: {made}",
            f"its model: {folder / 'model'}, or `asyncrl export {folder} final DIR`",
        ]
    lines = [f"{folder} is not running: {made} were made"]
    lines += [f"last error in logs/{role}.log: {text}" for role, text in r.errors.items()]
    if r.checkpoint is None and not r.snapshot:
        return [*lines, "it has neither a checkpoint nor a snapshot of replay: begin a new run"]
    where = f"checkpoint of update {r.checkpoint}" if r.checkpoint is not None else "start model (no checkpoint)"
    return [*lines, f"go on from its {where}: asyncrl run {folder / 'config.yaml'} --resume"]


def _updates(file: Path) -> int:
    """Steps made, by the last record of a step."""
    for line in reversed(_tail(file).splitlines()):
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # half a line at either end
        if "policy/reward" in record:
            return int(record["update"]) + int(record.get("optim/stepped", 1))
    return 0


def _error(log: Path) -> str:
    """The last error that asyncrl itself logged, "" without."""
    found = [line for line in _tail(log).splitlines() if OWN_ERROR in line]
    return found[-1].partition(OWN_ERROR)[2][:500] if found else ""


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
