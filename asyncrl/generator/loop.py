"""The generator's loop: keep the engine full of leases, push what is finished, load what is new.

One asyncio loop; the engine decodes in its own thread and verifiers run in worker processes.
Any number of generators may join and leave; a group is kept until replay says it is resolved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.engines.base import Engine
from asyncrl.engines.gate import Gate
from asyncrl.errors import (
    RouteError,
    TaskError,
    TrajectoryError,
    TransportError,
    VersionGone,
    WeightSyncError,
    WireError,
)
from asyncrl.generator.beats import HEARTBEAT_S, Beats
from asyncrl.generator.busy import BusyLog
from asyncrl.generator.failures import Failures
from asyncrl.generator.leave import SAY_S, cancel, say, settle
from asyncrl.generator.link import Link
from asyncrl.generator.outbox import RESEND_S, Outbox
from asyncrl.generator.reading import reader
from asyncrl.generator.sample import MixedVersions, OutOfTime, Sampler, held_tuple
from asyncrl.transport.keys import client_keys
from asyncrl.transport.rendezvous import Place
from asyncrl.types import Version

log = logging.getLogger(__name__)

TICK_S = 0.05
MAX_LOAD_FAILURES = 3
LOAD_TIMEOUT_S = 180.0
"""Longest load, reading and copying: then it counts as failed. Reading gives up earlier when nothing moves."""
PHASES = 4
"""With carriers whose phases have weights.timeout_s each: that many of them may be slow in one load."""
LOAD_RETRY_S = 1.0
"""Long enough for a newer announcement, or for the Stop of a run that is over, to arrive first."""


class Generator:
    """State of one generator process."""

    def __init__(self, config: Config, place: Place, sampler: Sampler, generator_id: str) -> None:
        self.config, self.sampler, self.id = config, sampler, generator_id
        self.engine: Engine = sampler.engine
        self.boot = uuid.uuid4().hex
        self.stopped = asyncio.Event()
        self.signal = 0
        self.wake, self.resend = asyncio.Event(), asyncio.Event()
        self.cause: BaseException | None = None
        self.target: tuple[Version, str] | None = None
        self.held: Version | None = None
        self.running: dict[str, tuple[wire.LeaseMsg, asyncio.Task[None]]] = {}
        self.outbox = Outbox()
        self.replay_boot, self.heard = "", 0
        self.tuned, self.groups_in_flight = 0, config.generator.groups_in_flight
        self.asked_at: float | None = None
        self.pause_until = 0.0
        self.busy, self.beats, self.failures = BusyLog(), Beats(), Failures()
        self.load_failures, self.load_after, self.loading = 0, 0.0, False
        self.gone: Version | None = None
        self.whole = False
        """The next load is a re-sync: of the whole version, whatever is held."""
        w = config.weights
        self.load_limit_s = max(LOAD_TIMEOUT_S, PHASES * w.timeout_s if w.carrier in ("collective", "disk") else 0.0)
        self.reader = reader(config)
        r, limit_s = config.replay, config.run.start_timeout_s
        keys = client_keys(r.security, r.keys, r.client)
        # A process of its own identity: two generators of one id do not take each other's messages.
        identity = f"{generator_id[:200]}|{self.boot}".encode()
        self.link = Link(place, identity, self._introduction, limit_s, keys)
        self.over = False
        names = ("groups", "failed", "reward_errors", "cancelled", "load_failures", "timeouts", "resyncs")
        self.counters = dict.fromkeys(names, 0.0)

    # --- the loop -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until replay says stop or a signal comes. Raises the first fatal error."""
        await self.link.hello()
        receiving = self._spawn(self._receive())
        jobs = [self._spawn(job()) for job in (self._lease, self._load, self._heartbeat, self._resend)]
        try:
            await self.stopped.wait()
        finally:
            await cancel([*jobs, *[t for _, t in self.running.values()]])
            if self.cause is not None and not isinstance(self.cause, TransportError):
                await say(self.link, self.cause)
            if not self.over:
                await self._last_beat()
                await settle(self.link, self.outbox, receiving)
            await cancel([receiving])
        if self.cause is not None:
            raise self.cause

    def on_signal(self, number: int) -> None:
        """Leave, because somebody outside wants it."""
        self.signal = number
        self.stopped.set()

    def _spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A background task whose failure, of whatever kind, ends the generator with its cause."""
        task = asyncio.create_task(job)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        self.cause = self.cause or exc
        self.stopped.set()

    def _introduction(self) -> wire.Hello:
        i = self.sampler.info
        held = held_tuple(self.held) if self.held is not None else None
        # What is kept already is not sampled any more, though its task may still wait to hand it on.
        leases = [i for i, (lease, _) in self.running.items() if not lease.eval_id and i not in self.outbox]
        return wire.Hello(
            wire.SCHEMA, "generator", self.id, self.boot, list(i.layers), i.num_experts, i.top_k, i.vocab_size,
            i.fingerprint, held, leases, self.outbox.lease_ids, self.config.shared_settings(), self.replay_boot,
            self.heard,
        )  # fmt: skip

    async def _receive(self) -> None:
        """Waits for messages of replay, at most a second at a time."""
        while True:
            message = await self.link.next()
            if message is not None:
                self._handle(message)
                self.wake.set()

    def _handle(self, message: wire.Message) -> None:
        match message:
            case wire.Welcome(newest=newest, boot=boot, tuned=tuned):
                self._tune(tuned)
                if boot != self.replay_boot:
                    # A replay that was started again knows none of what it admitted before.
                    self.replay_boot, self.heard, self.asked_at = boot, 0, None
                    self.outbox.renew()
                    self.resend.set()
                if newest is not None:
                    self._aim(Version(newest[0], newest[1]), newest[2])
            case wire.Refused(reason=reason):
                self._fail(TransportError(f"replay refused generator {self.id}: {reason}"))
            case wire.NewVersion(epoch=epoch, update=update, source=source):
                self._aim(Version(epoch, update), source)
            case wire.Settings(tuned=tuned):
                self._tune(tuned)
            case wire.Leases(leases=leases, idle=idle, seq=seq):
                self.asked_at = None
                self.pause_until = time.monotonic() + TICK_S if idle else 0.0
                for lease in leases:
                    self._start(lease)
                gap, self.heard = seq > self.heard + 1, seq
                if gap:
                    # Leases got lost on the way: replay hears which are here, and gives the others out again.
                    self._spawn(self.link.hello())
            case wire.Ack(admitted=admitted, resolved=resolved, void=void):
                self.outbox.admitted(admitted)
                self.outbox.resolved(resolved)
                self.outbox.void(void)
            case wire.Hold(group_ids=group_ids):
                self.outbox.hold(group_ids, time.monotonic())
            case wire.Send(group_ids=group_ids):
                self.outbox.wanted(group_ids)
                self.resend.set()
            case wire.Cancel(lease_ids=lease_ids):
                for lease_id in lease_ids:
                    if lease_id in self.running:
                        self.counters["cancelled"] += 1
                        self.running[lease_id][1].cancel()
            case wire.Resync(epoch=epoch, update=update, source=source):
                self.whole = True
                if self.target is None or self.target[0] < Version(epoch, update):
                    self.target = (Version(epoch, update), source)
            case wire.Stop(reason=reason):
                log.info("stopping: %s", reason)
                self.over = True
                self.stopped.set()
            case _:
                log.warning("unexpected %s", type(message).__name__)

    def _aim(self, version: Version, source: str) -> None:
        if (self.held is None or version > self.held) and (self.target is None or version > self.target[0]):
            self.target = (version, source)

    # --- leases ---------------------------------------------------------------------------------

    def _tune(self, tuned: wire.Tuned) -> None:
        """Live settings: how many groups are sampled at a time. What is running is finished in any case."""
        configured, self.tuned = self.config.generator.groups_in_flight, tuned.seq
        wanted = int(tuned.values.get("generator.groups_in_flight", configured))
        # The embedded engine has memory for what its own config says.
        self.groups_in_flight = min(wanted, configured) if self.config.generator.engine == "torch" else wanted

    def _free_rows(self) -> int:
        size = self.config.algorithm.group_size
        used = sum(1 if lease.eval_id else size for lease, _ in self.running.values())
        return self.groups_in_flight * size - used

    async def _lease(self) -> None:
        """Ask for work while there is room. Waits for an answer; asks again after RESEND_S."""
        while True:
            self.wake.clear()
            now = time.monotonic()
            if self.asked_at is not None and now - self.asked_at > RESEND_S:
                self.asked_at = None
            rows = self._free_rows()
            want = rows // self.config.algorithm.group_size
            # Behind a closed gate the time of a lease would pass without a token.
            if isinstance(self.engine, Gate) and not self.engine.is_open:
                want = 0
            pause_until = max(self.pause_until, self.failures.until)
            if self.held is not None and want > 0 and self.asked_at is None and now >= pause_until:
                self.asked_at = now
                await self.link.send(wire.encode(wire.LeaseRequest(held_tuple(self.held), want, rows)))
            # Not wait_for: on Python 3.11 it swallows a cancellation that meets its result.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self.wake.wait()

    def _start(self, lease: wire.LeaseMsg) -> None:
        # A result that is kept goes first: replay never got it and takes it now, or says that it is void.
        if self.outbox.wanted([lease.group_id]):
            self.resend.set()
        if lease.lease_id not in self.running and lease.lease_id not in self.outbox:
            task = self._spawn(self._work(lease))
            self.running[lease.lease_id] = (lease, task)

    async def _work(self, lease: wire.LeaseMsg) -> None:
        try:
            if lease.eval_id:
                result = await self.sampler.evaluation(lease)
                await self.link.send(wire.encode(result))
            else:
                await self._push(lease)
            self.failures.succeeded()
        except (RouteError, TrajectoryError, TaskError, WireError, MixedVersions) as exc:
            # A group that cannot be scored or aligned goes back with its reason; nothing is cut to fit.
            self.counters["reward_errors" if isinstance(exc, TaskError) else "failed"] += 1
            await self._give_back(lease, f"{type(exc).__name__}: {exc}")
        except OutOfTime as exc:
            await self._give_back(lease, f"timeout: {exc}")
        finally:
            self.running.pop(lease.lease_id, None)
            self.wake.set()

    async def _give_back(self, lease: wire.LeaseMsg, reason: str) -> None:
        said = self.failures.failed(lease.lease_id, reason, time.monotonic())
        await self.link.send(wire.encode(wire.Failed(lease.lease_id, lease.group_id, said)))

    async def _push(self, lease: wire.LeaseMsg) -> None:
        try:
            group = await self.sampler.group(lease)
        except OutOfTime:
            self.counters["timeouts"] += 1
            raise
        self.counters["timeouts"] += self.sampler.counters.pop("late", 0)
        frames = wire.encode_group(group)
        self.counters["groups"] += 1
        self.outbox.add(group.group_id, lease.lease_id, frames, time.monotonic())
        # The group may be the last that the learner waits for, and its record says what failed.
        if self.held is not None and self._unscored() > 0 and self.beats.due(time.time(), self._unscored()):
            await self._beat(time.time())
        await self.link.send(frames)

    async def _resend(self) -> None:
        """Groups that replay has not admitted are sent again."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self.resend.wait()
            self.resend.clear()
            for frames in self.outbox.due(time.monotonic()):
                await self.link.send(frames)

    # --- weights and liveness -------------------------------------------------------------------

    def _evaluating(self) -> bool:
        return any(lease.eval_id for lease, _ in self.running.values())

    async def _load(self) -> None:
        """Load the newest version; deferred while evaluation leases of the held one run.

        A load that fails keeps the old label (the lag rule then stops the leases) and is retried;
        MAX_LOAD_FAILURES in a row end this generator, and the run goes on without it. A version that nobody offers
        now is waited for: its generator is sound.
        """
        deferred: float | None = None
        while True:
            await asyncio.sleep(TICK_S / 5)
            if self.target is None or time.monotonic() < self.load_after:
                continue
            if self._evaluating():
                deferred = deferred or time.monotonic()
                if time.monotonic() - deferred < self.config.eval.timeout_s:
                    continue
            deferred = None
            version, source = self.target
            self.target, whole, self.whole = None, self.whole, False
            if whole:
                self.reader.forget()
            try:
                await self._load_now(version, source)
            except WeightSyncError as exc:
                self.whole = self.whole or whole
                if self.gone != version:
                    await say(self.link, exc)
                self._load_failed(exc, version, source)
                continue
            self.load_failures = 0
            self.held = version
            self.counters["resyncs"] += whole
            self.wake.set()

    async def _load_now(self, version: Version, source: str) -> None:
        """Waits for the engine at most load_limit_s; WeightSyncError after.

        That is without the time which running responses get before it (weights.on_load); their leases bound that.
        """
        self.loading = True
        try:
            fetch = self.reader.source(source, version)
            if isinstance(self.engine, Gate):
                await self.engine.load(version, fetch, self.load_limit_s)
            else:
                async with asyncio.timeout(self.load_limit_s):
                    await self.engine.load(version, fetch)
        except TimeoutError as exc:
            raise WeightSyncError(f"loading version {version} took more than {self.load_limit_s:g} s") from exc
        finally:
            self.loading = False

    def _load_failed(self, exc: WeightSyncError, version: Version, source: str) -> None:
        self.counters["load_failures"] += 1
        if isinstance(exc, VersionGone):
            # The learner is being started again: it will publish anew, and until then nobody has this version.
            if self.gone != version:
                log.warning("version %s is gone; waiting for its publisher or a newer one: %s", version, exc)
            self.gone = version
        else:
            self.load_failures += 1
            log.warning("version %s was not loaded (%d in a row): %s", version, self.load_failures, exc)
        if self.load_failures >= MAX_LOAD_FAILURES:
            raise exc
        self.load_after = time.monotonic() + LOAD_RETRY_S
        # A newer announcement may have come meanwhile, and may be why the old file is gone.
        if self.target is None:
            self.target = (version, source)

    async def _heartbeat(self) -> None:
        """Samples the engine every tick and reports when it is due; Hello until a version is held."""
        while True:
            now = time.time()
            self.busy.sample(now, float(self.engine.stats()["busy_s"]))
            if self.beats.due(now, self._unscored()):
                await self._beat(now)
            await asyncio.sleep(TICK_S)

    def _unscored(self) -> float:
        """How much could not be scored so far."""
        scoring = self.sampler.gauges()
        return self.counters["reward_errors"] + sum(scoring.get(f"verifier_{w}", 0.0) for w in ("errors", "timeouts"))

    async def _last_beat(self) -> None:
        """What was counted since the last heartbeat; nothing when replay does not take it at once."""
        with contextlib.suppress(TimeoutError, TransportError):
            async with asyncio.timeout(SAY_S):
                if self.held is not None and self.link.welcomed:
                    await self._beat(time.time())

    async def _beat(self, now: float) -> None:
        self.beats.sent(now, self._unscored())
        if self.held is None:
            # The answer names the newest version, so a missed announcement heals here.
            await self.link.hello()
            return
        gauges = {k: float(v) for k, v in self.engine.stats().items()} | self.counters | self.sampler.gauges()
        gauges |= {"in_flight": float(len(self.running)), "outbox": float(len(self.outbox)), "time": now}
        gauges |= {"loading": float(self.loading), "tuned": float(self.tuned)}
        await self.link.send(wire.encode(wire.Heartbeat(held_tuple(self.held), gauges, self.busy.drain())))
