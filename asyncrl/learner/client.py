"""The learner's side of the wire: takes, commits and announcements, one request at a time."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl import wire
from asyncrl.arrays import Buffer
from asyncrl.errors import NoAnswer, TransportError
from asyncrl.learner.stop import Stopped
from asyncrl.transport.keys import ClientKeys
from asyncrl.transport.rendezvous import Place, address_at, wait_for_address
from asyncrl.transport.sockets import Client
from asyncrl.types import Group, ModelInfo, Version

RESEND_S = 2.0
"""A request without an answer for this long is sent again (all of them are idempotent)."""

REJOIN_S = 1.0
"""A replay that does not know this learner is introduced to it this often at most."""

LISTEN_S = 0.25
"""How often a waiting take looks whether the learner was told to stop."""

MEANWHILE_S = 0.01
"""How often a waiting take looks whether there is something to announce."""


MAX_VALUES, MAX_ALARMS, MAX_NAME = 4096, 256, 256
"""What a Report may hold."""

ANSWER_SHARE = 0.75
"""Share of a collective's timeout for which rank 0 waits for replay while the others wait for rank 0."""


class Limit(NamedTuple):
    """Longest wait for an answer in seconds, and which setting says so."""

    seconds: float
    key: str


def answer_limit(start_timeout_s: float, collective_timeout_s: float, world_size: int) -> Limit:
    """How long a commit, an announcement or a status may take: run.start_timeout_s, but never as long as other ranks
    wait in a collective meanwhile, or an absent replay would end the run as a collective that timed out."""
    share_s = ANSWER_SHARE * collective_timeout_s
    if world_size == 1 or start_timeout_s <= share_s:
        return Limit(start_timeout_s, "run.start_timeout_s")
    return Limit(
        share_s, f"{ANSWER_SHARE:g} of learner.collective_timeout_s={collective_timeout_s:g}, as other ranks wait"
    )


