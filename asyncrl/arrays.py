"""Arrays <-> (dtype and shape, raw bytes). No array is copied on decode, and no claim is believed.

Knows nothing of messages, groups or sockets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError

MAX_ARRAY_BYTES = 2**31
"""Largest array that a header may claim."""

Buffer = bytes | bytearray | memoryview


class ArraySpec(msgspec.Struct, array_like=True, gc=False):
    """What a header says about one buffer."""

    dtype: str
    shape: tuple[int, ...]


def pack(owner: str, name: str, array: NDArray[Any], allowed: Collection[str], ndim: int) -> tuple[ArraySpec, Buffer]:
    """Spec and bytes of an array as it lies in memory (copied only when it is not contiguous).

    Raises WireError unless the dtype is in `allowed` and the array has `ndim` axes.
    """
    if str(array.dtype) not in allowed or array.ndim != ndim:
        raise WireError(
            f"{owner}: {name} is {array.dtype}{list(array.shape)}, the wire carries {sorted(allowed)} with {ndim} axes"
        )
    buffer = np.ascontiguousarray(array).data.cast("B") if array.size else b""
    return ArraySpec(str(array.dtype), array.shape), buffer


def view(
    owner: str, name: str, spec: ArraySpec, buffers: Iterator[Buffer], allowed: Collection[str], ndim: int
) -> NDArray[Any]:
    """Read-only view of the next buffer.

    Raises WireError on a dtype or number of axes that is not allowed, an absurd shape, a missing
    buffer, a byte count that is not that of the shape, and bools that are neither 0 nor 1.
    """
    if spec.dtype not in allowed or len(spec.shape) != ndim:
        raise WireError(f"{owner}: {name} may not be {spec.dtype}{list(spec.shape)}")
    dtype = np.dtype(spec.dtype)
    # an axis of 0 must not hide absurd others: numpy refuses them with an error of its own
    if min(spec.shape) < 0 or math.prod(max(d, 1) for d in spec.shape) * dtype.itemsize > MAX_ARRAY_BYTES:
        raise WireError(f"{owner}: {name} claims shape {list(spec.shape)}")
    buffer = next(buffers, None)
    if buffer is None:
        raise WireError(f"{owner}: the buffer of {name} is missing")
    size = math.prod(spec.shape) * dtype.itemsize
    if len(buffer) != size:
        raise WireError(f"{owner}: {name} {spec.dtype}{list(spec.shape)} is {size} bytes, got {len(buffer)}")
    if dtype == np.bool_ and size and np.frombuffer(buffer, np.uint8).max() > 1:
        raise WireError(f"{owner}: {name} holds bytes that are no booleans")
    array = np.frombuffer(buffer, dtype).reshape(spec.shape) if size else np.empty(spec.shape, dtype)
    array.flags.writeable = False
    return array
