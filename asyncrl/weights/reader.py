"""Reads announced versions, whatever carrier their source names."""

from __future__ import annotations

from torch import Tensor

from asyncrl.transport.keys import ClientKeys
from asyncrl.types import Version
from asyncrl.weights import shm, zmq


class Reader:
    """One receiver of versions. Keeps the last version of a zmq source, to be sent the difference only.

    That costs host memory of one copy of the weights; with_delta=False keeps none. keys: for publishers with
    security curve. Use from one thread at a time.
    """

    def __init__(self, with_delta: bool = True, keys: ClientKeys | None = None) -> None:
        self._with_delta, self._keys = with_delta, keys
        self._base: zmq.Base | None = None

    def read(self, source: str, version: Version) -> dict[str, Tensor]:
        """The tensors of version by name; they must not be changed. WeightSyncError when it cannot be had."""
        if not source.startswith(zmq.SCHEME):
            return shm.read(source, version)
        weights = zmq.read(source, version, self._base, keys=self._keys)
        self._base = zmq.Base(version, weights) if self._with_delta else None
        return weights
