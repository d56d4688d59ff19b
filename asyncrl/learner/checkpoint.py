"""RUN/checkpoints/u<update>: what a learner that was killed goes on from.

Tensors lie in safetensors files that torch.distributed.checkpoint splits over the ranks and reads back on any
number of them; numbers and the hash of every file in state.json. A checkpoint is written aside and renamed last,
so one that has its name is complete. Nothing in it is pickled. The ranks share the run folder.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from asyncrl.errors import ConfigError, TrainingError
from asyncrl.learner.shard import Policy, World
from asyncrl.learner.step import Updater
from asyncrl.learner.table import all_bytes, all_max

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
FORMAT = 1
STATE = "state.json"
_BLOCK = 2**24

_SLICE_S = 1.0
"""Files are read in slices of this length, so that no rank waits for another longer than a collective may take."""

Hashes = dict[str, str]
"""xxh3 of files by name."""


class Progress(msgspec.Struct, frozen=True):
    """Where the learner was. batches: how many it used up, trained or skipped; carry: of the RDC quota."""

    epoch: int
    update: int
    batches: int
    carry: float
    skipped: int = 0
    skipped_in_a_row: int = 0
    unforced_in_a_row: int = 0

    def in_epoch(self, epoch: int) -> Progress:
        """The same in another run epoch."""
        return msgspec.structs.replace(self, epoch=epoch)


class _State(msgspec.Struct, frozen=True):
    """state.json. files: xxh3 by name."""

    format: int
    fingerprint: str
    progress: Progress
    files: Hashes


class Checkpoints:
    """The checkpoints of one run folder. Every method but the constructor is a collective.

    fingerprint: what gives the tensors their meaning; a checkpoint with another one is refused.
    """

    def __init__(self, run_dir: Path, fingerprint: str, keep: int, world: World) -> None:
        self._folder, self._fingerprint, self._keep, self._world = run_dir / FOLDER, fingerprint, keep, world

    def load(self, policy: Policy, updater: Updater) -> Progress | None:
        """Fill policy and optimizer from the newest complete checkpoint; None without one.

        A damaged one is left out with a warning when there is an older one. ConfigError when none is left, or
        when the newest is of another model or format.
        """
        self._clear_leftovers()
        damaged: dict[Path, str] = {}
        names = _names(self._folder)
        if -all_max([-len(names)], self._world)[0] != all_max([len(names)], self._world)[0]:
            raise TrainingError(f"the ranks see different files in {self._folder}; they must share the run folder")
        for folder in sorted((self._folder / n for n in names), key=_age, reverse=True):
            listed, why = self._state(folder)
            why = self._damage(folder, listed) or why
            if not any(all_max([bool(why)], self._world)):
                progress = self._read(folder, policy, updater)
                if damaged and self._world.is_writer:
                    log.warning("%s is used instead of what is damaged: %s", folder, "; ".join(damaged.values()))
                    self._set_aside(damaged)
                return progress
            damaged[folder] = why or f"{folder} is damaged, says another rank"
        if damaged:
            raise ConfigError(f"{'; '.join(damaged.values())}. {_REMEDY.format(self._folder)}")
        return None

    def save(self, policy: Policy, updater: Updater, progress: Progress) -> bool:
        """Write a checkpoint and remove those beyond `keep`. False when it could not be written, or must not be.

        What is not finite is never saved.
        """
        tensors = _tensors(policy, updater)
        broken = next((n for n, t in tensors.items() if not _is_finite(t)), "")
        if any(all_max([bool(broken)], self._world)):
            log.error("update %d is not saved: %s is not finite", progress.update, broken or "a tensor of another rank")
            return False
        final = self._folder / f"u{progress.update}"
        aside = final.with_name(f"{final.name}.part")
        try:
            save(tensors, storage_writer=HuggingFaceStorageWriter(str(aside), save_distributed=True))
        except (CheckpointException, OSError) as exc:
            log.error("%s was not written: %s", final, exc)
            self._clear_leftovers()
            return False
        files, why = self._hash_all(aside)
        if not why and self._world.is_writer:
            try:
                self._seal(aside, final, progress, files)
            except OSError as exc:
                why = str(exc)
        if not any(all_max([bool(why)], self._world)):
            return True
        if self._world.is_writer:
            log.error("%s was not written: %s", final, why)
            # What is left of it would keep a full disk full.
            shutil.rmtree(aside, ignore_errors=True)
        return False

    def remove(self) -> None:
        """The run is over: nobody goes on from here."""
        if self._world.is_writer:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _hash_all(self, aside: Path) -> tuple[Hashes, str]:
        """Hashes of what lies in a folder, and what went wrong if not "", on every rank. A collective.

        Every rank reads its share. Rank 0 says which files there are: over a network others may see them later.
        """
        found: Hashes = {}
        why = ""
        try:
            names = sorted(f.name for f in aside.iterdir()) if self._world.is_writer else []
        except OSError as exc:
            names, why = [], str(exc)
        names = msgspec.json.decode(all_bytes(msgspec.json.encode(names), self._world)[0], type=list[str])
        why = self._hash_share(aside, names, found) or why
        for part in all_bytes(msgspec.json.encode((found, why)), self._world):
            theirs, failed = msgspec.json.decode(part, type=tuple[Hashes, str])
            found, why = found | theirs, why or failed
        return found, why

    def _hash_share(self, folder: Path, names: list[str], found: Hashes) -> str:
        """Hash this rank's share of the files into `found`; what went wrong, or "". A collective."""
        work = _hashing(folder, names[self._world.rank :: self._world.size], found)
        why, busy = "", False
        while True:
            until = time.monotonic() + _SLICE_S
            try:
                while (busy := next(work, False)) and time.monotonic() < until:
                    pass
            except OSError as exc:
                why, busy = str(exc), False
            if not any(all_max([busy], self._world)):
                return why

    def _seal(self, aside: Path, final: Path, progress: Progress, files: Hashes) -> None:
        """state.json, then the name. An older checkpoint of that name was damaged, or of an undone timeline."""
        state = _State(FORMAT, self._fingerprint, progress, files)
        (aside / STATE).write_bytes(msgspec.json.encode(state))
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        for old in sorted((self._folder / n for n in _names(self._folder)), key=_age, reverse=True)[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)

    def _set_aside(self, damaged: Iterable[Path]) -> None:
        """Out of the way of new ones, still there to be looked at."""
        for folder in damaged:
            aside = folder.with_name(f"{folder.name}.damaged")
            try:
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
            except OSError as exc:
                log.warning("%s stays where it is: %s", folder, exc)

    def _clear_leftovers(self) -> None:
        if self._world.is_writer:
            for left in self._folder.glob("*.part"):
                shutil.rmtree(left, ignore_errors=True)
        all_max([0.0], self._world)

    def _state(self, folder: Path) -> tuple[Hashes, str]:
        """The files of a checkpoint; none when state.json cannot be read, and why."""
        try:
            state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
        except (OSError, msgspec.MsgspecError) as exc:
            return {}, f"{folder / STATE} cannot be read ({exc})"
        if state.format != FORMAT or state.fingerprint != self._fingerprint:
            raise ConfigError(
                f"{folder / STATE} is of another model, model.dtype or asyncrl; {_REMEDY.format(self._folder)}"
            )
        return state.files, ""

    def _damage(self, folder: Path, files: Hashes) -> str:
        """What is wrong with this rank's share of the files, or "". A collective."""
        found: Hashes = {}
        why = self._hash_share(folder, sorted(files), found)
        if why:
            return f"a file cannot be read ({why})"
        broken = next((name for name, digest in found.items() if digest != files[name]), "")
        return f"{folder / broken} is damaged (its hash is another one)" if broken else ""

    def _read(self, folder: Path, policy: Policy, updater: Updater) -> Progress:
        tensors = _tensors(policy, updater)
        try:
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
        except CheckpointException as exc:
            raise ConfigError(f"{folder} does not fit the model ({exc}); {_REMEDY.format(self._folder)}") from exc
        updater.load_steps(tensors["optimizer.step"])
        return msgspec.json.decode((folder / STATE).read_bytes(), type=_State).progress


