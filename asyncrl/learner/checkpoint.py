"""RUN/checkpoints/u<update>: what a learner that was killed goes on from.

Every rank writes its shards into a safetensors file of its own (asyncrl.learner.shards), on a thread, while the next
updates run; rank 0 then adds state.json with numbers and the hash of every file. A checkpoint is written aside and
renamed last, so one that has its name is complete. torch.distributed.checkpoint reads it back on any number of ranks.
Nothing in it is pickled. The ranks share the run folder; what lies there, rank 0 decides.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from asyncrl.errors import ConfigError
from asyncrl.learner.shard import Policy, World
from asyncrl.learner.shards import (
    WRITING,
    Job,
    file_of,
    hashing,
    is_finite,
    pieces,
    random_states,
    saved_tensors,
    set_random_states,
)
from asyncrl.learner.step import Updater
from asyncrl.learner.stored import (
    FOLDER,
    FORMAT,
    STATE,
    Hashes,
    Progress,
    State,
    by_age,
    delete,
    flush,
    read_state,
)
from asyncrl.learner.table import all_bytes, all_max

log = logging.getLogger(__name__)

_SLICE_S = 1.0
"""Waits are cut into slices of this length, so that no rank waits for another longer than a collective may take."""


class _Listed(msgspec.Struct, frozen=True):
    """What rank 0 sees of one checkpoint. why: it cannot be read; other: it is of another model or format."""

    name: str
    state: State | None
    why: str = ""
    other: str = ""


class Checkpoints:
    """The checkpoints of one run folder. Every method is a collective unless it says otherwise.

    fingerprint: what gives the tensors their meaning; a checkpoint with another one is refused. limit_s: longest wait
    for a checkpoint that is being written.
    """

    def __init__(self, run_dir: Path, fingerprint: str, keep: int, world: World, limit_s: float = 600.0) -> None:
        self._folder, self._fingerprint, self._keep, self._world = run_dir / FOLDER, fingerprint, keep, world
        self._limit_s = limit_s
        self._job: Job | None = None
        self._gave_up = False
        self.pending: Progress | None = None
        """Being written. The same on every rank, as are the next two."""
        self.newest = -1
        """Update of the newest complete checkpoint, -1 without one."""
        self.failures = 0
        self.stood_s = 0.0
        """Seconds that the learner stood still for checkpoints since the last record."""
        self.write_s = 0.0
        """Seconds in which the slowest rank wrote the last one."""
        self.suspect: int | None = None
        """Update from which on an alarm may find the run bad: the newest checkpoint before it is kept. On rank 0."""

    def load(self, policy: Policy, updater: Updater) -> Progress | None:
        """Fill policy and optimizer from the newest complete checkpoint; None without one.

        A damaged one is left out with a warning when there is an older one. ConfigError when none is left, or
        when the newest is of another model or format.
        """
        damaged: dict[Path, str] = {}
        for listed in self._list():
            folder = self._folder / listed.name
            if listed.other:
                raise ConfigError(listed.other)
            why = listed.why
            if listed.state is not None:
                why = self._damage(folder, listed.state.files)
                if not why:
                    progress = self._read(folder, listed.state, policy, updater)
                    if damaged and self._world.is_writer:
                        log.warning("%s is used instead of what is damaged: %s", folder, "; ".join(damaged.values()))
                        self._set_aside(damaged, "damaged")
                    self.newest = progress.update
                    return progress
            damaged[folder] = why
        if damaged:
            raise ConfigError(f"{'; '.join(damaged.values())}. {_REMEDY.format(self._folder)}")
        return None

    def save(self, policy: Policy, updater: Updater, progress: Progress) -> bool:
        """Write a checkpoint and wait for it, at most limit_s. True when it is complete."""
        return self.begin(policy, updater, progress) and self.settle(self._limit_s)

    def begin(self, policy: Policy, updater: Updater, progress: Progress) -> bool:
        """Copy what must be saved to the host and start writing it. False when it cannot, or must not, be saved.

        What is not finite is never saved. One that is still being written is waited for, once and at most limit_s.
        """
        started = time.monotonic()
        try:
            self._settle(0.0 if self._gave_up else self._limit_s)
            if self.pending is not None:
                self._gave_up = True
                return self._failed(
                    progress.update, f"that of update {self.pending.update} is still being written (the disk is slow)"
                )
            tensors = saved_tensors(policy, updater)
            broken = next((n for n, t in tensors.items() if not is_finite(t)), "")
            if why := self._first(f"{broken} is not finite" if broken else self._prepare(progress.update)):
                return self._failed(progress.update, why)
            parts = pieces(tensors, self._world) | random_states(self._world)
            self._job = Job(self._aside(progress.update) / file_of(self._world), parts)
            self.pending, self._gave_up = progress, False
            return True
        finally:
            self.stood_s += time.monotonic() - started

    def settle(self, wait_s: float = 0.0) -> bool:
        """Give the pending checkpoint its name when every rank has written its part; waits for them at most wait_s.

        True when one was completed by this call, and that rank 0 removed those beyond `keep`.
        """
        started = time.monotonic()
        complete = self._settle(wait_s)
        self.stood_s += time.monotonic() - started
        return complete

    def _settle(self, wait_s: float) -> bool:
        if self._job is None or self.pending is None:
            return False
        started = time.monotonic()
        while True:
            state, waited = all_max([self._job.state, time.monotonic() - started], self._world)
            if state != WRITING:
                break
            if waited >= wait_s:
                return False
            self._job.wait(min(_SLICE_S, wait_s - waited))
        job, progress, self._job, self.pending = self._job, self.pending, None, None
        files, why = self._files_of_all(job)
        self.write_s = all_max([job.seconds], self._world)[0]
        if not why and self._world.is_writer:
            try:
                self._seal(progress, files)
            except OSError as exc:
                why = str(exc)
        if why := self._first(why):
            return self._failed(progress.update, why)
        self.newest = progress.update
        return True

    def scalars(self) -> dict[str, float]:
        """Metrics. No collective."""
        stood_s, self.stood_s = self.stood_s, 0.0
        return {
            "run/checkpoint": float(self.newest),
            "run/checkpoint_s": stood_s,
            "run/checkpoint_write_s": self.write_s,
            "run/checkpoint_failures": float(self.failures),
        }

    def __str__(self) -> str:
        pending = f" (of update {self.pending.update} one was being written)" if self.pending is not None else ""
        return (f"{self._folder / f'u{self.newest}'}" if self.newest >= 0 else "none") + pending

    def remove(self) -> None:
        """The run is over: nobody goes on from here."""
        self.settle(self._limit_s)
        self._job = self.pending = None
        if self._world.is_writer:
            shutil.rmtree(self._folder, ignore_errors=True)

    def go_back(self, update: int) -> None:
        """An alarm found the run bad from `update` on: whoever goes on begins before it. Nothing is saved after this.

        Checkpoints of `update` and later are set aside. Waits for an older one that is being written, at most limit_s.
        """
        if self.pending is not None and self.pending.update < update:
            self._settle(self._limit_s)
        self._job = self.pending = None
        if self._world.is_writer:
            left = by_age(self._folder)
            self._set_aside((f for f in left if int(f.name[1:]) >= update), "alarm")
            self.newest = max((int(f.name[1:]) for f in left if int(f.name[1:]) < update), default=-1)

    # --- writing --------------------------------------------------------------------------------

    def _aside(self, update: int) -> Path:
        return self._folder / f"u{update}.part"

    def _prepare(self, update: int) -> str:
        """Rank 0 makes the folder anew; what went wrong, or ""."""
        if not self._world.is_writer:
            return ""
        try:
            shutil.rmtree(self._aside(update), ignore_errors=True)
            self._aside(update).mkdir(parents=True)
        except OSError as exc:
            return str(exc)
        return ""

    def _failed(self, update: int, why: str) -> bool:
        """A checkpoint came to nothing: said and counted, and what there is of it removed. Always False."""
        self.failures += 1
        if self._world.is_writer:
            log.error("%s was not written: %s", self._folder / f"u{update}", why)
            # What is left of it would keep a full disk full.
            shutil.rmtree(self._aside(update), ignore_errors=True)
        return False

    def _files_of_all(self, job: Job) -> tuple[Hashes, str]:
        """Every rank's file with its hash, and what went wrong if not "", on every rank. A collective."""
        found: Hashes = {}
        why = ""
        for part in all_bytes(msgspec.json.encode((job.file.name, job.digest, job.why)), self._world):
            name, digest, failed = msgspec.json.decode(part, type=tuple[str, str, str])
            found[name], why = digest, why or failed
        return found, why

    def _seal(self, progress: Progress, files: Hashes) -> None:
        """state.json, then the name. An older checkpoint of that name was damaged, or of an undone timeline."""
        aside, final = self._aside(progress.update), self._folder / f"u{progress.update}"
        with (aside / STATE).open("wb") as out:
            out.write(msgspec.json.encode(State(FORMAT, self._fingerprint, progress, files, self._world.size)))
            out.flush()
            os.fsync(out.fileno())
        flush(aside)
        delete(final)
        aside.rename(final)
        flush(self._folder)
        self._prune()

    def _prune(self) -> None:
        """Remove those beyond `keep`, but not the one to which an alarm may lead back."""
        found = by_age(self._folder)
        good = next((f for f in found if self.suspect is not None and int(f.name[1:]) < self.suspect), None)
        for old in found[self._keep :]:
            if old != good:
                delete(old)

    # --- reading --------------------------------------------------------------------------------

    def _list(self) -> list[_Listed]:
        """The checkpoints as rank 0 sees them, the newest first, on every rank. A collective; removes leftovers."""
        seen: list[_Listed] = []
        if self._world.is_writer:
            for left in self._folder.glob("*.part"):
                shutil.rmtree(left, ignore_errors=True)
            seen = [self._look(folder) for folder in by_age(self._folder)]
        return msgspec.json.decode(all_bytes(msgspec.json.encode(seen), self._world)[0], type=list[_Listed])

    def _look(self, folder: Path) -> _Listed:
        try:
            state = read_state(folder)
        except (OSError, msgspec.MsgspecError) as exc:
            return _Listed(folder.name, None, f"{folder / STATE} cannot be read ({exc})")
        if state.format != FORMAT or state.fingerprint != self._fingerprint:
            other = f"{folder / STATE} is of another model, model.dtype or asyncrl; {_REMEDY.format(self._folder)}"
            return _Listed(folder.name, None, other=other)
        return _Listed(folder.name, state)

    def _damage(self, folder: Path, files: Hashes) -> str:
        """What is wrong with the files, or "", the same on every rank, each of which reads its share. A collective."""
        found: Hashes = {}
        why, busy = "", True
        work = hashing(folder, sorted(files)[self._world.rank :: self._world.size], found)
        while any(all_max([busy], self._world)):
            until = time.monotonic() + _SLICE_S
            try:
                while (busy := next(work, False)) and time.monotonic() < until:
                    pass
            except OSError as exc:
                why, busy = f"a file cannot be read ({exc})", False
        broken = next((name for name, digest in found.items() if digest != files[name]), "")
        why = why or (f"{folder / broken} is damaged (its hash is another one)" if broken else "")
        return self._first(why)

    def _first(self, why: str) -> str:
        """What went wrong on the first rank that has something to say, on every rank. A collective."""
        return next((w for w in map(bytes.decode, all_bytes(why.encode(), self._world)) if w), "")

    def _read(self, folder: Path, state: State, policy: Policy, updater: Updater) -> Progress:
        tensors = saved_tensors(policy, updater)
        try:
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
        except CheckpointException as exc:
            raise ConfigError(f"{folder} does not fit the model ({exc}); {_REMEDY.format(self._folder)}") from exc
        updater.load_steps(tensors["optimizer.step"])
        if state.ranks == self._world.size:
            # Another number of ranks has no state for each of them: they keep what run.seed gave.
            set_random_states(folder / file_of(self._world), self._world)
        return state.progress

    def _set_aside(self, unfit: Iterable[Path], why: str) -> None:
        """Out of the way of new ones, still there to be looked at."""
        for folder in unfit:
            aside = folder.with_name(f"{folder.name}.{why}")
            try:
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
            except OSError as exc:
                log.warning("%s stays where it is: %s", folder, exc)


_REMEDY = "choose another run.name, or remove {} to begin again from model.path"
