"""Reads announced versions, whatever carrier their source names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NoReturn

from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.transport.keys import ClientKeys
from asyncrl.types import Version
from asyncrl.weights import folders, shm, zmq
from asyncrl.weights.collective import client
from asyncrl.weights.collective.messages import SCHEME as COLLECTIVE


class Reader:
    """One receiver of versions. Keeps the last version of a zmq source, to be sent the difference only.

    That costs host memory of one copy of the weights; with_delta=False keeps none. Of collective it keeps which engine
    is in which group. keys: for publishers with security curve. Use from one thread at a time.
    """

    def __init__(self, with_delta: bool = True, keys: ClientKeys | None = None) -> None:
        self._with_delta, self._keys = with_delta, keys
        self._base: zmq.Base | None = None
        self._groups = client.Groups(keys)

    def forget(self) -> None:
        """The next version comes whole: what is held here is in doubt."""
        self._base = None

    def source(self, source: str, version: Version) -> Fetch | folders.Folder | client.Source:
        """The ways to get that version, for an engine (engines.base.Source). WeightSyncError for no such carrier."""
        if source.startswith(COLLECTIVE):
            return client.Source(self._groups, source, version)
        if source.startswith(folders.SCHEME):
            return folders.Folder(source, version)
        return Fetch(self, source, version)

    def read(self, source: str, version: Version) -> dict[str, Tensor]:
        """The tensors of version by name, of shm and zmq; they must not be changed. WeightSyncError without them."""
        if not source.startswith(zmq.SCHEME):
            return shm.read(source, version)
        weights = zmq.read(source, version, self._base, keys=self._keys)
        self._base = zmq.Base(version, weights) if self._with_delta else None
        return weights


class Fetch:
    """One announced version of shm or zmq as an engine gets it (engines.base.Source)."""

    kind: Literal["tensors"] = "tensors"

    def __init__(self, reader: Reader, source: str, version: Version) -> None:
        self._reader, self._source, self._version = reader, source, version

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name; they must not be changed. WeightSyncError when they cannot be had."""
        return self._reader.read(self._source, self._version)

    def folder(self) -> AbstractContextManager[Path]:
        """WeightSyncError: this carrier has no folders."""
        raise WeightSyncError(f"{self._source} gives tensors, no folder; set weights.carrier=disk")

    def broadcast(self, engine: str, ranks: int) -> NoReturn:
        """WeightSyncError: this carrier has no process groups."""
        raise WeightSyncError(f"{self._source} gives tensors, no broadcast to {engine}; set weights.carrier=collective")

    def leave(self, engine: str) -> None:
        """Nothing is sent, so nothing ends."""

    def checksums(self, names: Sequence[str], ranks: int) -> dict[str, frozenset[str]]:
        """None: readers of tensors check their bytes themselves."""
        return {}
