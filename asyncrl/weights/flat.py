"""Named tensors laid out in one host buffer, and the checksums of that buffer.

Both sides of a carrier compute the same layout from names, dtypes and shapes, so offsets never travel.
Padding is zero: equal tensors give equal bytes. Knows no carrier and no version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import WeightSyncError

CHUNK_BYTES = 2**22
"""Unit of the checksums and of a request: small against a buffer, large against the cost of a message."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}

_ALIGN = 64

Spec = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of one tensor."""


class Entry(NamedTuple):
    """Where one tensor lies: bytes [offset, offset + nbytes) of the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Run(NamedTuple):
    """Neighbouring tensors of one element size: bytes [start, stop), zero padding included."""

    start: int
    stop: int
    itemsize: int


@dataclass(frozen=True)
class Flat:
    """entries in the order given; data uint8 [nbytes]. Nobody changes data once a checksum was taken."""

    entries: tuple[Entry, ...]
    data: NDArray[np.uint8]

    @cached_property
    def layout(self) -> int:
        """xxh3 of names, dtypes and shapes in order."""
        return layout_checksum(self.entries)

    @cached_property
    def digests(self) -> tuple[int, ...]:
        """xxh3 of every chunk of CHUNK_BYTES."""
        return tuple(xxhash.xxh3_64_intdigest(chunk(self.data, i).data) for i in range(num_chunks(self.data.nbytes)))

    @cached_property
    def checksum(self) -> int:
        """xxh3 of the whole: layout, size and all chunk digests."""
        return combined(self.entries, self.data.nbytes, self.digests)

    def views(self) -> dict[str, Tensor]:
        """The tensors by name; they share the memory of data."""
        whole = torch.from_numpy(self.data)
        return {
            e.name: whole[e.offset : e.offset + e.nbytes].view(DTYPES[e.dtype]).view(e.shape)
            if e.nbytes
            else torch.empty(e.shape, dtype=DTYPES[e.dtype])
            for e in self.entries
        }


def lay_out(specs: Iterable[Spec]) -> tuple[Entry, ...]:
    """Offsets for tensors in order. WeightSyncError for a name twice, an unknown dtype, a negative axis."""
    entries, seen, offset = [], set(), 0
    for name, dtype, shape in specs:
        if name in seen:
            raise WeightSyncError(f"{name} comes twice")
        if dtype not in DTYPES:
            raise WeightSyncError(f"{name}: dtype {dtype} has no byte form here")
        if any(axis < 0 for axis in shape):
            raise WeightSyncError(f"{name}: shape {shape} has a negative axis")
        seen.add(name)
        offset += -offset % _ALIGN
        nbytes = prod(shape) * DTYPES[dtype].itemsize
        entries.append(Entry(name, dtype, tuple(shape), offset, nbytes))
        offset += nbytes
    return tuple(entries)


def pack(weights: Iterable[tuple[str, Tensor]]) -> Flat:
    """Copy tensors of any device into a new buffer, bit for bit. Errors of lay_out()."""
    tensors = [(name, tensor.detach().cpu().contiguous()) for name, tensor in weights]
    entries = lay_out((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors)
    data, end = np.empty(size_of(entries), np.uint8), 0
    for entry, (_, tensor) in zip(entries, tensors, strict=True):
        data[end : entry.offset] = 0
        end = entry.offset + entry.nbytes
        if entry.nbytes:
            data[entry.offset : end] = tensor.reshape(-1).view(torch.uint8).numpy()
    return Flat(entries, data)


def size_of(entries: tuple[Entry, ...]) -> int:
    """Bytes of the buffer for these entries."""
    return entries[-1].offset + entries[-1].nbytes if entries else 0


def runs(entries: tuple[Entry, ...]) -> list[Run]:
    """The buffer as stretches of one element size, empty tensors left out."""
    out: list[Run] = []
    for entry in entries:
        if not entry.nbytes:
            continue
        itemsize, stop = DTYPES[entry.dtype].itemsize, entry.offset + entry.nbytes
        if out and out[-1].itemsize == itemsize:
            out[-1] = out[-1]._replace(stop=stop)
        else:
            out.append(Run(entry.offset, stop, itemsize))
    return out


def num_chunks(nbytes: int) -> int:
    """Chunks of a buffer of nbytes."""
    return -(-nbytes // CHUNK_BYTES)


def chunk(data: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
    """The bytes of one chunk, a view."""
    return data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def layout_checksum(entries: tuple[Entry, ...]) -> int:
    """xxh3 of names, dtypes and shapes in order."""
    return xxhash.xxh3_64_intdigest(repr([entry[:3] for entry in entries]).encode())


def combined(entries: tuple[Entry, ...], nbytes: int, digests: tuple[int, ...]) -> int:
    """The checksum of a version from its parts, so that bytes are hashed once."""
    parts = struct.pack(f"<{2 + len(digests)}Q", layout_checksum(entries), nbytes, *digests)
    return xxhash.xxh3_64_intdigest(parts)
