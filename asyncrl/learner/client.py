"""The learner's side of the wire: takes, commits and announcements, one request at a time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import wire
from asyncrl.arrays import Buffer
from asyncrl.errors import TransportError
from asyncrl.transport.keys import ClientKeys
from asyncrl.transport.rendezvous import wait_for_address
from asyncrl.transport.sockets import Client
from asyncrl.types import Group, ModelInfo, Version

RESEND_S = 2.0
"""A request without an answer for this long is sent again (all of them are idempotent)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a take. batches[m] are its groups of batch m, bounds[m] their bound."""

    take_id: int
    batches: list[list[Group]]
    bounds: list[int]


class ReplayClient:
    """One rank's connection to replay.

    Every request waits for its answer at most the given timeout and raises TransportError after.
    """

    def __init__(
        self, file: Path, rank: int, info: ModelInfo, timeout_s: float, keys: ClientKeys | None = None
    ) -> None:
        """Waits for the address file and for replay's welcome, at most timeout_s each."""
        self._peer = f"learner-{rank}"
        self._file, self._address = file, wait_for_address(file, timeout_s)
        self._identity = f"{self._peer}-{uuid.uuid4().hex[:8]}".encode()
        self._keys = keys
        self._socket = Client(self._address, self._identity, keys)
        self._info = info
        self._timeout_s = timeout_s
        self._boot = uuid.uuid4().hex
        self._seq = 0
        self._published: tuple[Version, str] | None = None
        self.welcome = self._hello()

    def _introduction(self) -> wire.Hello:
        i = self._info
        return wire.Hello(
            wire.SCHEMA, "learner", self._peer, self._boot, list(i.layers), i.num_experts, i.top_k, i.vocab_size,
            i.fingerprint,
        )  # fmt: skip

    def _follow(self) -> None:
        """A file left by an earlier replay leads nowhere: connect to what it says now."""
        address = self._file.read_text().strip() if self._file.is_file() else ""
        if address and address != self._address:
            self._socket.close()
            self._address, self._socket = address, Client(address, self._identity, self._keys)
            self._introduce()

    def _introduce(self) -> None:
        """Say Hello again. A replay that was started again may lack what it was told last."""
        self._socket.send(wire.encode(self._introduction()))
        if self._published is not None:
            (epoch, update), source = self._published
            self._socket.send(wire.encode(wire.Published(epoch, update, source)))

    def _hello(self) -> wire.Welcome:
        message, _ = self._ask(self._introduction(), (wire.Welcome, wire.Refused), self._timeout_s)
        if isinstance(message, wire.Refused):
            raise TransportError(f"replay refused the learner: {message.reason}")
        assert isinstance(message, wire.Welcome)
        return message

    def _ask(
        self, request: wire.Message, answers: tuple[type, ...], timeout_s: float
    ) -> tuple[wire.Message, list[Buffer]]:
        """Send until one of the answer kinds arrives. Waits for replay, at most timeout_s."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self._follow()
            self._socket.send(wire.encode(request))
            resend = time.monotonic() + min(RESEND_S, left)
            while (wait := resend - time.monotonic()) > 0:
                frames = self._socket.recv(wait)
                if frames is None:
                    continue
                message = wire.decode(frames)
                if isinstance(message, wire.Stop):
                    raise TransportError(f"replay stopped: {message.reason}")
                if isinstance(message, wire.Rejoin):
                    self._rejoin(request)
                    continue
                if isinstance(message, wire.Refused) and wire.Refused not in answers:
                    raise TransportError(f"replay refused {type(request).__name__}: {message.reason}")
                # An Ack may be a late one, of a request that was sent twice.
                if isinstance(message, answers) and getattr(message, "seq", 0) == getattr(request, "seq", 0):
                    return message, list(frames[2:])
        raise TransportError(f"replay did not answer {type(request).__name__} within {timeout_s:g} s")

    def _rejoin(self, request: wire.Message) -> None:
        """A replay that was started again at the same address did not read the request."""
        if not isinstance(request, wire.Hello):
            self._introduce()
            self._socket.send(wire.encode(request))

    def take(self, take_id: int, update: int, rank: int, world: int, timeout_s: float) -> Shard:
        """This rank's shard of a take. Waits until replay has a whole take, at most timeout_s."""
        deadline = time.monotonic() + timeout_s
        waiting = "nothing yet"
        while (left := deadline - time.monotonic()) > 0:
            try:
                reply, buffers = self._ask(wire.Take(take_id, update, rank, world), (wire.TakeReply,), min(left, 30.0))
            except TransportError as exc:
                if "did not answer" not in str(exc):
                    raise
                if waiting == "nothing yet":
                    waiting = str(exc)
                continue
            assert isinstance(reply, wire.TakeReply)
            if reply.take_id != take_id:
                continue
            if reply.ready:
                return _shard(reply, buffers)
            waiting = reply.waiting
        raise TransportError(f"no take for update {update} within {timeout_s:g} s; replay waits for: {waiting}")

    def commit(self, take_id: int, update: int, outcome: str, group_ids: Sequence[str]) -> None:
        """Resolve the groups of one batch. update is the learner's clock after it."""
        self._tell(wire.Commit(take_id, update, outcome, list(group_ids), self._next()))

    def published(self, version: Version, source: str) -> None:
        """Announce a complete version; replay tells the generators."""
        self._tell(wire.Published(version.epoch, version.update, source, self._next()))
        self._published = version, source

    def done(self, update: int) -> None:
        """Announce the last update."""
        self._tell(wire.Done(update, self._next()))

    def status(self) -> dict[str, Any]:
        """Gauges, counters and finished evaluations of replay."""
        reply, _ = self._ask(wire.Status(), (wire.StatusReply,), self._timeout_s)
        assert isinstance(reply, wire.StatusReply)
        return reply.state

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _tell(self, message: wire.Commit | wire.Published | wire.Done) -> None:
        self._ask(message, (wire.Ack,), self._timeout_s)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _shard(reply: wire.TakeReply, buffers: Sequence[Buffer]) -> Shard:
    batches: list[list[Group]] = [[] for _ in reply.bounds]
    at = 0
    for batch, count in zip(reply.batch, reply.frames, strict=True):
        batches[batch].append(wire.decode_group([b"group", *buffers[at : at + count]]))
        at += count
    return Shard(reply.take_id, batches, reply.bounds)
