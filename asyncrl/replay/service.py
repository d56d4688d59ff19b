"""What replay answers to every message of asyncrl.wire, over one ROUTER.

Decides nothing about age or order (the queue does) and imports no torch.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.replay.claims import Claim, lease_message
from asyncrl.replay.desk import Desk
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.fence import check
from asyncrl.replay.journal import Journal
from asyncrl.replay.notices import Notices
from asyncrl.replay.peers import Peer, Peers, displacement, objection
from asyncrl.replay.publications import Publications
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.refusals import Refusals
from asyncrl.replay.reports import Reports
from asyncrl.replay.snapshot import Snapshot, SnapshotFile
from asyncrl.replay.state import state
from asyncrl.replay.tuning import Tuning
from asyncrl.replay.ward import Ward
from asyncrl.replay.watchdog import Watchdog, look
from asyncrl.transport.sockets import Server
from asyncrl.types import Version

log = logging.getLogger(__name__)

TICK_S = 0.05
TELL_S = 2.0
"""A generator that still holds an old version is told of the newest this often."""
FETCH_S = 30.0
"""Longest wait for the learner to fetch the last evaluation."""
LEAVE_S = 5.0
"""Time between the Stop to the generators and the end of the process."""
MAX_WANT = 65536


class ReplayServer:
    """Connects queue, evaluations and peers to a socket. name: of the run. `now` is a monotonic clock in seconds."""

    def __init__(
        self,
        queue: ReplayQueue,
        evaluations: Evaluations,
        socket: Server,
        *,
        heartbeat_timeout_s: float = 15.0,
        watchdog_s: float = math.inf,
        settings: Mapping[str, str] | None = None,
        name: str = "",
        journal: Journal | None = None,
        snapshots: SnapshotFile | None = None,
        tuning: Tuning | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue, self.evaluations, self.socket, self.peers = queue, evaluations, socket, Peers()
        self._heartbeat_timeout_s, self._journal, self._now = heartbeat_timeout_s, journal, now
        self._desk, self._tuning = Desk(queue), tuning or Tuning(queue, evaluations)
        self._versions = Publications(queue, evaluations, self._desk, journal)
        self._watchdog, self._settings, self._name = Watchdog(watchdog_s, now()), settings, name
        self.failure = ""
        """Why the watchdog ended the run."""
        self._snapshots = snapshots
        self._boot, self._restarts = uuid.uuid4().hex, 0
        self._saved: tuple[set[str], str, int] = (set(), "", 0)
        self._refusals, self._reports = Refusals(socket, queue.tally), Reports()
        self._started = now()
        self._notices, self._ward = Notices(), Ward(queue, evaluations, self.peers)
        self._ticked = 0.0
        self._done_at: float | None = None
        self._finished_at: float | None = None
        self._stopped_at: float | None = None
        self._fetched = False

    def resume(self, snapshot: Snapshot) -> None:
        """Go on where an earlier process was killed: its snapshot, and what it committed since."""
        now = self._now()
        self._restarts, self._versions.source = snapshot.restarts + 1, snapshot.source
        self.queue.load(snapshot.queue)
        self.evaluations.load(snapshot.evaluations)
        self._tuning.resume()
        self._versions.repeat(snapshot.journal_bytes)
        if snapshot.done:
            self._done_at = now
            self.evaluations.finish(self.queue.clock.newest, now)
        self.queue.recovery.begin(snapshot.generators, now + self._heartbeat_timeout_s)
        log.warning("started again at update %d; waiting for %s", self.queue.clock.update, snapshot.generators)

    def save(self) -> None:
        """Write the snapshot if the last one is out of date, before anybody hears why."""
        alive = {name for name, g in self.peers.generators.items() if g.alive}
        names, source, evaluations = self._saved
        current = alive <= names and source == self._versions.source and evaluations == len(self.evaluations.finished)
        if self._snapshots is None or (current and not self.queue.unsaved):
            return
        self._saved = alive, self._versions.source, len(self.evaluations.finished)
        self._snapshots.write(
            restarts=self._restarts,
            queue=self.queue.save(),
            evaluations=self.evaluations.save(),
            source=self._versions.source,
            generators=sorted(alive),
            done=self._done_at is not None,
            journal_bytes=self._journal.num_bytes if self._journal is not None else 0,
        )

    @property
    def finished(self) -> bool:
        """True after Done, when no evaluation is open any more."""
        return self._done_at is not None and self.evaluations.num_open == 0

    @property
    def over(self) -> bool:
        """True when the generators were told to stop and had the time to hear it."""
        return self._stopped_at is not None and self._now() - self._stopped_at >= LEAVE_S

    def step(self, timeout_s: float = TICK_S) -> None:
        """Serve what arrived; waits for the first message at most timeout_s."""
        for identity, frames in self.socket.poll(timeout_s):
            self._serve(identity, frames, self._now())
        now = self._now()
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._tick(now)
        note = f"newest version {self.queue.clock.newest}, {self.peers.num_alive} generators alive"
        note += f"; first failure: {self._watchdog.cause}" if self._watchdog.cause else ""
        replies = self._desk.answers(now, note)
        self.save()
        self._tuning.follow()
        for identity, reply in replies:
            self.socket.send(identity, reply)
        self._notify()

    # --- messages -------------------------------------------------------------------------------

    def _serve(self, identity: bytes, frames: list[wire.Buffer], now: float) -> None:
        """One message. Whatever is wrong with it is counted and answered; serving goes on."""
        try:
            if wire.kind(frames) == "group":
                self._group(identity, frames, now)
            else:
                self._message(identity, wire.decode(frames), now)
        except WireError as exc:
            self._refusals.malformed(identity, frames, exc)
        except ValueError as exc:
            self._refusals.refuse(identity, "bad_request", str(exc))

    def _message(self, identity: bytes, message: wire.Message, now: float) -> None:
        if isinstance(message, wire.Hello):
            return self._hello(identity, message, now)
        peer = self.peers.seen(identity, now)
        if isinstance(message, wire.Status):
            return self._status(identity, peer, now)
        if isinstance(message, wire.Tune):
            for to, reply in self._tuning.serve(identity, message, self.peers.generators, self.save):
                self.socket.send(to, wire.encode(reply))
            return None
        if peer is None:
            return self._refusals.rejoin(identity)
        if peer.role == "generator":
            return self._from_generator(peer, message, now)
        return self._from_learner(peer, message, now)

    def _from_generator(self, peer: Peer, message: wire.Message, now: float) -> None:
        if self._stopped_at is not None:
            self._send(peer, wire.Stop(self.failure or "the run is over"))
            return
        match message:
            case wire.LeaseRequest():
                self._lease(peer, message, now)
            case wire.Heartbeat(held=held, gauges=gauges, busy=busy):
                self.peers.beat(peer.name, gauges, busy)
                if (settings := self._tuning.lagging(peer.name, gauges, now)) is not None:
                    self._send(peer, settings)
                self._holds(peer, Version(*held), now)
            case wire.EvalResult(version=version):
                if self.queue.clock.unknown(Version(*version)):
                    raise ValueError(f"evaluation answers of version {Version(*version)}, which was never published")
                if self._ward.answers(peer.name, message):
                    self._watchdog.progress(now)
            case wire.Failed(lease_id=lease_id, reason=reason):
                self._watchdog.failed(f"{peer.name}: {reason[:500]}", now)
                self.peers.generators[peer.name].failures += 1
                if not lease_id:
                    log.warning("generator %s: %s", peer.name, reason[:500])
                    self.queue.tally.count_foreign("generator", reason)
                elif not (
                    self.queue.fail(peer.name, lease_id, reason) or self.evaluations.fail(peer.name, lease_id, reason)
                ):
                    self.queue.tally.count("late_failure")
            case _:
                raise ValueError(f"a generator may not send {type(message).__name__}")

    def _from_learner(self, peer: Peer, message: wire.Message, now: float) -> None:
        if self.failure:
            self._send(peer, wire.Stop(self.failure))
            return
        check(peer.name, message, self.queue)
        match message:
            case wire.Take():
                self._watchdog.asked(now)
                self._desk.park(peer.identity, message, now)
            case wire.Commit(take_id, update, outcome, group_ids, seq, batch):
                committed = self.queue.commit(take_id, update, outcome, group_ids, batch)
                if self._journal is not None:
                    self._journal.write(committed)
                self._watchdog.progress(now)
                self.save()
                self._send(peer, wire.Ack([], group_ids, seq))
            case wire.Published(seq=seq):
                self._published(peer, message, now)
                self._send(peer, wire.Ack([], [], seq))
            case wire.Verdict(seq=seq):
                self._ward.judge(message, now)
                self.save()
                self._send(peer, wire.Ack([], [], seq))
            case wire.Report(seq=seq):
                self._reports.put(message, now)
                self._send(peer, wire.Ack([], [], seq))
            case wire.Done(seq=seq):
                if self._done_at is None:
                    self._done_at = now
                    self.queue.close()
                    self.evaluations.finish(self.queue.clock.newest, now)
                    self.save()
                self._send(peer, wire.Ack([], [], seq))
            case _:
                raise ValueError(f"a learner may not send {type(message).__name__}")

    def _hello(self, identity: bytes, hello: wire.Hello, now: float) -> None:
        clock, claim = self.queue.clock, Claim([], [], [])
        why = objection(hello, self.queue.model, self._settings) or self.peers.refusal(identity, hello, clock.epoch)
        if why:
            log.warning("refused a peer: %.500s", why)
            return self._refusals.refuse(identity, "refused_peer", why)
        for old in self.peers.displace(identity, hello):
            self._send(old, wire.Refused(displacement(old.role, old.name)))
        again = any((p.name, p.boot_id) == (hello.peer_id, hello.boot_id) for p in self.peers.known.values())
        if not again:
            log.info("%s joined", hello.peer_id)  # asyncrl.remote waits for these lines
        if self.peers.join(identity, hello, now):
            self._lost(hello.peer_id, "restarted_generator")
        self.queue.quarantine.joined(hello.peer_id, hello.boot_id)
        self._desk.forget_all_but(set(self.peers.known))
        if hello.role == "generator":
            held = Version(*hello.held) if hello.held is not None else clock.newest or Version(0, 0)
            heard = hello.heard if hello.replay == self._boot else -1
            claim = self.queue.claim(hello.peer_id, held, hello.leases, hello.kept, now, heard)
        self.save()
        # Before the Welcome, after which a generator that is new here sends again what it keeps.
        for message in claim.messages(again):
            self._send(self.peers.known[identity], message)
        newest = (*clock.newest, self._versions.source) if clock.newest is not None else None
        welcome = wire.Welcome(clock.epoch, clock.update, newest, self._boot, self.queue.knobs.coming)
        self._send(self.peers.known[identity], welcome)

    def _lease(self, peer: Peer, request: wire.LeaseRequest, now: float) -> None:
        """Evaluation responses first, training groups for the rest."""
        held = Version(*request.held)
        want, rows = min(max(request.want, 0), MAX_WANT), min(max(request.rows, 0), MAX_WANT)
        waiting = self.queue.recovery.active or self._ward.is_out(peer.name)
        extra = [] if waiting else self.evaluations.lease(peer.name, held, rows or want, now)
        size = self.queue.limits.group_size
        left = want - len(extra) if not rows else min(want, (rows - len(extra)) // size)
        generator = self.peers.generators[peer.name]
        seq = generator.num_leases + 1
        leases, idle = self.queue.lease(peer.name, held, max(0, left), now, seq)
        self.save()
        # First what became of earlier results: a prompt that is leased anew must not be taken for one of them.
        self._notify()
        if self._send(peer, wire.Leases(extra + [lease_message(x, now) for x in leases], idle, seq)):
            generator.num_leases = seq
        else:
            self.queue.withdraw(leases)
            for lease in extra:
                self.evaluations.fail(peer.name, lease.lease_id, "undelivered")
        self._holds(peer, held, now)

    def _group(self, identity: bytes, frames: list[wire.Buffer], now: float) -> None:
        peer = self.peers.seen(identity, now)
        if peer is None:
            return self._refusals.rejoin(identity)
        if peer.role != "generator":
            raise ValueError("groups come from generators")
        group = wire.read_group(frames)
        status, _ = self.queue.put(group, frames, peer.name)
        if status == "admitted":
            self._watchdog.progress(now)
        if status == "no_room":
            self._send(peer, wire.Hold([group.group_id]))
            return
        self._notices.result(peer.name, group, status, group.group_id in self.queue.ledger.entries)

    def _published(self, peer: Peer, message: wire.Published, now: float) -> None:
        version, epoch, source = Version(message.epoch, message.update), self.queue.clock.epoch, message.source
        newer = self._versions.announce(version, source, message.batches)
        self.save()
        if not newer:
            return
        if version.epoch > epoch:
            self.peers.take_over(peer.identity)
        self._watchdog.progress(now)
        for name, generator in self.peers.generators.items():
            generator.told_at = now
            self._tell(name, wire.NewVersion(version.epoch, version.update, source))

    def _status(self, identity: bytes, peer: Peer | None, now: float) -> None:
        values = state(
            self.queue, self.evaluations, self.peers, now,
            finished=self.finished, restarts=self._restarts, run=self._name, uptime_s=now - self._started,
            failure=self.failure, first_failure=self._watchdog.cause,
            report=self._reports.state(), update_s=self._reports.update_s(),
            take_waits=dict(self._desk.waited),
        )  # fmt: skip
        sent = self.socket.send(identity, wire.encode(wire.StatusReply(values)))
        if sent and self.finished and peer is not None and peer.role == "learner":
            self._fetched = True

    # --- time -----------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self.queue.expire(now)
        for name, resync in self._ward.tick(self._versions.source, now):
            self._tell(name, resync)
        for name, group_id in self.queue.room.ask(now):
            self._tell(name, wire.Send([group_id]))
        for name in self.peers.silent(now, self._heartbeat_timeout_s):
            log.warning(
                "generator %s was silent for %g s; its leases are given out again", name, self._heartbeat_timeout_s
            )
            self._lost(name, "dead_generator")
        if not self.queue.recovery.active:
            self.evaluations.tick(self.queue.clock.newest, self.peers.held(self.queue.quarantine.barred), now)
        if self.finished and self._finished_at is None:
            self._finished_at = now
        if self._stopped_at is not None:
            return
        if self._done_at is None:
            self._watch(now)
        elif self._finished_at is not None and (self._fetched or now - self._finished_at > FETCH_S):
            self._stopped_at = now
            for name in self.peers.generators:
                self._tell(name, wire.Stop("the run is over"))

    def _watch(self, now: float) -> None:
        """End a run in which nothing can progress; everybody hears why. The snapshot stays."""
        verdict = self._watchdog.check(look(self.queue, self.peers, self._desk.waits), now)
        if verdict.warning:
            log.warning("%s", verdict.warning)
        if verdict.stop:
            self._stopped_at, self.failure = now, verdict.stop
            self._desk.forget_all_but(set())
            for peer in self.peers.known.values():
                self._send(peer, wire.Stop(verdict.stop))

    def _lost(self, name: str, reason: str) -> None:
        why = "it fell silent" if reason == "dead_generator" else "it ended and was started again"
        self._watchdog.failed(f"{name}: {why}", self._now())
        self.queue.generator_lost(name, reason)
        self.evaluations.generator_lost(name)

    def _holds(self, peer: Peer, held: Version, now: float) -> None:
        """Note what a generator holds; tell it again when it missed the newest version."""
        generator = self.peers.generators[peer.name]
        generator.held = held
        newest = self.queue.clock.newest
        if newest is not None and held < newest and now - generator.told_at >= TELL_S:
            generator.told_at = now
            self._send(peer, wire.NewVersion(newest.epoch, newest.update, self._versions.source))

    # --- sending --------------------------------------------------------------------------------

    def _notify(self) -> None:
        """Tell senders which groups are here and which are resolved, and generators which leases are void."""
        self._notices.resolved(self.queue.drain_resolved())
        for name, ack, owed in self._notices.drain():
            # Owed as long as the generator is known: it keeps its groups until it hears that they are resolved.
            if not self._tell(name, ack) and name in self.peers.generators:
                self._notices.untold(name, owed)
        cancelled = self.queue.drain_cancelled() + self.evaluations.drain_cancelled()
        for name in {n for n, _ in cancelled}:
            self._tell(name, wire.Cancel([lease_id for n, lease_id in cancelled if n == name]))

    def _send(self, peer: Peer, message: wire.Message) -> bool:
        return self.socket.send(peer.identity, wire.encode(message))

    def _tell(self, name: str, message: wire.Message) -> bool:
        generator = self.peers.generators.get(name)
        return generator is not None and self.socket.send(generator.identity, wire.encode(message))
