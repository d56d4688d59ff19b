"""Lossless sparse delta between two versions of the same tensors: which elements changed, and to what.

Elements are compared by bit pattern, so NaN payloads and the sign of zero survive. Small steps in bf16 leave
about 99 % of the elements as they were (arXiv 2602.03839). Knows no carrier and no version.

Layout of a delta: head (magic, layout and checksum of the result), then one record per block of at most
2**20 elements: three counts, gaps, codes, raw values. A gap byte below 255 is the number of unchanged
elements before the next changed one, 255 skips 255 elements. A code byte is the zigzag of the difference
of the two bit patterns as integers, 255 takes the next raw value; a block without codes has raw values only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from numba import njit
from numpy.typing import NDArray

from asyncrl.errors import WeightSyncError
from asyncrl.weights.flat import Entry, Flat, layout_checksum, runs

MAX_FRACTION = 0.5
"""A delta above this part of the full bytes is not worth its two passes over the weights."""

_MAGIC = b"ARLDLT01"
_HEAD = struct.Struct("<8sQQ")
_COUNTS = struct.Struct("<III")
_BLOCK = 2**20


def encode(old: Flat, new: Flat, max_fraction: float = MAX_FRACTION) -> bytes | None:
    """The delta from old to new, or None when it is not smaller than max_fraction of the full bytes.

    WeightSyncError when names, order, dtypes or shapes differ.
    """
    if old.entries != new.entries:
        raise WeightSyncError(f"no delta between different tensors: {_first_difference(old.entries, new.entries)}")
    head = _HEAD.pack(_MAGIC, new.layout, new.checksum)
    parts, left = [head], max_fraction * new.data.nbytes - len(head)
    # Every element changed: one gap byte each, and an escape for each 255 skipped.
    gaps, codes = np.empty(_BLOCK + _BLOCK // 255, np.uint8), np.empty(_BLOCK, np.uint8)
    wide = {size: np.empty(_BLOCK, f"u{size}") for size in {run.itemsize for run in runs(new.entries)}}
    blocks = zip(_blocks(old.entries, old.data), _blocks(new.entries, new.data), strict=True)
    for before, after in blocks:
        if left <= 0:
            return None
        raw = wide[after.itemsize]
        num_gaps, num_changed, num_wide = _scan(before, after, gaps, codes, raw)
        record = _record(gaps[:num_gaps], codes[:num_changed], raw[:num_changed], num_wide)
        left -= len(record)
        parts.append(record)
    return b"".join(parts) if left > 0 else None


def apply(old: Flat, delta: bytes | memoryview) -> Flat:
    """The new version, in a buffer of its own; old stays as it is.

    WeightSyncError when delta is damaged or was made for other tensors or another base.
    """
    new = Flat(old.entries, old.data.copy())
    checksum = patch(new.entries, new.data, delta)
    if new.checksum != checksum:
        raise WeightSyncError("the delta gives another version than it was made for: wrong base or damaged bytes")
    return new


def patch(entries: tuple[Entry, ...], data: NDArray[np.uint8], delta: bytes | memoryview) -> int:
    """Change data in place and return the checksum it must have now: the caller verifies.

    WeightSyncError when delta does not decode; data is then undefined.
    """
    if len(delta) < _HEAD.size:
        raise WeightSyncError(f"{len(delta)} bytes are not a delta")
    magic, layout, checksum = _HEAD.unpack_from(delta)
    if magic != _MAGIC:
        raise WeightSyncError("not a delta")
    if layout != layout_checksum(entries):
        raise WeightSyncError("the delta is for other names, dtypes or shapes")
    at = _HEAD.size
    for block in _blocks(entries, data):
        try:
            counts = _COUNTS.unpack_from(delta, at)
            at += _COUNTS.size
            gaps, codes, raw = (np.empty(n, kind) for n, kind in zip(counts, ("u1", "u1", block.dtype), strict=True))
            for values in (gaps, codes, raw):
                values.view(np.uint8)[:] = np.frombuffer(delta, np.uint8, values.nbytes, at)
                at += values.nbytes
        except (struct.error, ValueError, MemoryError) as exc:
            raise WeightSyncError(f"the delta is cut or damaged at byte {at}") from exc
        if not _change(block, gaps, codes, raw):
            raise WeightSyncError(f"the delta is damaged before byte {at}")
    if at != len(delta):
        raise WeightSyncError(f"the delta has {len(delta) - at} bytes too many")
    return int(checksum)


def _blocks(entries: tuple[Entry, ...], data: NDArray[np.uint8]) -> Iterator[NDArray[np.unsignedinteger]]:
    for run in runs(entries):
        elements = data[run.start : run.stop].view(f"u{run.itemsize}")
        for start in range(0, len(elements), _BLOCK):
            yield elements[start : start + _BLOCK]


def _record(
    gaps: NDArray[np.uint8], codes: NDArray[np.uint8], raw: NDArray[np.unsignedinteger], num_wide: int
) -> bytes:
    if len(codes) + num_wide * raw.itemsize < raw.nbytes:
        raw = raw[codes == 255]
    else:
        codes = codes[:0]
    return b"".join((_COUNTS.pack(len(gaps), len(codes), len(raw)), gaps.tobytes(), codes.tobytes(), raw.tobytes()))


@njit(cache=True, nogil=True)
def _scan(old, new, gaps, codes, raw):  # type: ignore[no-untyped-def]
    num_gaps, num, num_wide, after_last = 0, 0, 0, 0
    for i in range(new.size):
        if old[i] == new[i]:
            continue
        gap = i - after_last
        while gap >= 255:
            gaps[num_gaps] = 255
            num_gaps += 1
            gap -= 255
        gaps[num_gaps] = gap
        num_gaps += 1
        # Wraps for 8-byte elements; decoding wraps back.
        step = np.int64(new[i]) - np.int64(old[i])
        if -127 <= step <= 127:
            codes[num] = 2 * step - 1 if step > 0 else -2 * step
        else:
            codes[num] = 255
            num_wide += 1
        raw[num] = new[i]
        num += 1
        after_last = i + 1
    return num_gaps, num, num_wide


@njit(cache=True, nogil=True)
def _change(data, gaps, codes, raw):  # type: ignore[no-untyped-def]
    i, num, taken = np.int64(0), 0, 0
    for g in range(gaps.size):
        i += np.int64(gaps[g])
        if gaps[g] == 255:
            continue
        if i >= data.size:
            return False
        code = np.int64(255)
        if codes.size > 0:
            if num >= codes.size:
                return False
            code = np.int64(codes[num])
            num += 1
        if code == 255:
            if taken >= raw.size:
                return False
            data[i] = raw[taken]
            taken += 1
        else:
            step = (code + 1) // 2 if code % 2 == 1 else -(code // 2)
            data[i] = np.int64(data[i]) + step
        i += 1
    return num == codes.size and taken == raw.size


def _first_difference(old: tuple[Entry, ...], new: tuple[Entry, ...]) -> str:
    for a, b in zip(old, new, strict=False):
        if a != b:
            return f"{a.name} {a.dtype} {a.shape} against {b.name} {b.dtype} {b.shape}"
    return f"{len(old)} tensors against {len(new)}"
