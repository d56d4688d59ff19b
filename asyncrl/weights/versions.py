"""The versions that a publisher can serve: which are kept, for whom, and the deltas between them.

Knows no socket. Thread-safe: one thread adds, another one looks up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightSyncError
from asyncrl.types import Version
from asyncrl.weights import delta
from asyncrl.weights.flat import Flat

MAX_CHAIN = 8
"""Versions that a receiver may be behind and still get deltas: more add up to what one full read costs."""

MAX_HELD = 2
"""Versions beyond `keep` that readers can make a publisher hold: the bound on its memory."""


class Patch(NamedTuple):
    """The delta from version base to the next published one."""

    base: Version
    delta: Flat


@dataclass
class Offer:
    """One version with all that is served of it. serial counts publications, a label may come twice."""

    serial: int
    version: Version
    flat: Flat
    chain: tuple[Patch, ...]
    asked: float = -float("inf")
    head: bytes = field(default=b"", repr=False)

    def stream(self, number: int) -> NDArray[np.uint8] | None:
        """What is sent in chunks: 0 is the version, i the i-th delta of the chain. None if there is no such."""
        if number == 0:
            return self.flat.data
        return self.chain[number - 1].delta.data if 0 < number <= len(self.chain) else None


class Versions:
    """The newest `keep` versions, and older ones while a reader asked for them in the last hold_s seconds."""

    def __init__(self, keep: int, hold_s: float, with_delta: bool) -> None:
        if keep < 1:
            raise WeightSyncError(f"keep {keep} must be at least 1: the version being announced would vanish")
        self._keep, self._hold_s, self._with_delta = keep, hold_s, with_delta
        self._offers: list[Offer] = []
        self._serial = 0
        self._lock = threading.Lock()

    @property
    def labels(self) -> list[Version]:
        """Versions that can be read, in the order of their publication."""
        with self._lock:
            return [offer.version for offer in self._offers]

    def prepare(self, version: Version, flat: Flat) -> Offer:
        """An offer that is not visible yet, with the deltas that lead to it. Hashes and compares all bytes."""
        self._serial += 1
        newest = self._offers[-1] if self._offers else None
        return Offer(self._serial, version, flat, self._chain(newest, flat))

    def add(self, offer: Offer) -> None:
        """Make it visible as the newest; an older publication of the same label goes."""
        with self._lock:
            self._offers = [old for old in self._offers if old.version != offer.version] + [offer]
        self.trim()

    def find(self, version: Version) -> Offer | None:
        """The offer with this label; counts as asked for."""
        return self._touch(lambda offer: offer.version == version)

    def get(self, serial: int) -> Offer | None:
        """The offer with this serial number; counts as asked for."""
        return self._touch(lambda offer: offer.serial == serial)

    def trim(self) -> None:
        """Let go of what is neither new nor being read."""
        alive_since = time.monotonic() - self._hold_s
        with self._lock:
            old = self._offers[: -self._keep]
            if old:
                held = [offer for offer in old if offer.asked > alive_since][-MAX_HELD:]
                self._offers = held + self._offers[-self._keep :]

    def _touch(self, wanted: Callable[[Offer], bool]) -> Offer | None:
        with self._lock:
            for offer in self._offers:
                if wanted(offer):
                    offer.asked = time.monotonic()
                    return offer
        return None

    def _chain(self, newest: Offer | None, flat: Flat) -> tuple[Patch, ...]:
        """Deltas that lead from older versions to flat, as long as they are cheaper than flat itself."""
        if not self._with_delta or newest is None or newest.flat.entries != flat.entries:
            return ()
        encoded = delta.encode(newest.flat, flat)
        if encoded is None:
            return ()
        chain = (*newest.chain, Patch(newest.version, Flat((), np.frombuffer(encoded, np.uint8))))[-MAX_CHAIN:]
        while sum(patch.delta.data.nbytes for patch in chain) > delta.MAX_FRACTION * flat.data.nbytes:
            chain = chain[1:]
        return chain
