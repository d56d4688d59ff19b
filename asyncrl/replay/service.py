"""What replay answers to every message of asyncrl.wire, over one ROUTER.

Decides nothing about age or order (the queue does) and imports no torch.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.replay.desk import Desk
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.journal import Journal
from asyncrl.replay.ledger import Lease
from asyncrl.replay.peers import Peer, Peers, foreign_schema, objection, wrong_schema
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.snapshot import Snapshot, SnapshotFile
from asyncrl.replay.state import state
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
    """Connects queue, evaluations and peers to a socket. `now` is a monotonic clock in seconds."""

    def __init__(
        self,
        queue: ReplayQueue,
        evaluations: Evaluations,
        socket: Server,
        *,
        heartbeat_timeout_s: float = 15.0,
        journal: Journal | None = None,
        snapshots: SnapshotFile | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue, self.evaluations, self.socket, self.peers = queue, evaluations, socket, Peers()
        self._heartbeat_timeout_s, self._journal, self._now = heartbeat_timeout_s, journal, now
        self._desk = Desk(queue)
        self._snapshots = snapshots
        self._boot, self._restarts = uuid.uuid4().hex, 0
        self._saved: tuple[set[str], str, int] = (set(), "", 0)
        self._source = ""
        self._logged: set[str] = set()
        self._owed: dict[str, list[str]] = {}
        self._ticked = 0.0
        self._done_at: float | None = None
        self._finished_at: float | None = None
        self._stopped_at: float | None = None
        self._fetched = False

    def resume(self, snapshot: Snapshot) -> None:
        """Go on where an earlier process was killed: its snapshot, and what it committed since."""
        now = self._now()
        self._restarts, self._source = snapshot.restarts + 1, snapshot.source
        self.queue.load(snapshot.queue)
        self.evaluations.load(snapshot.evaluations)
        if self._journal is not None:
            self.queue.repeat(self._journal.since(snapshot.journal_bytes))
        if snapshot.done:
            self._done_at = now
            self.evaluations.finish(self.queue.clock.newest, now)
        self.queue.recovery.begin(snapshot.generators, now + self._heartbeat_timeout_s)
        log.warning("started again at update %d; waiting for %s", self.queue.clock.update, snapshot.generators)

    def save(self) -> None:
        """Write the snapshot if the last one is out of date, before anybody hears why."""
        alive = {name for name, g in self.peers.generators.items() if g.alive}
        names, source, evaluations = self._saved
        current = alive <= names and source == self._source and evaluations == len(self.evaluations.finished)
        if self._snapshots is None or (current and not self.queue.unsaved):
            return
        self._saved = alive, self._source, len(self.evaluations.finished)
        self._snapshots.write(
            restarts=self._restarts,
            queue=self.queue.save(),
            evaluations=self.evaluations.save(),
            source=self._source,
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
        replies = self._desk.answers(now, note)
        self.save()
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
            self._malformed(identity, frames, exc)
        except ValueError as exc:
            self._refuse(identity, "bad_request", str(exc))

    def _message(self, identity: bytes, message: wire.Message, now: float) -> None:
        if isinstance(message, wire.Hello):
            return self._hello(identity, message, now)
        peer = self.peers.seen(identity, now)
        if isinstance(message, wire.Status):
            return self._status(identity, peer)
        if peer is None:
            return self._rejoin(identity)
        if peer.role == "generator":
            return self._from_generator(peer, message, now)
        return self._from_learner(peer, message, now)

    def _from_generator(self, peer: Peer, message: wire.Message, now: float) -> None:
        if self._stopped_at is not None:
            self._send(peer, wire.Stop("the run is over"))
            return
        match message:
            case wire.LeaseRequest():
                self._lease(peer, message, now)
            case wire.Heartbeat(held=held, gauges=gauges, busy=busy):
                self.peers.generators[peer.name].gauges = gauges
                self.peers.generators[peer.name].busy.extend(busy)
                self._holds(peer, Version(*held), now)
            case wire.EvalResult(version=version):
                if self.queue.clock.unknown(Version(*version)):
                    raise ValueError(f"evaluation answers of version {Version(*version)}, which was never published")
                self.evaluations.put(message)
            case wire.Failed(lease_id=lease_id, reason=reason):
                if not (
                    self.queue.fail(peer.name, lease_id, reason) or self.evaluations.fail(peer.name, lease_id, reason)
                ):
                    self.queue.tally.count("late_failure")
            case _:
                raise ValueError(f"a generator may not send {type(message).__name__}")

    def _from_learner(self, peer: Peer, message: wire.Message, now: float) -> None:
        match message:
            case wire.Take():
                self._desk.park(peer.identity, message, now)
            case wire.Commit(take_id=take_id, update=update, outcome=outcome, group_ids=group_ids, seq=seq):
                committed = self.queue.commit(take_id, update, outcome, group_ids)
                if self._journal is not None:
                    self._journal.write(committed)
                self.save()
                self._send(peer, wire.Ack([], group_ids, seq))
            case wire.Published(epoch=epoch, update=update, source=source, seq=seq):
                self._published(Version(epoch, update), source, now)
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
        why = objection(hello, self.queue.model)
        if why:
            log.warning("refused a peer: %s", why)
            return self._refuse(identity, "refused_peer", why)
        if self.peers.join(identity, hello, now):
            self._lost(hello.peer_id, "restarted_generator")
        self._desk.forget_all_but(set(self.peers.known))
        clock, useless = self.queue.clock, []
        if hello.role == "generator":
            held = Version(*hello.held) if hello.held is not None else clock.newest or Version(0, 0)
            useless = self.queue.claim(hello.peer_id, held, hello.leases, hello.kept, now)
        self.save()
        if useless:
            # Before the Welcome, after which it sends again what it keeps.
            kept = [i.rpartition("#")[0] for i in set(useless) & set(hello.kept)]
            self._send(self.peers.known[identity], wire.Ack([], kept))
            self._send(self.peers.known[identity], wire.Cancel(useless))
        newest = (*clock.newest, self._source) if clock.newest is not None else None
        self._send(self.peers.known[identity], wire.Welcome(clock.epoch, clock.update, newest, self._boot))

    def _lease(self, peer: Peer, request: wire.LeaseRequest, now: float) -> None:
        """Evaluation responses first, training groups for the rest."""
        held = Version(*request.held)
        want, rows = min(max(request.want, 0), MAX_WANT), min(max(request.rows, 0), MAX_WANT)
        waiting = self.queue.recovery.active
        extra = [] if waiting else self.evaluations.lease(peer.name, held, rows or want, now)
        size = self.queue.limits.group_size
        left = want - len(extra) if not rows else min(want, (rows - len(extra)) // size)
        leases, idle = self.queue.lease(peer.name, held, max(0, left), now)
        self.save()
        if not self._send(peer, wire.Leases(extra + [_to_msg(x, now) for x in leases], idle)):
            self.queue.withdraw(leases)
            for lease in extra:
                self.evaluations.fail(peer.name, lease.lease_id, "undelivered")
        self._holds(peer, held, now)

    def _group(self, identity: bytes, frames: list[wire.Buffer], now: float) -> None:
        peer = self.peers.seen(identity, now)
        if peer is None:
            return self._rejoin(identity)
        if peer.role != "generator":
            raise ValueError("groups come from generators")
        group = wire.decode_group(frames)
        status, _ = self.queue.put(group, frames, peer.name)
        keep = status in ("admitted", "known")
        self._send(peer, wire.Ack([group.group_id], []) if keep else wire.Ack([], [group.group_id]))

    def _published(self, version: Version, source: str, now: float) -> None:
        if min(version) < 0:
            raise ValueError(f"version {version} is negative")
        if not self.queue.publish(version):
            # A learner that has just begun again may publish the same version from another place.
            self._source = source if version == self.queue.clock.newest else self._source
            return self.save()
        self._source = source
        self.evaluations.publish(version)
        self.save()
        for name, generator in self.peers.generators.items():
            generator.told_at = now
            self._tell(name, wire.NewVersion(version.epoch, version.update, source))

    def _status(self, identity: bytes, peer: Peer | None) -> None:
        values = state(self.queue, self.evaluations, self.peers, self.finished, self._restarts)
        sent = self.socket.send(identity, wire.encode(wire.StatusReply(values)))
        if sent and self.finished and peer is not None and peer.role == "learner":
            self._fetched = True

    # --- time -----------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self.queue.expire(now)
        for name in self.peers.silent(now, self._heartbeat_timeout_s):
            log.warning(
                "generator %s was silent for %g s; its leases are given out again", name, self._heartbeat_timeout_s
            )
            self._lost(name, "dead_generator")
        if not self.queue.recovery.active:
            self.evaluations.tick(self.queue.clock.newest, self.peers.held(), now)
        if self.finished and self._finished_at is None:
            self._finished_at = now
        if self._finished_at is None or self._stopped_at is not None:
            return
        if self._fetched or now - self._finished_at > FETCH_S:
            self._stopped_at = now
            for name in self.peers.generators:
                self._tell(name, wire.Stop("the run is over"))

    def _lost(self, name: str, reason: str) -> None:
        self.queue.generator_lost(name, reason)
        self.evaluations.generator_lost(name)

    def _holds(self, peer: Peer, held: Version, now: float) -> None:
        """Note what a generator holds; tell it again when it missed the newest version."""
        generator = self.peers.generators[peer.name]
        generator.held = held
        newest = self.queue.clock.newest
        if newest is not None and held < newest and now - generator.told_at >= TELL_S:
            generator.told_at = now
            self._send(peer, wire.NewVersion(newest.epoch, newest.update, self._source))

    # --- sending --------------------------------------------------------------------------------

    def _notify(self) -> None:
        """Tell senders which groups are resolved, and generators which leases are void."""
        for name, group_id in self.queue.drain_resolved():
            self._owed.setdefault(name, []).append(group_id)
        # What cannot be delivered now stays owed: the sender keeps its groups until it hears of them.
        self._owed = {n: ids for n, ids in self._owed.items() if not self._tell(n, wire.Ack([], ids))}
        cancelled = self.queue.drain_cancelled() + self.evaluations.drain_cancelled()
        for name in {n for n, _ in cancelled}:
            self._tell(name, wire.Cancel([lease_id for n, lease_id in cancelled if n == name]))

    def _send(self, peer: Peer, message: wire.Message) -> bool:
        return self.socket.send(peer.identity, wire.encode(message))

    def _tell(self, name: str, message: wire.Message) -> bool:
        generator = self.peers.generators.get(name)
        return generator is not None and self.socket.send(generator.identity, wire.encode(message))

    def _refuse(self, identity: bytes, counter: str, why: str) -> None:
        self.queue.tally.count(counter)
        self._log_once(f"{counter}: {why}")
        self.socket.send(identity, wire.encode(wire.Refused(why)))

    def _rejoin(self, identity: bytes) -> None:
        """A stranger: most often one that knew an earlier process of this replay."""
        self.queue.tally.count("no_hello")
        self.socket.send(identity, wire.encode(wire.Rejoin()))

    def _malformed(self, identity: bytes, frames: list[wire.Buffer], exc: WireError) -> None:
        self.queue.tally.count("malformed")
        self._log_once(f"malformed: {exc}")
        schema = foreign_schema(frames)
        if schema is not None:
            self.socket.send(identity, wire.encode(wire.Refused(wrong_schema(schema))))

    def _log_once(self, text: str) -> None:
        """Log each kind of text once: a broken peer repeats itself."""
        key = re.sub(r"\d+", "#", text)[:80]
        if key not in self._logged and len(self._logged) < 256:
            self._logged.add(key)
            log.warning("%s (this kind is logged once and counted)", text[:500])


def _to_msg(lease: Lease, now: float) -> wire.LeaseMsg:
    prompt = wire.prompt_to_msg(lease.prompt)
    return wire.LeaseMsg(lease.lease_id, lease.group_id, lease.attempt, prompt, lease.expires - now)
