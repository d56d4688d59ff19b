"""`asyncrl export`: a model folder out of a checkpoint, in one process and tensor by tensor.

Knows no process group; a run may go on meanwhile.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.learner.best_folders import BEST, why_none
from asyncrl.learner.saved import SavedModel
from asyncrl.learner.start import model_fingerprint
from asyncrl.learner.stored import FOLDER, by_age
from asyncrl.models.describe import describe
from asyncrl.models.folder import DTYPES, Stored, weights_of
from asyncrl.models.load import skeleton
from asyncrl.models.names import layout, stream
from asyncrl.models.write import FolderWriter, Plan, planned

log = logging.getLogger(__name__)

FINAL = "model"
"""Folder of a run that is over: the policy after its last update."""

FOLDERS = {"final": FINAL, "best": BEST}
"""Steps that lie as model folders in the run folder."""

Source = Callable[[str], Tensor]
"""A whole live tensor by its name in the state dict."""


def export_step(
    run_dir: Path,
    step: str,
    directory: Path,
    dtype: str | None = None,
    model: str | None = None,
    force: bool = False,
) -> int:
    """Write the policy of a run as it was at a step into a folder that transformers loads; the bytes of its weights.

    step: the number of an update that has a checkpoint, `last` for the newest, `final` for the end of a run that is
    over, `best` for what learner.keep_best kept. dtype: float32, bfloat16 or float16; None stores each weight as the
    start model does. model: where the start model lies now. force: replace a model folder of that name. Every fault
    is a ConfigError with its remedy.
    """
    config = _config(run_dir)
    start = Path(model or config.model.path)
    _check_start(start, config)
    directory = _check_target(directory, force, (run_dir, start))
    folder = _step_folder(run_dir, step, config.learner.keep_best)
    # It computes nothing: every family has the eager implementations.
    skeletal = skeleton(start, dtype or "float32", attention="eager", experts="eager")
    # What the run wrote as a folder has its own config.json, with its own dtype.
    is_folder = step in FOLDERS
    rest = folder if is_folder else start
    source = _of_folder(skeletal, folder) if is_folder else _of_checkpoint(skeletal, folder, config, start)
    plan = _plan(skeletal, weights_of(start) if dtype is None else None)
    stored_in = dtype or (_usual(plan) if is_folder else None)
    return _write(skeletal, source, plan, directory, rest, stored_in)


def _write(model: nn.Module, source: Source, plan: list[Plan], directory: Path, rest: Path, dtype: str | None) -> int:
    dtypes = {tensor.name: tensor.dtype for tensor in plan}
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        writer = FolderWriter(directory, plan)
        try:
            for name, tensor in stream(model, whole=source):
                writer.add(name, tensor.to(dtypes[name]))
            writer.copy_rest(rest, dtype)
            writer.finish()
        finally:
            writer.give_up()
    except OSError as exc:
        raise WeightSyncError(f"{directory} cannot be written: {exc}") from exc
    return sum(tensor.nbytes for tensor in plan)


def _plan(model: nn.Module, as_stored: dict[str, Stored] | None) -> list[Plan]:
    """What is to be written. as_stored: take the dtypes of these, else those of the model."""
    plan = planned(model)
    if as_stored is None:
        return plan
    # A folder with older names than transformers writes today has no word on some.
    usual = getattr(
        torch, Counter(s.dtype for s in as_stored.values() if s.dtype in DTYPES.values()).most_common(1)[0][0]
    )
    return [
        t._replace(dtype=getattr(torch, as_stored[t.name].dtype) if t.name in as_stored else usual)
        if t.dtype.is_floating_point
        else t
        for t in plan
    ]


def _usual(plan: list[Plan]) -> str:
    """The dtype of most weights."""
    return str(Counter(t.dtype for t in plan if t.dtype.is_floating_point).most_common(1)[0][0]).removeprefix("torch.")


def _of_checkpoint(model: nn.Module, folder: Path, config: Config, start: Path) -> Source:
    saved = SavedModel(folder)
    if saved.state.fingerprint != model_fingerprint(config, describe(start)):
        raise ConfigError(
            f"{folder} is of another model than {str(start)!r}, or was written by another asyncrl; give the folder "
            "that the run started from as --model"
        )
    live, same = model.state_dict(), _same(model)
    held = {name: next((n for n in (name, *same.get(name, ())) if n in saved), None) for name in layout(model)}
    lacking = [name for name, at in held.items() if at is None]
    if lacking:
        raise ConfigError(f"{folder} lacks {lacking[:5]}; it is of another model or asyncrl")

    def get(name: str) -> Tensor:
        return saved.get(held[name] or name, tuple(live[name].shape))

    return get


def _same(model: nn.Module) -> dict[str, list[str]]:
    """Names of one parameter that has several: a checkpoint has it under any of them."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: names for names in by_id.values() for name in names if len(names) > 1}


