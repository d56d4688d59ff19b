"""Version folders on a file system that all hosts share: their names, their locks and what makes one complete.

A version is a model folder with two files more. `.lock`: who uses the folder holds a shared flock on it, who removes
the folder an exclusive one; the lock of a process that dies is gone with it. `ready.json`: written last and removed
first, it says which version lies here and how long each file is. Knows no network and no engine.

What is verified: always the sizes of all files and the beginning of each, a few kilobytes. The bytes of a tensor only
where they are read here; an engine that reads the folder itself is asked for its own checksums afterwards, which
costs no second pass over the file system and covers the way into the GPU as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.errors import VersionGone, WeightSyncError
from asyncrl.types import Version
from asyncrl.weights.engine_checksums import expected

SCHEME = "disk://"
LOCK, READY = ".lock", "ready.json"

_NAME = re.compile(r"v\d+\.\d+(-\d+)?")
_ASIDE = re.compile(r"\.v\d+\.\d+(-\d+)?(\.part|\.[0-9a-f]{8}\.gone)?")

_HEAD = 2**20
"""Bytes at the beginning of a file that are always verified; of a safetensors file it is the header."""


_TURN = itertools.count()
"""Of the sample whose checksums are compared: the next one takes other tensors."""


class Ready(msgspec.Struct, frozen=True):
    """The ready mark. files: size and xxh3 of the beginning, by name; tensors: file and xxh3, by name."""

    version: tuple[int, int]
    files: dict[str, tuple[int, int]]
    tensors: dict[str, tuple[str, int]]


def name_of(version: Version, number: int = 1) -> str:
    """Of the folder of a version; number 2 and on where the name is taken."""
    return f"v{version}" if number == 1 else f"v{version}-{number}"


def is_version(folder: Path) -> bool:
    """Whether a publisher made that folder; one without its lock file belongs to somebody else."""
    return _NAME.fullmatch(folder.name) is not None and (folder / LOCK).is_file()


def is_aside(folder: Path) -> bool:
    """Whether a folder of that name is not visible: being written, or being removed."""
    return _ASIDE.fullmatch(folder.name) is not None


def summary(file: Path) -> tuple[int, int]:
    """Size and xxh3 of the beginning."""
    with file.open("rb") as data:
        first = data.read(8)
        wanted = int.from_bytes(first, "little") if file.suffix == ".safetensors" else _HEAD - len(first)
        size = os.fstat(data.fileno()).st_size
        return size, xxhash.xxh3_64_intdigest(first + data.read(min(wanted, size)))


def digest(tensor: Tensor) -> int:
    """xxh3 of the bytes of a tensor on the CPU."""
    flat = tensor.detach().contiguous().reshape(-1)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether nobody uses the folder, and nobody can begin to in the context. Never waits. OSError of the disk."""
    # For writing: NFS makes a byte-range lock of it, and an exclusive one needs that.
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        os.close(lock)


@contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Nobody removes the folder in the context. VersionGone when it is gone or going. Never waits."""
    gone = f"{folder} is gone: its publisher dropped it or ended"
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise VersionGone(gone) from exc
    except OSError as exc:
        raise WeightSyncError(f"{folder} cannot be opened: {exc}") from exc
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # It may have been taken away, or replaced, between the two calls.
            there, here = os.stat(folder / LOCK), os.fstat(lock)
        except (BlockingIOError, FileNotFoundError) as exc:
            raise VersionGone(gone) from exc
        except OSError as exc:
            raise WeightSyncError(
                f"{folder / LOCK} cannot be locked: {exc}; docs/operations.md says what the file system must give"
            ) from exc
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            raise VersionGone(gone)
        yield
    finally:
        os.close(lock)


def check_locks(directory: Path) -> None:
    """WeightSyncError where flock does not keep two holders apart."""
    file = directory / f".{os.getpid()}.try"
    why = "a shared lock did not keep an exclusive one out"
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(file.unlink, missing_ok=True)
            first, second = (stack.enter_context(file.open("w")) for _ in range(2))
            fcntl.flock(first, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError as exc:
        why = str(exc)
    raise WeightSyncError(
        f"the file system of {directory} has no working flock ({why}): a version could be removed while it is read. "
        "Mount it with locks (NFS 4; lustre with -o flock), or set weights.dir to another one"
    )


class Folder:
    """One announced version of the disk carrier (engines.base.Source)."""

    kind: Literal["folder"] = "folder"

    def __init__(self, source: str, version: Version) -> None:
        """source: what a publisher returned, disk:///ABSOLUTE/FOLDER. WeightSyncError for another one."""
        path = Path(source.removeprefix(SCHEME))
        if not source.startswith(SCHEME) or not path.is_absolute():
            raise WeightSyncError(f"{source!r} is not a source of the disk carrier")
        self._path, self._version = path, version

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """The folder, complete, and as it is until the context ends.

        VersionGone when it is gone; WeightSyncError when it holds another version, or a file is not as it was written.
        """
        with shared(self._path):
            self._ready()
            yield self._path

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, read into memory and verified. Errors of folder(), and a checksum that is off."""
        with shared(self._path):
            # Copies: pages of a mapped file would be gone when the folder is removed by another host.
            return {name: tensor.clone() for name, tensor in _Stored(self._path, self._ready(), True).items()}

    def checksums(self, names: Sequence[str], ranks: int) -> dict[str, frozenset[str]]:
        """What an engine's own checksums of a sample of its tensors `names` may be; reads that sample only.

        Errors of tensors().
        """
        with shared(self._path):
            ready = self._ready()
            sample = list(expected(_Stored(self._path, ready, False), names, ranks, turn=next(_TURN)))
            # Again, verified: else damage on the disk would be what both sides agree on.
            return expected(_Stored(self._path, ready, True), sample, ranks, sample_bytes=sys.maxsize)

    def broadcast(self, engine: str, ranks: int) -> NoReturn:
        """WeightSyncError: this carrier has no process groups."""
        raise WeightSyncError(f"{SCHEME}{self._path} is a folder, no broadcast to {engine}")

    def leave(self, engine: str) -> None:
        """Nothing is sent, so nothing ends."""

    def _ready(self) -> Ready:
        """The verified ready mark. Call it with the lock."""
        try:
            ready = msgspec.json.decode((self._path / READY).read_bytes(), type=Ready)
            found = {name: summary(self._path / name) for name in ready.files}
        except FileNotFoundError as exc:
            raise WeightSyncError(f"{self._path} is not complete: {Path(exc.filename).name} is missing") from exc
        except (OSError, msgspec.MsgspecError) as exc:
            raise WeightSyncError(f"{self._path} cannot be read: {exc}") from exc
        if Version(*ready.version) != self._version:
            raise WeightSyncError(f"{self._path} holds version {Version(*ready.version)}, not {self._version}")
        for name, (size, head) in ready.files.items():
            if found[name][0] != size:
                raise WeightSyncError(f"{self._path / name} has {found[name][0]} bytes, {size} were written")
            if found[name][1] != head:
                raise WeightSyncError(f"{self._path / name} is damaged: its beginning is not as it was written")
        return ready


class _Stored(Mapping[str, Tensor]):
    """Tensors of a folder by name, mapped when they are asked for. verified: then also read, and compared."""

    def __init__(self, folder: Path, ready: Ready, verified: bool) -> None:
        self._folder, self._ready, self._verified = folder, ready, verified
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        file, wanted = self._ready.tensors[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as exc:
            raise WeightSyncError(f"{name} cannot be read from {self._folder / file}: {exc}") from exc
        if self._verified and digest(tensor) != wanted:
            raise WeightSyncError(f"{self._folder / file}: the checksum of {name} does not match, bytes are damaged")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._ready.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._ready.tensors)

    def __len__(self) -> int:
        return len(self._ready.tensors)
