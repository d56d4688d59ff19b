"""What `asyncrl eval` evaluates: a model folder, or the policy of a run at a step. Every fault is a ConfigError."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError

POLICY = "policy.part"
"""Folder in OUT of a checkpoint that was exported to be evaluated, or of the best policy; removed at the end."""

_HASHED = ("config.json", "generation_config.json", "tokenizer.json", "*.safetensors")
_BLOCK = 2**24


class Subject(NamedTuple):
    """config: with the model that is evaluated as model.path. step: of run_dir, or "" for a model folder."""

    config: Config
    out: Path
    run_dir: Path | None = None
    step: str = ""


def subject(target: Path, arguments: Sequence[str], out: Path | None, step: str | None) -> Subject:
    """What the command line names. arguments: CONFIG files and key=value; without a file, those of the run.

    A run's step is final, best, last or the number of an update; default: final, else the newest checkpoint. Nothing is
    exported yet: config.model.path of such a step is where it will lie.
    """
    files = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    # A run folder that is over holds both: its policy lies in RUN/model.
    if (target / "config.yaml").is_file():
        chosen = _step(target, step)
        out = out or target / "eval" / chosen
        # The run may put another policy in the place of its best one, in the middle of an evaluation.
        model = (_there(target, chosen) if chosen != "best" else None) or out / POLICY
        config = _load(files or [str(target / "config.yaml")], overrides, model)
        return Subject(config, out, target, chosen)
    if (target / "config.json").is_file():
        if step is not None:
            raise ConfigError(f"--step={step} is of a run, and {target} is a model folder; leave it out")
        if not files:
            raise ConfigError(
                f"{target} is a model folder, which says nothing of tasks; give a config as well: "
                f"asyncrl eval {target} configs/quickstart.yaml"
            )
        out = out or Path("eval") / target.resolve().name
        return Subject(_load(files, overrides, target), out)
    raise ConfigError(
        f"{target} is neither a model folder (it has no config.json) nor a run folder (it has no config.yaml); give a "
        "Hugging Face folder, or the folder run.dir/run.name"
    )


def is_exported(what: Subject) -> bool:
    """Whether `policy` writes a folder of its own into OUT; hold the lock of OUT around it."""
    return what.run_dir is not None and Path(what.config.model.path).name == POLICY


@contextlib.contextmanager
def policy(what: Subject) -> Iterator[Path]:
    """The model folder; of a checkpoint, and of the best policy, one of its own, which is gone afterwards."""
    model = Path(what.config.model.path)
    if what.run_dir is None or not is_exported(what):
        yield model
        return
    shutil.rmtree(model, ignore_errors=True)  # of a process that was killed
    try:
        if what.step == "best":
            _pin(what.run_dir / "best", model)
        else:
            from asyncrl.learner.export import export_step

            m = what.config.model
            dtype = "bfloat16" if m.dtype == "bfloat16" and m.router_dtype == "checkpoint" else "float32"
            export_step(what.run_dir, what.step.removeprefix("u"), model, dtype)
        yield model
    finally:
        shutil.rmtree(model, ignore_errors=True)


def _pin(model: Path, to: Path) -> None:
    """The files of a folder that may be renamed and removed at any time: links to them, or copies on another disk."""
    try:
        folder = os.open(model, os.O_RDONLY | os.O_DIRECTORY)
        try:
            to.mkdir(parents=True)
            for name in os.listdir(folder):
                try:
                    os.link(name, to / name, src_dir_fd=folder)
                except OSError as exc:
                    if exc.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP):
                        raise
                    with open(os.open(name, os.O_RDONLY, dir_fd=folder), "rb") as data, (to / name).open("wb") as copy:
                        shutil.copyfileobj(data, copy)
        finally:
            os.close(folder)
    except OSError as exc:
        raise ConfigError(f"{model} cannot be taken to {to} ({exc}); the run may have replaced it: try again") from exc


def fingerprint(model: Path) -> str:
    """Hash of all that decides what a model folder samples: weights, config and tokenizer."""
    digest = xxhash.xxh3_128()
    for file in sorted({f for pattern in _HASHED for f in model.glob(pattern)}):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        if file.name == "config.json":
            digest.update(_meaning(file))
            continue
        with file.open("rb") as data:
            while block := data.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _meaning(file: Path) -> bytes:
    return json.dumps(json.loads(file.read_bytes()), sort_keys=True).encode()


def _load(files: Sequence[str], overrides: Sequence[str], model: Path) -> Config:
    config = load_config(files, [*overrides, f"model.path={json.dumps(str(model))}", "generator.model=null"])
    if config.generator.sglang.urls and config.generator.engine == "sglang":
        raise ConfigError(
            "generator.sglang.urls names running servers, which sample the weights that they hold and not the model "
            "that is evaluated; set generator.sglang.urls=[] and asyncrl eval starts a server with it"
        )
    return config


def _step(run_dir: Path, step: str | None) -> str:
    """Its name: final, best, or u<update>."""
    from asyncrl.learner.stored import FOLDER, by_age

    saved = [folder.name for folder in by_age(run_dir / FOLDER)]
    there = [s for s in ("final", "best") if _there(run_dir, s) is not None]
    if step in there:
        return str(step)
    if step == "last" or (step is None and "final" not in there):
        if saved:
            return saved[0]
    elif step is None:
        return "final"
    elif f"u{step}" in saved:
        return f"u{step}"
    why = ""
    if step == "best":
        from asyncrl.learner.best_folders import why_none

        why = f": {why_none(run_dir, load_config([str(run_dir / 'config.yaml')], []).learner.keep_best)}"
    steps = [*sorted((name[1:] for name in saved), key=int), *(["last"] if saved else []), *there]
    raise ConfigError(
        f"{run_dir} has no step {step or 'last'!r}{why}; it has {', '.join(steps) or 'no other'}; name one with --step"
        if steps or why
        else f"{run_dir} has no checkpoint (learner.checkpoint_every, learner.keep_checkpoints) and is not over yet"
    )


def _there(run_dir: Path, step: str) -> Path | None:
    """The model folder of a step that lies in the run as one."""
    folder = run_dir / {"final": "model", "best": "best"}.get(step, "-")
    return folder if (folder / "config.json").is_file() else None
