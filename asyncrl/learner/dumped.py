"""Which dumps a run folder has, and which of them a later learner undid. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.learner.dump import FOLDER, named
from asyncrl.metrics.sink import FILE, read_jsonl, timeline


def dumps_in(run_dir: Path, updates: Sequence[int] = ()) -> dict[int, Path]:
    """Folders of the dumps by update, in order: of these updates, or all. ConfigError says what there is, or what to
    do to get some."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is no run folder: it has no config.yaml; give the folder run.dir/run.name")
    there = named(run_dir)
    if not there:
        raise ConfigError(
            f"{run_dir / FOLDER} has no dump: run with logging.dump_every=10 (updates between dumps), or go on with "
            "this run: asyncrl run ... --resume logging.dump_every=10"
        )
    lacking = [u for u in updates if u not in there]
    if lacking:
        raise ConfigError(f"{run_dir} has no dump of update {lacking[0]}; it has {', '.join(map(str, there))}")
    return {u: there[u] for u in sorted(set(updates))} if updates else there


def epochs_of(run_dir: Path) -> dict[int, int]:
    """Run epoch of every update that stands, as far as the records say."""
    file = run_dir / FILE
    records = timeline(read_jsonl(file)) if file.is_file() else []
    return {int(r["update"]): int(r["run/epoch"]) for r in records if "run/epoch" in r}


def is_undone(update: int, epoch: int, epochs: Mapping[int, int]) -> bool:
    """True when a later learner went back before this update of a run epoch."""
    return epoch < epochs.get(update, epoch) or (update not in epochs and epoch < max(epochs.values(), default=epoch))
