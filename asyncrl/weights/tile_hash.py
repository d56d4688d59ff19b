"""The hash that SGLang's weight checker computes of a tensor on a GPU, in numpy. Knows no model.

SGLang 0.5.23, kernels/ops/memory/gpu_tensor_hash.py: the bytes as little-endian 32-bit words, the last one padded with
zeros. Every word is mixed with its position under two seeds, tiles of 8192 words sum both mixes, and the 64-bit values
of the tiles are added up. Positions are 32-bit there: tensors of 8 GiB and more are not hashed alike.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

_SEED = 0x243F6A88
_WAYS = (
    (np.uint32(_SEED), np.uint32(0x27D4EB2D), np.uint32(15)),
    (np.uint32((_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF), np.uint32(0x165667B1), np.uint32(13)),
)
"""Seed, factor of the position, and its rotation in bits, of each mix."""
_TILE = 8192
_TILES = 8
"""Tiles that are mixed at once: words, positions and mix fit into the cache of a core."""
_THREADS = min(8, os.cpu_count() or 1)
_FEW = 64
"""Rounds of _TILES for which threads are not worth it: 16 MB."""

Words = NDArray[np.uint32]


def tile_hash(data: NDArray[np.uint8]) -> int:
    """The 64-bit hash of bytes [n], contiguous. No bytes hash to 0. Large data are hashed by several threads."""
    if not data.size:
        return 0
    whole, rest = data.size // 4, data.size % 4
    num_words, step = whole + (rest > 0), _TILE * _TILES

    def some(start: int) -> int:
        words = data[start * 4 : min(start + step, whole) * 4].view(np.dtype("<u4"))
        if rest and start + step >= num_words:
            last = data[whole * 4 :].tobytes().ljust(4, b"\0")
            words = np.append(words, np.frombuffer(last, np.dtype("<u4")))
        return _tiles(words, start, num_words)

    starts = range(0, num_words, step)
    if len(starts) < _FEW:
        return _split_mix(sum(map(some, starts)) & (2**64 - 1))
    with ThreadPoolExecutor(_THREADS, "hash") as threads:
        parts = threads.map(lambda first: sum(map(some, starts[first::_THREADS])), range(_THREADS))
        return _split_mix(sum(parts) & (2**64 - 1))


def _tiles(words: Words, start: int, num_words: int) -> int:
    """Sum of the values of the tiles that words [n] fill; start: position of the first one."""
    positions = np.arange(start, start + words.size, dtype=np.uint32)
    length = np.uint32(num_words * 4 & 0xFFFFFFFF)
    halves = []
    for seed, factor, bits in _WAYS:
        mixed = positions * factor
        mixed += seed
        turned = positions << bits
        turned |= positions >> np.uint32(32 - bits)
        mixed ^= turned
        mixed ^= words
        _mix(mixed)
        sums = np.add.reduceat(mixed, np.arange(0, words.size, _TILE), dtype=np.uint32)
        sums ^= length
        _mix(sums)
        halves.append(sums)
    return (int(halves[0].sum(dtype=np.uint64)) << 32) + int(halves[1].sum(dtype=np.uint64))


def _mix(x: Words) -> None:
    """The finalizer of MurmurHash3 in 32 bits, in place."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)


def _split_mix(x: int) -> int:
    """The finalizer of SplitMix64."""
    mask = 2**64 - 1
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31
