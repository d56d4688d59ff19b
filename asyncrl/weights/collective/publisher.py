"""The learner's side of the `collective` carrier: versions in host memory, and one sender process per engine.

Publishing writes memory and waits for nobody. A thread answers generators, starts, watches and ends the senders, and
never blocks either: a hung engine costs its own sender. Knows names and bytes, not what a model is.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.errors import TransportError, WeightSyncError
from asyncrl.transport.address import parse
from asyncrl.transport.sockets import Buffer, Server
from asyncrl.types import Version
from asyncrl.weights import shm
from asyncrl.weights.collective.group import check
from asyncrl.weights.collective.messages import (
    SCHEME,
    Broken,
    Failed,
    Gone,
    Hash,
    Hashes,
    Join,
    Joined,
    Leave,
    Left,
    Planned,
    Refused,
    Release,
    Reply,
    Report,
    Sent,
    Setup,
    Summed,
    Wait,
    label,
    open_request,
)
from asyncrl.weights.collective.senders import SenderProcess
from asyncrl.weights.messages import Label, seal
from asyncrl.weights.rollout import Weights

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""Longest wait for the serving thread to end."""

_REAP_S = 0.3
_POLL_S = 0.1
_POLL_BUSY_S = 0.01


@dataclass(frozen=True)
class Groups:
    """How groups are made. backend auto is nccl for a device that is cuda. timeout_s: longest phase."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    device: str = "cpu"
    bucket_bytes: int = 2**29
    timeout_s: float = 120.0

    @property
    def resolved(self) -> Literal["gloo", "nccl"]:
        """The backend that is meant."""
        if self.backend != "auto":
            return self.backend
        return "nccl" if self.device.startswith("cuda") else "gloo"


@dataclass
class _Asked:
    """The last request of one engine. reply: None while it is being worked on."""

    peer: bytes
    token: str
    reply: Reply | None = None


class Publisher:
    """Keeps the newest `keep` versions (weights.shm) and sends them to the engines that ask.

    bind, security, keys, setting: as of transport.sockets.Server, with its ConfigError and TransportError. ConfigError
    too when groups of that backend cannot be made here; WeightSyncError when directory cannot be had. transform: what
    engines get instead of the learner's tensors. hold_s: silence of an engine after which its sender lets go of the
    version that it sent last. idle_s: after which it is ended.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int = 2,
        bind: str = "tcp://127.0.0.1:*",
        security: Literal["loopback", "curve", "none"] = "loopback",
        *,
        keys: str | Path | None = None,
        setting: str = "weights.bind",
        groups: Groups | None = None,
        transform: Callable[[Weights], Weights] | None = None,
        hold_s: float = 30.0,
        idle_s: float = 3600.0,
    ) -> None:
        self._groups, self._transform = groups or Groups(), transform
        check(self._groups.resolved)
        self._shm = shm.Publisher(directory, keep)
        self.counters: Counter[str] = self._shm.counters
        """Since start: reused, sent (versions to engines), failed (sendings that ended early), killed (senders that
        hung or were not needed any more), unsent, refused and refused_* (as of the zmq carrier)."""
        self.counters.update(sent=0, failed=0, killed=0, unsent=0, refused=0)
        self._keep, self._hold_s, self._idle_s = keep, hold_s, idle_s
        self._files: dict[Label, str] = {}
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._senders: dict[str, SenderProcess] = {}
        self._ended: list[SenderProcess] = []
        self._asked: dict[str, _Asked] = {}
        self._joins: dict[str, str] = {}
        self._num_groups = 0
        self._stop = threading.Event()
        try:
            self._server = Server(
                bind, security, keys=keys, setting=setting, refused=self.counters, max_bytes=2**20, max_frames=16
            )
        except BaseException:
            self._shm.close()
            raise
        self.source = SCHEME + self._server.address.removeprefix("tcp://")
        self._host = parse(self._server.address).host
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def publish(self, version: Version, weights: Weights) -> str:
        """Copy the weights to host memory, make version the newest and return its source. Waits for no engine.

        WeightSyncError as of weights.shm, or when the publisher has ended; nothing is visible then.
        """
        with self._publishing:
            if not self._thread.is_alive():
                raise WeightSyncError(f"version {version} not published: {self.source} has ended")
            path = self._shm.publish(version, self._transform(weights) if self._transform is not None else weights)
            with self._lock:
                self._files.pop(label(version), None)
                self._files[label(version)] = path
                for old in list(self._files)[: -self._keep]:
                    del self._files[old]
            return self.source

    def close(self) -> None:
        """End all senders and let go of every version. Safe to call twice."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        self._shm.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the senders, by engine."""
        return {engine: sender.pid for engine, sender in list(self._senders.items())}

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                busy = any(sender.busy for sender in self._senders.values())
                for peer, frames in self._server.poll(_POLL_BUSY_S if busy else _POLL_S):
                    self._answer(peer, frames)
                for engine, sender in list(self._senders.items()):
                    self._tend(engine, sender)
                self._ended = [sender for sender in self._ended if sender.status is None]
        finally:
            for sender in self._senders.values():
                sender.kill()
            for sender in (*self._senders.values(), *self._ended):
                sender.reap(_REAP_S)
            self._server.close()

    def _answer(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        request = open_request(frames)
        match request:
            case Leave(token=token, engine=engine):
                if self._joins.get(engine) == token:
                    self._end(engine, "its engine left")
                    self._reply(engine, Failed("", "the engine left"))
                self._send(peer, Left(token))
            case Hash(names=(), token=token, version=version):
                # Of nothing: asks only whether the version is there.
                with self._lock:
                    there = tuple(self._files)
                self._send(peer, Hashes(token, {}) if version in there else Gone(token, there))
            case Join() | Hash():
                self._take(peer, request)
            case None:
                self.counters["refused"] += 1
                if self.counters["refused"] == 1:
                    log.warning("a message to %s is not a request: refused, and counted from now on", self.source)

    def _take(self, peer: bytes, request: Join | Hash) -> None:
        """A request that takes time. Asked again it is answered again, not done again."""
        last = self._asked.get(request.engine)
        if last is not None and last.token == request.token:
            last.peer = peer
            self._send(peer, last.reply or Wait(request.token))
            return
        self._reply(request.engine, Failed("", "a newer request of the same engine came"))
        self._asked[request.engine] = _Asked(peer, request.token)
        self._send(peer, Wait(request.token))
        if isinstance(request, Join):
            self._join(request)
        else:
            self._hash(request)

    def _join(self, join: Join) -> None:
        with self._lock:
            path = self._files.get(join.version)
            there = tuple(self._files)
        if path is None:
            self._reply(join.engine, Gone("", there))
            return
        self._joins[join.engine] = join.token
        sender = self._senders.get(join.engine)
        if sender is not None and not _fits(sender, join):
            self._end(join.engine, "its engine joins anew")
            sender = None
        if sender is None:
            try:
                sender = self._senders[join.engine] = SenderProcess(self._setup(join))
            except OSError as exc:
                self._fail(join.engine, f"no sender could be started: {exc}")
                return
        sender.send(join.version, path)

    def _setup(self, join: Join) -> Setup:
        self._num_groups += 1
        g = self._groups
        name = f"asyncrl-{join.engine}-{self._num_groups}-{uuid.uuid4().hex[:8]}"
        return Setup(self._host, name, join.ranks, g.resolved, g.device, g.bucket_bytes, g.timeout_s)

    def _hash(self, hash_: Hash) -> None:
        sender = self._senders.get(hash_.engine)
        if sender is None or sender.version != hash_.version:
            what = "nothing" if sender is None else f"version {Version(*sender.version or (0, -1))}"
            self._reply(hash_.engine, Failed("", f"{what} was sent to this engine, not {Version(*hash_.version)}"))
            return
        sender.sum(hash_.names, hash_.ranks)

    def _tend(self, engine: str, sender: SenderProcess) -> None:
        """What a sender reported; its end, its time limits."""
        ended = sender.status
        for report in sender.reports():
            self._note(engine, sender, report)
        if self._senders.get(engine) is not sender:
            return
        if ended is not None:
            self._senders.pop(engine).kill()
            self._fail(engine, f"its sender ended with status {ended} at {sender.phase}; the learner's log has more")
        elif sender.late(self._groups.timeout_s):
            self._end(engine, "it hung")
            self._fail(engine, f"no progress for {self._groups.timeout_s:g} s (weights.timeout_s) at {sender.phase}")
        elif not sender.busy and sender.idle_s > self._idle_s:
            self._end(engine, f"its engine said nothing for {self._idle_s:g} s")
        elif not sender.busy and sender.holds and sender.idle_s > self._hold_s:
            sender.holds = False
            sender.tell(Release())

    def _note(self, engine: str, sender: SenderProcess, report: Report) -> None:
        match report:
            case Planned(port=port, buckets=buckets):
                setup = sender.setup
                self._reply(engine, Joined("", setup.group, port, setup.backend, sender.is_new, buckets))
            case Sent():
                self.counters["sent"] += 1
            case Summed(sums=sums):
                self._reply(engine, Hashes("", sums))
            case Refused(why=why, gone=gone):
                with self._lock:
                    there = tuple(self._files)
                self._reply(engine, Gone("", there) if gone else Failed("", why))
            case Broken(why=why):
                self._end(engine, "its group broke")
                self._fail(engine, why)

    def _fail(self, engine: str, why: str) -> None:
        self.counters["failed"] += 1
        log.warning("weights for %s: %s", engine, why)
        self._reply(engine, Failed("", why))

    def _end(self, engine: str, why: str) -> None:
        """Kill the sender of an engine, if it has one; whoever waits in its group is freed by that."""
        sender = self._senders.pop(engine, None)
        if sender is None:
            return
        self.counters["killed"] += 1
        log.info("the sender %d of %s is ended: %s", sender.pid, engine, why)
        sender.kill()
        self._ended.append(sender)

    def _reply(self, engine: str, reply: Reply) -> None:
        """Answer what the engine asked last, unless that is done already."""
        asked = self._asked.get(engine)
        if asked is None or asked.reply is not None:
            return
        reply.token = asked.token
        asked.reply = reply
        self._send(asked.peer, reply)

    def _send(self, peer: bytes, reply: Reply) -> None:
        """Never waits. A reply that finds no room is asked for again."""
        try:
            sent = self._server.send(peer, [seal(reply)])
        except TransportError as exc:
            log.warning("weights: %s", exc)
            sent = False
        self.counters["unsent"] += not sent


def _fits(sender: SenderProcess, join: Join) -> bool:
    """True when a sender is in step with the engine that asks. It may not have told yet that it sent all before.

    One whose first version was gone before it could read it has a group that nobody joined: it serves the next try,
    which would come too late as well if it had to wait for another process to start.
    """
    unused = sender.is_new and not sender.busy and not join.held
    same = unused or sender.setup.group == join.held
    return sender.status is None and same and sender.setup.ranks == join.ranks