_REMEDY = "choose another run.name, or remove {} to begin again from model.path"


def _names(folder: Path) -> list[str]:
    return [f.name for f in folder.glob("u*") if f.name[1:].isdigit()]


def _age(folder: Path) -> tuple[int, int]:
    """(epoch, update) as far as it can be read: a later run epoch is newer at a lower update."""
    epoch = 0
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        epoch = msgspec.json.decode((folder / STATE).read_bytes(), type=_State).progress.epoch
    return epoch, int(folder.name[1:])


def _tensors(policy: Policy, updater: Updater) -> dict[str, Tensor]:
    """What must be saved, by name; reading into these tensors is loading (but for the steps)."""
    return dict(_model(policy)) | updater.state()


def _model(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    shared = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    for name, parameter in policy.named_parameters():
        yield f"model.{name}", parameter.detach()
    for name, tensor in policy.state_dict().items():
        if name not in shared:
            yield f"model.{name}", tensor


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not local.is_floating_point() or bool(torch.isfinite(local).all())


def _hashing(folder: Path, names: Iterable[str], found: Hashes) -> Iterator[bool]:
    """Hash files into `found`, one block at a step; True while it goes on."""
    for name in names:
        digest = xxhash.xxh3_64()
        with (folder / name).open("rb") as data:
            while block := data.read(_BLOCK):
                digest.update(block)
                yield True
        found[name] = digest.hexdigest()


def fingerprint(parts: Mapping[str, object]) -> str:
    """Hash of JSON-like values."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(parts, order="sorted"))
