"""A generator's side of the `collective` carrier: it asks the learner for a broadcast into its engine.

The engine itself receives the bytes, so this side sees names, shapes and the address of the group only.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from asyncrl.errors import TransportError, VersionGone, WeightSyncError
from asyncrl.transport.address import parse
from asyncrl.transport.keys import ClientKeys
from asyncrl.transport.sockets import Client
from asyncrl.types import Version
from asyncrl.weights.collective.messages import (
    ENGINE,
    SCHEME,
    Failed,
    Gone,
    Hash,
    Hashes,
    Join,
    Joined,
    Leave,
    Reply,
    Request,
    Wait,
    label,
    open_reply,
)
from asyncrl.weights.flat import Spec
from asyncrl.weights.messages import seal

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Longest silence of a publisher: one that lives answers in milliseconds, one that was killed never."""

PROBE_S = 1.0
"""Silence after which a request is sent again; the publisher knows it by its token."""


@dataclass(frozen=True)
class Sending:
    """One version on its way into an engine's processes (engines.base.Broadcast)."""

    group: str
    address: tuple[str, int]
    backend: str
    is_new: bool
    buckets: tuple[tuple[Spec, ...], ...]


class Groups:
    """What engines are in which group, over versions. Thread-safe."""

    def __init__(self, keys: ClientKeys | None = None) -> None:
        """keys: for publishers with security curve."""
        self.keys = keys
        self._lock = threading.Lock()
        self._joins: dict[str, str] = {}
        self._held: dict[str, str] = {}

    def begin(self, engine: str) -> tuple[str, str]:
        """A token for a new Join, and the group that the engine is in ("" for none)."""
        with self._lock:
            self._joins[engine] = token = uuid.uuid4().hex
            # Held again when this Join is answered: after one that failed nobody knows what the engine took.
            return token, self._held.pop(engine, "")

    def joined(self, engine: str, token: str, group: str) -> bool:
        """Note the group; False when the engine left or joined anew meanwhile."""
        with self._lock:
            if self._joins.get(engine) != token:
                return False
            self._held[engine] = group
            return True

    def left(self, engine: str) -> str | None:
        """Forget the engine; the token of its last Join, None when it has none."""
        with self._lock:
            self._held.pop(engine, None)
            return self._joins.pop(engine, None)


class Source:
    """One announced version (engines.base.Source)."""

    kind: Literal["broadcast"] = "broadcast"

    def __init__(self, groups: Groups, source: str, version: Version) -> None:
        if not source.startswith(SCHEME):
            raise WeightSyncError(f"{source!r} is not a source of the collective carrier")
        self._groups, self._source, self._version = groups, source, version
        self._engine: str | None = None
        self._told_gone = False

    def tensors(self) -> NoReturn:
        """WeightSyncError: an engine receives the tensors itself."""
        raise WeightSyncError(f"{self._source} gives a broadcast, no tensors; engine=torch needs another carrier")

    def folder(self) -> AbstractContextManager[Path]:
        """WeightSyncError: this carrier has no folders."""
        raise WeightSyncError(f"{self._source} gives a broadcast, no folder; set weights.carrier=disk")

    def broadcast(self, engine: str, ranks: int) -> Sending:
        """Have the version sent to the processes of an engine. Waits until the learner has read it and begins.

        As long as the learner says that it works on it, which weights.timeout_s bounds there. VersionGone when it is
        silent or has the version no more.
        """
        if not ENGINE.fullmatch(engine):
            raise WeightSyncError(f"{engine!r} cannot name an engine here: 1 to 100 letters, digits, '.', '_' and '-'")
        self._engine = engine
        token, held = self._groups.begin(engine)
        try:
            reply = self._ask(Join(token, engine, ranks, label(self._version), held), f"version {self._version}")
        except VersionGone:
            if self._told_gone:  # nothing began, so there is nothing to leave
                self._groups.left(engine)
            raise
        if not isinstance(reply, Joined):
            raise _unexpected(reply)
        if not self._groups.joined(engine, token, reply.group):
            raise WeightSyncError(f"{engine} left while version {self._version} was on its way")
        host = parse(self._source.removeprefix(SCHEME)).host
        return Sending(reply.group, (host, reply.port), reply.backend, reply.is_new, reply.buckets)

    def leave(self, engine: str) -> None:
        """Have the learner end the sender of an engine; waits for its answer at most ANSWER_S. Never raises.

        Without an answer the learner finds out by itself, in weights.timeout_s.
        """
        token = self._groups.left(engine)
        if token is None:
            return
        try:
            self._ask(Leave(token, engine), "its word that it stopped")
        except WeightSyncError as exc:
            log.warning("%s left its group unheard: %s", engine, exc)

    def checksums(self, names: Sequence[str], ranks: int) -> dict[str, frozenset[str]]:
        """What the checksums of the engine that this version was sent to may be. Waits as broadcast() does.

        Without names it asks only whether the version is there; VersionGone when it is not.
        """
        if self._engine is None and names:
            raise WeightSyncError("checksums of a version that was not sent: ask for its broadcast first")
        request = Hash(uuid.uuid4().hex, self._engine or "any", label(self._version), tuple(names), ranks)
        reply = self._ask(request, f"checksums of version {self._version}")
        if not isinstance(reply, Hashes):
            raise _unexpected(reply)
        return {name: frozenset(sums) for name, sums in reply.sums.items()}

    def _ask(self, request: Request, what: str) -> Reply:
        """The final answer to a request. VersionGone after ANSWER_S of silence; WeightSyncError for a Failed."""
        try:
            # A name of its own: what is still on its way to an earlier request must not arrive here.
            address, name = self._source.removeprefix(SCHEME), b"c" + uuid.uuid4().bytes
            with closing(Client(address, name, self._groups.keys)) as client:
                heard = time.monotonic()
                while time.monotonic() - heard < ANSWER_S:
                    client.send([seal(request)], ANSWER_S)
                    reply = _answer(client, request.token)
                    if reply is not None:
                        heard = time.monotonic()
                    if reply is not None and not isinstance(reply, Wait):
                        return self._checked(reply, what)
        except TransportError as exc:
            raise WeightSyncError(f"cannot ask {self._source} for {what}: {exc}") from exc
        raise VersionGone(f"{self._source} said nothing for {ANSWER_S:g} s, asked for {what}")

    def _checked(self, reply: Reply, what: str) -> Reply:
        match reply:
            case Gone(versions=versions):
                self._told_gone = True
                there = ", ".join(str(Version(*v)) for v in versions) or "none yet"
                raise VersionGone(f"{self._source} has no {what}; it has {there}")
            case Failed(why=why):
                raise WeightSyncError(f"{what} from {self._source}: {why}")
            case _:
                return reply


def _answer(client: Client, token: str) -> Reply | None:
    """The final answer to that token; after PROBE_S the Wait that came, or None."""
    deadline, waiting = time.monotonic() + PROBE_S, None
    while (left := deadline - time.monotonic()) > 0:
        frames = client.recv(left)
        reply = open_reply(frames) if frames else None
        if reply is None or reply.token != token:
            continue
        if not isinstance(reply, Wait):
            return reply
        waiting = reply
    return waiting


def _unexpected(reply: Reply) -> WeightSyncError:
    return WeightSyncError(f"the learner answered with {type(reply).__name__}: another version of asyncrl?")