def reportable(values: Mapping[str, float]) -> dict[str, float]:
    """What the wire takes: at most MAX_VALUES, in a large fleet without those of single generators first."""
    known = {k: float(v) for k, v in values.items() if len(k) <= MAX_NAME}
    few = {k: v for k, v in known.items() if len(known) <= MAX_VALUES or not k.startswith("generator/")}
    return dict(list(few.items())[:MAX_VALUES])


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a take. batches[m] are its groups of batch m, bounds[m] their bound.

    tuned: the live settings of this take, coming: the newest when it was frozen; the same for every rank.
    """

    take_id: int
    batches: list[list[Group]]
    bounds: list[int]
    tuned: wire.Tuned
    coming: wire.Tuned
    probes: tuple[Group, ...] = ()
    """Groups of generators in quarantine, on rank 0: to be scored and never trained."""


class ReplayClient:
    """One rank's connection to replay.

    Every request waits for its answer at most the given timeout and raises TransportError after.
    """

    def __init__(
        self,
        place: Place,
        rank: int,
        info: ModelInfo,
        timeout_s: float,
        keys: ClientKeys | None = None,
        settings: Mapping[str, str] | None = None,
        answer: Limit | None = None,
    ) -> None:
        """Waits for the address file, when `place` is one, and for replay's welcome, at most timeout_s each.

        answer: longest wait for all that is asked later but takes, timeout_s by default.
        """
        self._peer = f"learner-{rank}"
        self._place, self._address = place, wait_for_address(place, timeout_s)
        self._identity = f"{self._peer}-{uuid.uuid4().hex[:8]}".encode()
        self._keys, self._settings = keys, dict(settings or {})
        self._socket = Client(self._address, self._identity, keys)
        self._info = info
        self._answer = answer or Limit(timeout_s, "run.start_timeout_s")
        self._boot = uuid.uuid4().hex
        self._seq = 0
        self._published: tuple[Version, str, int] | None = None
        self._held: Version | None = None
        self._reported: tuple[int, dict[str, float], list[wire.AlarmMsg]] | None = None
        self.epoch = 0
        """Run epoch of all that is asked and told; set it before the first take."""
        self.stopping: Callable[[], bool] = lambda: False
        """Asked while a take waits; True makes it raise Stopped."""
        self._rejoined_at = -REJOIN_S
        try:
            self.welcome = self._hello(Limit(timeout_s, "run.start_timeout_s"))
        except TransportError:
            self._socket.leave()
            raise

    def _introduction(self) -> wire.Hello:
        i = self._info
        return wire.Hello(
            wire.SCHEMA, "learner", self._peer, self._boot, list(i.layers), i.num_experts, i.top_k, i.vocab_size,
            i.fingerprint, self._held, settings=self._settings,
        )  # fmt: skip

    def _follow(self) -> None:
        """A file left by an earlier replay leads nowhere: connect to what it says now."""
        address = address_at(self._place)
        if address and address != self._address:
            self._socket.leave()  # what was meant for the old replay is asked again of the new one
            self._address, self._socket = address, Client(address, self._identity, self._keys)
            self._introduce()

    def _introduce(self) -> None:
        """Say Hello again. A replay that was started again may lack what it was told last."""
        self._socket.send(wire.encode(self._introduction()))
        if self._published is not None:
            (epoch, update), source, batches = self._published
            self._socket.send(wire.encode(wire.Published(epoch, update, source, batches=batches)))
        if self._reported is not None:
            self._socket.send(wire.encode(wire.Report(*self._reported, epoch=self.epoch)))

    def _hello(self, limit: Limit) -> wire.Welcome:
        message, _ = self._ask(self._introduction(), (wire.Welcome, wire.Refused), limit)
        if isinstance(message, wire.Refused):
            raise TransportError(f"replay refused the learner: {message.reason}")
        assert isinstance(message, wire.Welcome)
        return message

    def _ask(
        self,
        request: wire.Message,
        answers: tuple[type, ...],
        limit: Limit,
        meanwhile: Callable[[], bool] | None = None,
    ) -> tuple[wire.Message, list[Buffer]]:
        """Send until one of the answer kinds arrives. Waits for replay at most that long; NoAnswer after."""
        deadline = time.monotonic() + limit.seconds
        while (left := deadline - time.monotonic()) > 0:
            self._follow()
            self._socket.send(wire.encode(request))
            resend = time.monotonic() + min(RESEND_S, left)
            while (wait := resend - time.monotonic()) > 0:
                frames = self._socket.recv(min(wait, LISTEN_S if meanwhile is None else MEANWHILE_S))
                if frames is None:
                    if isinstance(request, wire.Take) and self.stopping():
                        raise Stopped
                    if meanwhile is not None and meanwhile():
                        break  # it may have passed over the answer: ask again
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
                same = all(getattr(message, x, d) == getattr(request, x, d) for x, d in (("seq", 0), ("key", "")))
                if isinstance(message, answers) and same:
                    return message, list(frames[2:])
        raise NoAnswer(
            f"replay did not answer {type(request).__name__} within {limit.seconds:g} s ({limit.key}); "
            f"is it running at {self._address}?"
        )

    def _rejoin(self, request: wire.Message) -> None:
        """A replay that was started again at the same address did not read the request.

        It says so once for every copy of it that waited; one answer is enough.
        """
        now = time.monotonic()
        if not isinstance(request, wire.Hello) and now - self._rejoined_at > REJOIN_S:
            self._rejoined_at = now
            self._introduce()
            self._socket.send(wire.encode(request))

    def take(
        self,
        take_id: int,
        update: int,
        rank: int,
        world: int,
        timeout_s: float,
        meanwhile: Callable[[], bool] | None = None,
        whole_s: float | None = None,
    ) -> Shard:
        """This rank's shard of a take. Waits until replay has a whole take, at most timeout_s. Stopped: see `stopping`.

        meanwhile: called often while it waits; True when it used this connection. whole_s: the whole wait that
        NoAnswer speaks of, when this is the last slice of one.
        """
        deadline = time.monotonic() + timeout_s
        waiting, request = "nothing yet", wire.Take(take_id, update, rank, world, self.epoch)
        # A rank asks only after replay heard of its run epoch.
        self._held = self._held or Version(self.epoch, update)
        while (left := deadline - time.monotonic()) > 0:
            try:
                limit = Limit(min(left, 30.0), "asked again until learner.take_timeout_s")
                reply, buffers = self._ask(request, (wire.TakeReply,), limit, meanwhile)
            except NoAnswer as exc:
                if waiting == "nothing yet":
                    waiting = str(exc)
                continue
            assert isinstance(reply, wire.TakeReply)
            if reply.take_id != take_id:
                continue
            if reply.ready:
                return _shard(reply, buffers)
            waiting = reply.waiting
        raise NoAnswer(f"no take for update {update} within {whole_s or timeout_s:g} s; replay waits for: {waiting}")

    def commit(self, take_id: int, update: int, outcome: str, group_ids: Sequence[str], batch: int = 0) -> None:
        """Resolve the groups of one batch. update is the learner's clock after it, batch the batches before it."""
        self._tell(wire.Commit(take_id, update, outcome, list(group_ids), self._next(), batch, self.epoch))

    def published(self, version: Version, source: str, batches: int = 0) -> None:
        """Announce a complete version that so many batches made; replay tells the generators."""
        self._tell(wire.Published(version.epoch, version.update, source, self._next(), batches))
        self._published, self._held = (version, source, batches), version

    def done(self, update: int) -> None:
        """Announce the last update."""
        self._tell(wire.Done(update, self._next(), self.epoch))

    def tuned(self) -> wire.Tuned:
        """The newest live settings."""
        reply, _ = self._ask(wire.Tune(key=uuid.uuid4().hex), (wire.TuneReply,), self._answer)
        assert isinstance(reply, wire.TuneReply)
        return reply.tuned

    def tune(self, values: Mapping[str, object], by: str) -> str:
        """Change live settings by config key, as `asyncrl tune` does. Returns what replay says of it.

        TransportError with the reason when replay refuses.
        """
        request = wire.Tune({k: json.dumps(v) for k, v in values.items()}, 0, by, uuid.uuid4().hex)
        reply, _ = self._ask(request, (wire.TuneReply,), self._answer)
        assert isinstance(reply, wire.TuneReply)
        if not reply.ok:
            raise TransportError(f"replay refused to tune {dict(values)} for {by}: {reply.text}")
        return reply.text

    def report(self, update: int, values: Mapping[str, float], alarms: Sequence[wire.AlarmMsg]) -> None:
        """Tell replay of the last record, for whoever asks for the state of the run.

        A replay that is started again hears it again. What is more than a message may hold is left out.
        """
        self._reported = (update, reportable(values), list(alarms[:MAX_ALARMS]))
        self._tell(wire.Report(*self._reported, self._next(), self.epoch))

    def verdict(self, generator_id: str, sound: bool, reason: str, boot: str = "") -> None:
        """Tell replay to quarantine a generator, or to let it in again. boot: of its process, "" for any."""
        self._tell(wire.Verdict(generator_id, sound, reason, self._next(), self.epoch, boot))

    def status(self) -> dict[str, Any]:
        """Gauges, counters and finished evaluations of replay."""
        reply, _ = self._ask(wire.Status(), (wire.StatusReply,), self._answer)
        assert isinstance(reply, wire.StatusReply)
        return reply.state

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _tell(self, message: wire.Commit | wire.Published | wire.Report | wire.Verdict | wire.Done) -> None:
        self._ask(message, (wire.Ack,), self._answer)

    def close(self) -> None:
        """Close the socket. Waits for nothing: every request had its answer, or its caller gave up."""
        self._socket.leave()


def _shard(reply: wire.TakeReply, buffers: Sequence[Buffer]) -> Shard:
    batches: list[list[Group]] = [[] for _ in reply.bounds]
    probes: list[Group] = []
    at = 0
    for batch, count in zip(reply.batch, reply.frames, strict=True):
        group = wire.decode_group([b"group", *buffers[at : at + count]])
        (probes if batch < 0 else batches[batch]).append(group)
        at += count
    return Shard(reply.take_id, batches, reply.bounds, reply.tuned, reply.coming, tuple(probes))
