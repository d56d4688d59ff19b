"""`asyncrl run --resume`: which run is continued, whether it can be, and what of its config may be another now."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from asyncrl import tunable
from asyncrl.config import Config, load_config, read_overrides, save_config, validate
from asyncrl.errors import ConfigError
from asyncrl.learner.stored import newest
from asyncrl.replay.knobs import Knobs
from asyncrl.replay.snapshot import FILE as SNAPSHOT
from asyncrl.replay.snapshot import Snapshot, SnapshotFile, fingerprint
from asyncrl.replay.untune import order, ordered
from asyncrl.types import ModelInfo

CONFIG = "config.yaml"
LOCKS = ("metrics.lock", "replay.lock")
"""Held by the learner and by replay as long as they live."""
OWNER = "run.lock"
"""Held by the `asyncrl run` of the folder as long as it lives."""

FIXED = ("task.", "run.seed", "algorithm.group_size")
"""Settings that say which prompts there are, in which order, and what their ids mean (or their prefix)."""
_PLACE = ("run.dir", "run.name")


def located(config: Config, files: Sequence[str]) -> Config:
    """The config with run.dir and run.name of the folder from which a file was taken, if one is RUN/config.yaml.

    So a folder that was moved, or a relative run.dir seen from another place, is found.
    """
    for file in map(os.path.abspath, files):
        folder = Path(file).parent
        if Path(file).name == CONFIG and any((folder / n).exists() for n in (SNAPSHOT, "checkpoints", *LOCKS)):
            tree = config.model_dump(mode="json")
            tree["run"] |= {"dir": str(folder.parent), "name": folder.name}
            return validate(tree)
    return config


def own(folder: Path) -> IO[str]:
    """Lock a run folder for one `asyncrl run`, until what is returned is closed. ConfigError when another has it.

    Without it two that begin together would both see the roles' locks free.
    """
    handle = (folder / OWNER).open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        handle.close()
        raise ConfigError(f"{folder} is in use: another `asyncrl run` holds {OWNER}; stop that one first") from exc
    return handle


def resumable(config: Config, model: ModelInfo, overrides: Sequence[str] = ()) -> list[str]:
    """What will be done, in words; the run folder keeps `config`, and what it held before as config-<n>.yaml.

    overrides: KEY=VALUE words that `config` has already; of these keys it wins over what was tuned.
    Raises ConfigError when there is nothing to resume, the run is over or running, or a setting cannot change.
    """
    folder = config.run_dir
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"nothing to resume: {folder} has no {CONFIG}; run without --resume to begin a run")
    for name in LOCKS:
        if is_held(folder / name):
            raise ConfigError(f"{folder} is in use: a process holds {name}; stop that run, or wait for it")
    found, has_snapshot = newest(folder), (folder / SNAPSHOT).exists()
    if found is None and not has_snapshot:
        over = (folder / "model").is_dir()
        why = "it made its last update, and model/ is there" if over else "it has neither checkpoints nor a snapshot"
        raise ConfigError(f"nothing to resume in {folder}: {why}; run without --resume to begin a run")
    saved = load_config(folder / CONFIG)
    changes = differences(saved, config)
    _check(changes, saved, config)
    snapshot = _check_snapshot(config, model, changes)
    said = [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items()]
    if found is None:
        said.append("there is no checkpoint yet: training begins again from model.path")
    elif not has_snapshot:
        said.append(f"{SNAPSHOT} is gone: every prompt is given out again, from the first")
    if snapshot is not None:
        said += _tuned(config, snapshot, overrides)
    if changes:
        _replace(folder / CONFIG, config)
    return said


def _tuned(config: Config, snapshot: Snapshot, overrides: Sequence[str]) -> list[str]:
    """What of the live settings ends, by order to the next replay, and what stays in force against the config."""
    named = {key for key in read_overrides(overrides) if tunable.is_tunable(key)}
    knobs = Knobs(config, untune=named | ordered(config.run_dir))
    ended = knobs.load(snapshot.queue.knobs)
    if named & ended.keys():
        order(config.run_dir, named & ended.keys())
    said = [f"no longer tuned: {key}: {old} -> {new}" for key, (old, new) in ended.items() if old != new]
    state = knobs.state()
    return said + [
        f"tuned, still in force: {key}={value} (config {state['config'][key]}); "
        f"it ends by: asyncrl tune RUN {key}={state['config'][key]}"
        for key, value in state["values"].items()
    ]


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Values of both by key, where they differ; the place of the run folder is not compared."""
    one, two = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    keys = [k for k in {**one, **two} if k not in _PLACE]
    return {k: (one.get(k), two.get(k)) for k in keys if one.get(k) != two.get(k)}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def _check(changes: dict[str, tuple[Any, Any]], saved: Config, config: Config) -> None:
    problems = [
        f"{key}={new!r} was {old!r}, and cannot change within a run: prompts and their ids follow from it"
        for key, (old, new) in changes.items()
        if key.startswith(FIXED)
    ]
    dtypes = saved.model.dtype, config.model.dtype
    if "float64" in dtypes and dtypes[0] != dtypes[1]:
        problems.append(
            f"model.dtype={dtypes[1]} was {dtypes[0]}, and cannot change within a run: checkpoints hold one precision"
        )
    if config.learner.updates < saved.learner.updates:
        problems.append(
            f"learner.updates={config.learner.updates} was {saved.learner.updates}: a run may get longer, not shorter"
        )
    if problems:
        raise ConfigError("\n".join(f"{p}; set it back, or choose another run.name without --resume" for p in problems))


def _check_snapshot(config: Config, model: ModelInfo, changes: dict[str, tuple[Any, Any]]) -> Snapshot | None:
    """Replay would refuse a snapshot of another model, or one that is damaged, only after it was started."""
    snapshot = SnapshotFile(config.run_dir, fingerprint(config, model)).read()
    if snapshot is not None and snapshot.done and "learner.updates" in changes:
        raise ConfigError(
            f"{config.run_dir} made its last update, and only its last evaluation is open: learner.updates cannot "
            f"become {config.learner.updates} any more; set it back to {changes['learner.updates'][0]}"
        )
    return snapshot


def is_held(lock: Path) -> bool:
    """True while a process holds that lock. Asks for a shared one, so that whoever only looks sees no other looker."""
    if not lock.exists():
        return False
    with lock.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _replace(file: Path, config: Config) -> None:
    """The roles read the new config; the old one stays beside it."""
    number = 1
    while (kept := file.with_name(f"config-{number}.yaml")).exists():
        number += 1
    aside = file.with_name(f"{CONFIG}.part")
    save_config(config, aside)
    shutil.copyfile(file, kept)
    aside.replace(file)
