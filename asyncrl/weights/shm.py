"""The `shm` carrier: one file per version in shared memory, mapped by readers on the same host.

A file is written aside, sealed with a footer and renamed last, so a version is visible only when it is
complete. Readers hold a shared lock on what they map; the memory of a dropped version that nobody holds is written over
for the next one, which saves fetching fresh pages. Knows names and bytes, not what a model is. Layout of a file:
tensors (each at a multiple of 64 bytes), footer (msgpack Footer), tail (length and xxh3 of the
footer, magic).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from asyncrl.errors import VersionGone, WeightSyncError
from asyncrl.models.finite import is_finite
from asyncrl.types import Version
from asyncrl.weights.flat import DTYPES
from asyncrl.weights.memory import Memory
from asyncrl.weights.place import hold, place, remove, sweep

log = logging.getLogger(__name__)

_MAGIC = b"ARLWGT01"
_TAIL = struct.Struct("<QQ8s")
_ALIGN = 64

_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14: 10 % of a read. Python has no name for it."""

_BLOCK = 2**19
"""Bytes that are copied and then hashed: they are still in the cache."""


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Footer(msgspec.Struct, array_like=True, frozen=True):
    version: tuple[int, int]
    checksum: int
    nbytes: int
    entries: tuple[_Entry, ...]