def _of_folder(model: nn.Module, folder: Path) -> Source:
    stored, live, pieces = weights_of(folder), model.state_dict(), layout(model)
    files = {name: safe_open(folder / name, framework="pt") for name in {s.file for s in stored.values()}}

    def get(name: str) -> Tensor:
        parts = [(piece, files[stored[piece.hf_name].file].get_tensor(piece.hf_name)) for piece in pieces[name]]
        whole = torch.empty(live[name].shape, dtype=parts[0][1].dtype)
        for piece, value in parts:
            piece.write(whole, value)
        return whole

    lacking = [p.hf_name for parts in pieces.values() for p in parts if p.hf_name not in stored]
    if lacking:
        raise ConfigError(f"{folder} lacks {lacking[:5]}; it is of another model")
    return get


def _config(run_dir: Path) -> Config:
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run_dir} is no run folder: it has no config.yaml; give the folder run.dir/run.name")
    return load_config([str(file)], [])


def _check_start(start: Path, config: Config) -> None:
    if not (start / "config.json").is_file():
        raise ConfigError(
            f"the start model {str(start)!r} of the run (model.path={config.model.path!r}) has no config.json; config, "
            "tokenizer and names are taken from there: give where it lies now as --model"
        )


def _check_target(directory: Path, force: bool, taken: tuple[Path, ...]) -> Path:
    """The target, resolved. Only a model folder is ever replaced, and none that this run needs."""
    target = directory.resolve()
    if target.is_dir() and not any(target.iterdir()):
        return target
    if not target.exists():
        return target
    if not force:
        raise ConfigError(f"{directory} exists and is not empty; give another folder, or --force to replace it")
    if any(path.resolve().is_relative_to(target) or target.is_relative_to(path.resolve()) for path in taken):
        raise ConfigError(f"{directory} is in use by this run or holds it; give another folder")
    if not (target / "config.json").is_file():
        raise ConfigError(f"{directory} is no model folder, so --force does not replace it; give another one")
    return target


def _step_folder(run_dir: Path, step: str, keep_best: str | None) -> Path:
    """The folder of a step. ConfigError with the steps that there are, and why there is no best one."""
    folders = by_age(run_dir / FOLDER)
    if step == "last" and folders:
        return folders[0]
    written = {name: run_dir / f for name, f in FOLDERS.items() if (run_dir / f / "config.json").is_file()}
    wanted = run_dir / FOLDER / f"u{step}"
    if step in written or wanted in folders:
        return written.get(step, wanted)
    steps = sorted(int(folder.name[1:]) for folder in folders)
    there = [*map(str, steps), *(["last"] if steps else []), *written]
    why = f": {why_none(run_dir, keep_best)}" if step == "best" else ""
    raise ConfigError(
        f"{run_dir} has no step {step!r}{why}; it has {', '.join(there) or 'no other'}"
        if there or why
        else f"{run_dir} has no checkpoint (learner.checkpoint_every, learner.keep_checkpoints) and is not over yet"
    )
