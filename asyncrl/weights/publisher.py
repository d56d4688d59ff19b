"""The publishing side of a carrier, whichever it is: one protocol, one place that picks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from asyncrl.types import Version
from asyncrl.weights import shm, zmq


class Publisher(Protocol):
    """Makes versions visible to readers; `weights.reader.Reader` is the other side."""

    counters: Counter[str]
    """Since start, for metrics; docs/metrics.md has each."""

    def publish(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> str:
        """Make version visible, complete, and return its source. WeightSyncError: nothing is visible."""
        ...

    def close(self) -> None:
        """Let go of every version. Safe to call twice."""
        ...


def open_publisher(
    carrier: Literal["shm", "zmq"],
    directory: Path,
    keep: int,
    *,
    bind: str,
    security: Literal["loopback", "curve", "none"],
    keys: str | None,
    with_delta: bool,
) -> Publisher:
    """The publisher of a run. directory: for shm; all keyword arguments: for zmq.

    ConfigError or TransportError when it cannot serve at `bind`, WeightSyncError when the folder cannot be had.
    """
    if carrier == "shm":
        return shm.Publisher(directory, keep)
    return zmq.Publisher(bind, keep, security, keys=keys, setting="weights.bind", with_delta=with_delta)
