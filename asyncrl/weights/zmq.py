"""The `zmq` carrier: a publisher that serves versions in chunks on request, for generators on other hosts.

Receivers pull, so a slow or dead one costs the publisher nothing and a late one misses nothing. Knows names and bytes,
not what a model is. `read` and what it needs are in weights.fetch.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from asyncrl.errors import TransportError, WeightSyncError
from asyncrl.models.finite import is_finite
from asyncrl.transport.sockets import Buffer, Server
from asyncrl.types import Version
from asyncrl.weights.fetch import Base, newest, read
from asyncrl.weights.flat import chunk, num_chunks, pack
from asyncrl.weights.messages import SCHEME, Chunk, Get, Head, Kept, Link, Look, Probe, open_request, seal
from asyncrl.weights.versions import Offer, Versions

__all__ = ["SCHEME", "Base", "Publisher", "newest", "read"]

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""Longest wait for the serving thread to end; it may still be handing over a chunk."""

_POLL_S = 0.1


class Publisher:
    """Keeps the newest `keep` versions in host memory and serves them on a thread of its own.

    bind, security, keys, setting: as of transport.sockets.Server, with its ConfigError and TransportError. hold_s: a
    version that a reader asked for this recently stays although newer ones came, at most two of them. with_delta:
    offer the difference to earlier versions where it is small; costs one pass over the weights.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:*",
        keep: int = 2,
        security: Literal["loopback", "curve", "none"] = "loopback",
        *,
        keys: str | Path | None = None,
        setting: str = "weights.bind",
        hold_s: float = 10.0,
        with_delta: bool = True,
    ) -> None:
        self.counters: Counter[str] = Counter(chunks=0, bytes=0, unsent=0, refused=0)
        """Since start: chunks, bytes, unsent (peer absent or full), refused (not a request), refused_* (not let in)."""
        self._versions = Versions(keep, hold_s, with_delta)
        self._boot = uuid.uuid4().hex
        self._publishing = threading.Lock()
        self._stop = threading.Event()
        self._server = Server(
            bind, security, keys=keys, setting=setting, refused=self.counters, max_bytes=2**20, max_frames=16
        )
        self.source = SCHEME + self._server.address
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def publish(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> str:
        """Copy the weights, make version the newest and return its source, for read(). Waits for no receiver.

        WeightSyncError when a tensor is not finite, named twice or of a dtype without a byte form, or when
        the publisher has ended; nothing is visible then and older versions stay.
        """
        with self._publishing:
            if not self._thread.is_alive():
                raise WeightSyncError(f"version {version} not published: {self.source} has ended")
            try:
                offer = self._versions.prepare(version, pack(_finite(weights)))
            except (WeightSyncError, MemoryError) as exc:
                raise WeightSyncError(f"version {version} not published: {exc}") from exc
            offer.head = seal(_describe(offer, self._boot))
            self._versions.add(offer)
            return self.source

    def close(self) -> None:
        """Stop serving; unsent chunks leave in the background, for at most 2 s. Safe to call twice."""
        self._stop.set()
        self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                for peer, frames in self._server.poll(_POLL_S):
                    self._answer(peer, frames)
                self._versions.trim()
        finally:
            self._server.close()

    def _answer(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        match open_request(frames):
            case Look(version=version):
                offer = self._versions.find(Version(*version))
                self._send(peer, [offer.head if offer else self._kept(None)])
            case Get() as get:
                self._send_chunk(peer, get)
            case Probe(token=token):
                self._send(peer, [self._kept(token)])
            case None:
                self.counters["refused"] += 1
                if self.counters["refused"] == 1:
                    log.warning(
                        "a message to %s is not a request for weights: refused, and counted from now on", self.source
                    )

    def _send_chunk(self, peer: bytes, get: Get) -> None:
        offer = self._versions.get(get.serial)
        data = offer.stream(get.stream) if offer else None
        if data is None or not 0 <= get.chunk < num_chunks(data.nbytes):
            self._send(peer, [self._kept(None)])
            return
        part = chunk(data, get.chunk).data
        if self._send(peer, [seal(Chunk(self._boot, get.serial, get.stream, get.chunk)), part]):
            self.counters.update(chunks=1, bytes=part.nbytes)

    def _send(self, peer: bytes, frames: list[Buffer]) -> bool:
        """Never waits. A reply that finds no room is asked for again by its reader."""
        try:
            sent = self._server.send(peer, frames)
        except TransportError as exc:
            log.warning("weights: %s", exc)
            sent = False
        self.counters["unsent"] += not sent
        return sent

    def _kept(self, token: int | None) -> bytes:
        return seal(Kept(self._boot, token, tuple((v.epoch, v.update) for v in self._versions.labels)))


def _describe(offer: Offer, boot: str) -> Head:
    flat = offer.flat
    chain = tuple(Link((p.base.epoch, p.base.update), p.delta.data.nbytes, p.delta.digests) for p in offer.chain)
    return Head(
        boot, offer.serial, (offer.version.epoch, offer.version.update), tuple(e[:3] for e in flat.entries),
        flat.data.nbytes, flat.digests, flat.checksum, chain,
    )  # fmt: skip


def _finite(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if not is_finite(tensor):
            raise WeightSyncError(f"{name} has non-finite values")
        yield name, tensor
