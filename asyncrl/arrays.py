"""Arrays <-> raw bytes, and (dtype, shape) of those whose shape is not known otherwise. Knows no message and no socket.

No array is copied on decode, and no claim is believed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError

MAX_ARRAY_BYTES = 2**31
"""Largest array that a header may claim."""

Buffer = bytes | bytearray | memoryview

_DTYPES = {d.name: d for d in map(np.dtype, ("uint8", "uint16", "uint32"))}
_NAMES = {d: name for name, d in _DTYPES.items()}  # numpy makes the name anew each time


class ArraySpec(msgspec.Struct, array_like=True, gc=False):
    """What a header says about one buffer."""

    dtype: str
    shape: tuple[int, int, int]


def spec_of(array: NDArray[Any]) -> ArraySpec:
    """What a header says about an array of three axes that was packed."""
    a, b, c = array.shape
    return ArraySpec(_NAMES[array.dtype], (a, b, c))


def pack(owner: str, name: str, array: NDArray[Any], allowed: Collection[np.dtype[Any]], ndim: int) -> Buffer:
    """Bytes of an array as it lies in memory (copied only when it is not contiguous).

    Raises WireError unless the dtype is in `allowed` and the array has `ndim` axes.
    """
    if array.dtype not in allowed or array.ndim != ndim:
        raise WireError(
            f"{owner}: {name} is {array.dtype}{list(array.shape)}, the wire carries {sorted(map(str, allowed))} with "
            f"{ndim} axes"
        )
    return np.ascontiguousarray(array).data.cast("B") if array.size else b""


def num_bytes(owner: str, name: str, spec: ArraySpec, allowed: Collection[np.dtype[Any]]) -> int:
    """Size of the buffer that a spec claims. Raises WireError on a dtype that is not allowed or an absurd shape."""
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None or dtype not in allowed:
        raise WireError(f"{owner}: {name} may not be {spec.dtype}{list(spec.shape)}")
    a, b, c = spec.shape
    # An axis of 0 must not hide absurd others: numpy refuses them with an error of its own.
    if a < 0 or b < 0 or c < 0 or (a or 1) * (b or 1) * (c or 1) * dtype.itemsize > MAX_ARRAY_BYTES:
        raise WireError(f"{owner}: {name} claims shape {list(spec.shape)}")
    return a * b * c * dtype.itemsize


def dtype_of(spec: ArraySpec) -> np.dtype[Any]:
    """The dtype of a spec that `num_bytes` let through."""
    return _DTYPES[spec.dtype]


def view(buffer: Buffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Read-only view of a buffer that has exactly the bytes for it."""
    array: NDArray[Any] = np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)
    if len(shape) != 1:
        array = array.reshape(shape)
    if type(buffer) is not bytes or not buffer:
        array.flags.writeable = False
    return array
