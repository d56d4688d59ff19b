"""How the tensors of a version are put into broadcasts. Pure; knows no group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.weights.flat import DTYPES, Spec


def spec_of(name: str, tensor: Tensor) -> Spec:
    """Name, dtype and shape as they travel."""
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def nbytes(spec: Spec) -> int:
    """Bytes of one tensor."""
    return prod(spec[2]) * DTYPES[spec[1]].itemsize


def plan(specs: Iterable[Spec], bucket_bytes: int) -> tuple[tuple[Spec, ...], ...]:
    """The tensors of each broadcast: whole ones, in order, at most bucket_bytes; a larger one has its own.

    Bytes lie back to back without padding, so within a bucket wider elements come first: every offset is then
    a multiple of its element size, which receivers need. Tensors without elements ride with their neighbours.
    WeightSyncError for a version without a single byte.
    """
    buckets: list[list[Spec]] = []
    filled = 0
    for spec in specs:
        size = nbytes(spec)
        if not buckets or (filled and size and filled + size > bucket_bytes):
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += size
    if not any(nbytes(spec) for bucket in buckets for spec in bucket):
        raise WeightSyncError("a version without a single byte cannot be sent")
    return tuple(tuple(sorted(bucket, key=lambda spec: -DTYPES[spec[1]].itemsize)) for bucket in buckets)


def fill(bucket: Sequence[Spec], weights: Mapping[str, Tensor], room: Tensor) -> Tensor:
    """The bytes of a bucket, uint8 on the host: copied into room, or where they are when it has one tensor."""
    if len(bucket) == 1:
        return _bytes(weights[bucket[0][0]])
    end = 0
    for spec in bucket:
        start, end = end, end + nbytes(spec)
        room[start:end] = _bytes(weights[spec[0]])
    return room[:end]


def room_for(buckets: Iterable[Sequence[Spec]]) -> int:
    """Bytes that fill() needs at most."""
    return max((sum(map(nbytes, bucket)) for bucket in buckets if len(bucket) > 1), default=0)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