class Publisher:
    """Writes versions and keeps the newest `keep` of them visible.

    directory names the run's versions; the files lie in shared memory where the host has it, under a
    name made from directory, and in directory itself elsewhere. One publisher per directory at a time; what a
    killed one left behind counts as its older versions.
    """

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise WeightSyncError(f"keep {keep} must be at least 1: the version being announced would vanish")
        self.counters: Counter[str] = Counter(reused=0)
        """Since start: reused (versions that were written over the memory of a dropped one)."""
        self._keep = keep
        self._visible: dict[Path, Memory] = {}
        self._spare: Memory | None = None
        self.directory = place(directory)
        self._lock = hold(self.directory)
        sweep()
        for stale in self.directory.glob("*.part"):
            stale.unlink(missing_ok=True)

    def publish(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> str:
        """Write version and return its source, the path for read().

        WeightSyncError when a tensor is not finite, named twice or of a dtype without a byte form, or when the
        disk is full; nothing is visible then and older versions stay.
        """
        final = self.directory / f"{version}.weights"
        try:
            with contextlib.ExitStack() as undo:
                memory = self._take(self.directory / f"{version}.{os.getpid()}.part")
                undo.callback(memory.discard)
                _write(memory, version, weights)
                memory.seal()
                memory.rename(final)
                undo.pop_all()
        except OSError as exc:
            raise WeightSyncError(f"version {version} not written to {self.directory}: {exc}") from exc
        replaced = self._visible.pop(final, None)
        if replaced is not None:
            replaced.close()
        self._visible[final] = memory
        self._drop_old(final)
        return str(final)

    def _take(self, aside: Path) -> Memory:
        """Memory to write into, under the name aside: of a dropped version which nobody holds, else new."""
        spare, self._spare = self._spare, None
        if spare is not None:
            # Refused while a reader has it: that one keeps the memory until it lets go.
            if spare.reuse(aside):
                self.counters["reused"] += 1
                return spare
            spare.discard()
        return Memory(aside)

    def _drop_old(self, newest: Path) -> None:
        """Take the names of all but the newest files; readers that mapped one keep its memory until they let go.

        What cannot be dropped stays visible until the next version: the newest one is out.
        """
        try:
            others = (file for file in self.directory.glob("*.weights") if file != newest)
            by_age = sorted(others, key=lambda file: file.stat().st_mtime_ns)
            for old in by_age[: max(0, len(by_age) - (self._keep - 1))]:
                if old not in self._visible:  # of a publisher that was killed
                    old.unlink(missing_ok=True)
                    continue
                self._visible[old].rename(old.with_name(f"{old.name}.part"))
                spare, self._spare = self._spare, self._visible.pop(old)
                if spare is not None:
                    spare.discard()
        except OSError as exc:
            log.warning("an old version stays in %s: %s", self.directory, exc)

    def close(self) -> None:
        """Remove every version and the directory. Safe to call twice."""
        for memory in (*self._visible.values(), *filter(None, [self._spare])):
            memory.close()
        self._visible, self._spare = {}, None
        remove(self.directory)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def read(source: str, version: Version) -> dict[str, Tensor]:
    """The tensors of version by name, as views of a private mapping of the file at source.

    They stay valid after the publisher has dropped the version; writing to one changes only this process.
    VersionGone when the file is gone. WeightSyncError when it is not a complete version file, holds another
    version or does not match its checksum.
    """
    mapped, inode = _map(source, version)
    try:
        return _tensors(source, version, mapped)
    except WeightSyncError as exc:
        if _is_at(source, inode):
            raise
        # Dropped between opening and locking it: a newer version may have been written over it.
        raise VersionGone(f"version {version} cannot be read: it was dropped while it was opened ({exc})") from exc


def _map(source: str, version: Version) -> tuple[mmap.mmap, int]:
    """The file at source, locked for as long as it is mapped, and its inode."""
    try:
        with open(source, "rb") as file:
            # The mapping has a duplicate of the descriptor, which keeps the lock until the last tensor is gone.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(file.fileno())
            if not status.st_size:
                raise WeightSyncError(f"{source}: 0 bytes, not a version file")
            # Copy on write: torch wants writable memory, the file must not change.
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            if sys.platform == "linux":
                # All pages at once, as they are. A kernel that does not know how maps them at their first use.
                with contextlib.suppress(OSError):
                    mapped.madvise(_POPULATE_READ)
            return mapped, status.st_ino
    except BlockingIOError as exc:
        raise VersionGone(f"version {version} cannot be read: it is dropped, a newer one takes its place") from exc
    except FileNotFoundError as exc:
        raise VersionGone(f"version {version} cannot be read: {exc}") from exc
    except OSError as exc:
        raise WeightSyncError(f"version {version} cannot be read: {exc}") from exc


def _is_at(source: str, inode: int) -> bool:
    try:
        return os.stat(source).st_ino == inode
    except OSError:
        return False


def _tensors(source: str, version: Version, mapped: mmap.mmap) -> dict[str, Tensor]:
    footer = _footer(source, mapped)
    if Version(*footer.version) != version:
        raise WeightSyncError(f"{source}: holds version {Version(*footer.version)}, not {version}")
    with memoryview(mapped) as view, view[: footer.nbytes] as data:
        if xxhash.xxh3_64_intdigest(data) != footer.checksum:
            raise WeightSyncError(f"{source}: checksum of version {version} does not match, bytes are damaged")
    return {entry.name: _view(source, mapped, entry, footer.nbytes) for entry in footer.entries}


def _write(memory: Memory, version: Version, weights: Iterable[tuple[str, Tensor]]) -> None:
    digest, offset, entries, seen = xxhash.xxh3_64(), 0, [], set()
    for name, tensor in weights:
        if name in seen:
            raise WeightSyncError(f"version {version}: {name} comes twice")
        seen.add(name)
        dtype, data = _bytes(name, tensor)
        padding = bytes(-offset % _ALIGN)
        blocks: list[bytes | memoryview] = [padding]
        blocks += [data[start : start + _BLOCK] for start in range(0, data.nbytes, _BLOCK)]
        for block in blocks:
            memory.write(block)
            digest.update(block)
        offset += len(padding)
        entries.append(_Entry(name, dtype, tuple(tensor.shape), offset, data.nbytes))
        offset += data.nbytes
    footer = msgspec.msgpack.encode(
        _Footer((version.epoch, version.update), digest.intdigest(), offset, tuple(entries))
    )
    memory.write(footer)
    memory.write(_TAIL.pack(len(footer), xxhash.xxh3_64_intdigest(footer), _MAGIC))


def _bytes(name: str, tensor: Tensor) -> tuple[str, memoryview]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightSyncError(f"{name}: dtype {dtype} cannot be published")
    if not is_finite(tensor):
        raise WeightSyncError(f"{name} has non-finite values: nothing is published")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return dtype, memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _footer(source: str, mapped: mmap.mmap) -> _Footer:
    size = len(mapped)
    if size < _TAIL.size:
        raise WeightSyncError(f"{source}: {size} bytes, not a version file")
    length, checksum, magic = _TAIL.unpack_from(mapped, size - _TAIL.size)
    if magic != _MAGIC or length > size - _TAIL.size:
        raise WeightSyncError(f"{source}: incomplete or not a version file")
    raw = mapped[size - _TAIL.size - length : size - _TAIL.size]
    if xxhash.xxh3_64_intdigest(raw) != checksum:
        raise WeightSyncError(f"{source}: footer is damaged")
    try:
        footer = msgspec.msgpack.decode(raw, type=_Footer)
    except msgspec.MsgspecError as exc:
        raise WeightSyncError(f"{source}: footer is not of this schema: {exc}") from exc
    if footer.nbytes != size - _TAIL.size - length:
        raise WeightSyncError(f"{source}: {size} bytes do not match a footer for {footer.nbytes}")
    return footer


def _view(source: str, mapped: mmap.mmap, entry: _Entry, total: int) -> Tensor:
    dtype = DTYPES.get(entry.dtype)
    count = 1
    for axis in entry.shape:
        count *= axis
    inside = entry.offset >= 0 and entry.offset + entry.nbytes <= total
    if dtype is None or not inside or count * dtype.itemsize != entry.nbytes:
        raise WeightSyncError(f"{source}: {entry.name} does not fit its {entry.nbytes} bytes")
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
