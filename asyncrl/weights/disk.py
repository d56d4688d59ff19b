"""The `disk` carrier: a whole model folder per version, on a file system that learner and generators share.

A folder is written aside and renamed last, so a version is visible only when it is complete. Old ones are removed
only when nobody uses them, however long that takes. Knows what a model folder is, not what a model is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.models.write import WORDS, FolderWriter, Plan
from asyncrl.types import Version
from asyncrl.weights import place
from asyncrl.weights.folders import (
    LOCK,
    READY,
    SCHEME,
    Ready,
    alone,
    check_locks,
    digest,
    is_aside,
    is_version,
    name_of,
    summary,
)
from asyncrl.weights.rollout import Weights

log = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000
"""Largest file of a version, unless one tensor is larger: the ranks of an engine read several files at a time."""

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Publisher:
    """Writes versions into `directory` and keeps the newest `keep` of them, and those that somebody uses.

    start: the model folder whose config, tokenizer and other files every version gets. transform: what engines get
    instead of the learner's tensors (asyncrl.weights.rollout). One publisher per directory at a time; what a killed
    one left behind counts as its older versions. WeightSyncError when the directory cannot be had, or its file
    system has no locks.
    """

    def __init__(
        self,
        directory: str | Path,
        start: str | Path,
        keep: int = 2,
        transform: Callable[[Weights], Weights] | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if keep < 1:
            raise WeightSyncError(f"keep {keep} must be at least 1: the version being announced would vanish")
        self.counters: Counter[str] = Counter(held=0)
        """Since start: held (how often an old version stayed because somebody used it)."""
        self.directory, self._start, self._keep = Path(directory).absolute(), Path(start), keep
        self._transform, self._shard_bytes = transform, shard_bytes
        self._visible: list[Path] = []
        self._closed = False
        self._names = threading.Lock()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            check_locks(self.directory)
            with contextlib.ExitStack() as undo:
                self._lock = place.hold(self.directory)
                undo.callback(os.close, self._lock)
                self._sweep()
                undo.pop_all()
        except OSError as exc:
            raise WeightSyncError(f"weights.dir={self.directory} cannot be used: {exc}") from exc

    def publish(self, version: Version, weights: Weights) -> str:
        """Write version and return its source, for folders.Folder.

        WeightSyncError when a tensor is not finite, named twice or of a dtype that safetensors files do not have, or
        when the disk is full; nothing is visible then. A version of that name is replaced; while somebody uses it,
        the new one gets a name of its own.
        """
        aside = self.directory / f".{name_of(version)}"
        try:
            with contextlib.ExitStack() as undo:
                for unfinished in (aside, aside.with_name(f"{aside.name}.part")):
                    undo.callback(shutil.rmtree, unfinished, ignore_errors=True)
                self._write(aside, version, weights)
                with self._names:
                    if self._closed:
                        raise WeightSyncError(f"version {version} is not published: the publisher is closed")
                    final = self._free_name(version)
                    aside.rename(final)
                    self._visible.append(final)
                undo.pop_all()
        except OSError as exc:
            raise WeightSyncError(f"version {version} not written to {self.directory}: {exc}") from exc
        self._drop_old()
        return f"{SCHEME}{final}"

    def _write(self, aside: Path, version: Version, weights: Weights) -> None:
        """The complete folder under the name aside. No fsync: whoever survives a crash of this host waits for a
        newer version, and close() hands the bytes to the server of a shared file system.
        """
        # In memory already, but for what transform adds: the headers need every size first.
        tensors = list(self._transform(weights) if self._transform is not None else weights)
        plan = [Plan(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
        twice = [name for name, count in Counter(tensor.name for tensor in plan).items() if count > 1]
        if twice:
            raise WeightSyncError(f"version {version}: {twice[0]} comes twice")
        odd = [tensor for tensor in plan if tensor.dtype not in WORDS]
        if odd:
            raise WeightSyncError(f"{odd[0].name}: dtype {odd[0].dtype} cannot be published")
        writer, hashes = FolderWriter(aside, plan, self._shard_bytes), {}
        for name, tensor in tensors:
            flat = tensor.detach().cpu().contiguous()
            writer.add(name, flat)
            # Of what the learner has, not of what the disk made of it.
            hashes[name] = digest(flat)
        writer.copy_rest(self._start, _dtype(plan))
        writer.finish()
        _make_ready(aside, version, hashes)

    def _free_name(self, version: Version) -> Path:
        """A name for version that nobody reads under. An older folder of the first such name is taken away."""
        number = 1
        while True:
            final = self.directory / name_of(version, number)
            if not final.exists() or (is_version(final) and self._remove(final)):
                return final
            number += 1

    def _drop_old(self) -> None:
        """Remove all but the newest folders, but for those in use; they stay until the next version."""
        for old in self._visible[: -self._keep]:
            try:
                if not self._remove(old):
                    self.counters["held"] += 1
            except OSError as exc:
                log.warning("an old version stays in %s: %s", self.directory, exc)

    def _remove(self, folder: Path) -> bool:
        """Remove a version unless somebody uses it. OSError of the disk."""
        gone = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.gone")
        with contextlib.suppress(FileNotFoundError), alone(folder) as free:
            if not free:
                return False
            (folder / READY).unlink(missing_ok=True)
            folder.rename(gone)
        # Behind the lock: NFS cannot remove what is still open. Readers find it by its name, which it has lost.
        shutil.rmtree(gone, ignore_errors=True)
        self._visible = [kept for kept in self._visible if kept != folder]
        return True

    def _sweep(self) -> None:
        """Remove what a killed publisher was writing or removing; its versions count as older than all to come."""
        for folder in sorted(self.directory.iterdir()):
            if is_aside(folder):
                shutil.rmtree(folder, ignore_errors=True)
            elif is_version(folder) and not (folder / READY).exists():
                self._remove(folder)
            elif is_version(folder):
                self._visible.append(folder)
        self._visible.sort(key=lambda folder: (folder / READY).stat().st_mtime_ns)

    def close(self) -> None:
        """Remove every version that nobody uses, and the directory when it is empty. Safe to call twice."""
        with self._names:
            if self._closed:
                return
            self._closed = True
            for folder in list(self._visible):
                try:
                    if not self._remove(folder):
                        log.warning("%s stays: somebody is reading it; the next publisher here removes it", folder)
                except OSError as exc:
                    log.warning("%s stays: %s", folder, exc)
        with contextlib.suppress(OSError):
            for folder in filter(is_aside, list(self.directory.iterdir())):
                shutil.rmtree(folder, ignore_errors=True)
            self.directory.rmdir()
        with contextlib.suppress(OSError):
            self.directory.with_name(f"{self.directory.name}.lock").unlink()
        os.close(self._lock)


def _make_ready(folder: Path, version: Version, hashes: dict[str, int]) -> None:
    """Write the lock file and, last, the ready mark."""
    where: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            header = msgspec.json.decode(data.read(int.from_bytes(data.read(8), "little")))
        where |= dict.fromkeys(header, file.name)
    # The start folder may be a version itself.
    (folder / LOCK).unlink(missing_ok=True)
    (folder / READY).unlink(missing_ok=True)
    files = {file.name: summary(file) for file in sorted(folder.iterdir())}
    (folder / LOCK).touch(mode=0o644)
    tensors = {name: (where[name], value) for name, value in hashes.items()}
    ready = Ready((version.epoch, version.update), files, tensors)
    (folder / READY).write_bytes(msgspec.json.encode(ready))


def _dtype(plan: list[Plan]) -> str | None:
    """What most bytes of a model are stored in, as config.json says it; None when no float is."""
    size: Counter[torch.dtype] = Counter()
    for tensor in plan:
        if tensor.dtype in _DTYPES:
            size[tensor.dtype] += tensor.nbytes
    return str(size.most_common(1)[0][0]).removeprefix("torch.") if size else None
