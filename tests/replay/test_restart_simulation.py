"""Replay is killed and started again at random points of random runs, generators and two learner ranks go on.

The books of the simulation say what may not be lost: what a generator keeps is not sampled again, what the
learner got is not given out for another update, what was committed is never trained again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec
import pytest

from asyncrl import wire
from asyncrl.replay.cursor import RESERVE
from asyncrl.replay.desk import PATIENCE_S, Desk
from asyncrl.replay.ledger import State
from asyncrl.replay.queue import Committed, QueueState, ReplayQueue
from asyncrl.types import Group, Version
from tests.replay.support import MODEL, deliver, make_prompts
from tests.replay.test_simulation import CASES, GENERATORS, SLOTS, Simulation

GRACE_S = 15.0
WORLD = 2


class Killed(Exception):
    """Replay died here; nobody heard what it was about to say."""


class RestartSimulation(Simulation):
    """punctual: generators come back before replay gives up on them."""

    def __init__(self, seed: int, punctual: bool = True, **limits: object) -> None:
        super().__init__(seed, **limits)
        self.punctual, self.restarted = punctual, 0.0
        self.limits, self.kills, self.away = self.queue.limits, 0, set()
        self.journal: list[Committed] = []
        self.outbox: dict[str, dict[str, Group]] = {g: {} for g in GENERATORS}
        self.shards: dict[int, list[tuple[int, str]]] = {}
        self.batches: deque[list[str]] = deque()
        self.desk = Desk(self.queue)
        self.saved, self.mark = b"", 0
        self.gone: set[str] = set()
        self.save()

    # --- replay ---------------------------------------------------------------------------------

    def save(self) -> None:
        """As the server: before anybody hears of a change."""
        if self.queue.unsaved or not self.saved:
            self.saved, self.mark = msgspec.msgpack.encode(self.queue.save()), len(self.journal)

    def maybe_die(self) -> None:
        if self.random.random() < 0.02:
            self.restart()
            raise Killed

    def kill(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.kills += 1
        self.queue = ReplayQueue(make_prompts(self.PROMPTS), self.limits, MODEL)
        self.queue.tally.dropped = deque()
        self.queue.load(msgspec.msgpack.decode(self.saved, type=QueueState))
        self.queue.repeat(self.journal[self.mark :])
        self.queue.recovery.begin(GENERATORS, self.now + GRACE_S)
        self.desk, self.away, self.restarted = Desk(self.queue), set(GENERATORS), self.now
        self.save()

    # --- generators -----------------------------------------------------------------------------

    def come_back(self, name: str | None = None) -> None:
        """Hello with all that it has, then its outbox again in some order."""
        name = name or self.random.choice(GENERATORS)
        self.away.discard(name)
        kept = list(self.outbox[name].values())
        leases, finished = [x.lease_id for x in self.running[name]], [f"{g.group_id}#{g.attempt}" for g in kept]
        useless = self.queue.claim(name, self.held[name], leases, finished, self.now)
        self.running[name] = [x for x in self.running[name] if x.lease_id not in useless]
        self.random.shuffle(kept)
        for group in kept:
            self.put(name, group)
        self.save()

    def believed_dead(self) -> None:
        name = self.random.choice(GENERATORS)
        if name not in self.away:
            self.queue.generator_lost(name)
            self.come_back(name)

    def crash(self) -> None:
        name = self.random.choice(GENERATORS)
        if name not in self.away:
            self.gone |= set(self.outbox[name])
            self.running[name], self.outbox[name] = [], {}
            self.queue.generator_lost(name)

    def ask(self, name: str, want: int) -> int:
        if name in self.away:
            return 0
        if self.queue.recovery.active:
            assert not self.queue.lease(name, self.held[name], want, self.now).leases
            return 0
        granted = super().ask(name, want)
        for lease in self.running[name][len(self.running[name]) - granted :]:
            # Nobody who is here has it already: neither finished nor, unless its lease expired, in the works.
            here = [n for n in GENERATORS if n not in self.away]
            assert all(lease.group_id not in self.outbox[n] for n in here), lease
            others = [x for n in here for x in self.running[n] if x.group_id == lease.group_id and x is not lease]
            assert not others or not self.punctual or self.queue.tally.counters["lease_expired"], others
        self.save()
        return granted

    def send(self, name: str, lease) -> None:  # type: ignore[no-untyped-def]
        if name in self.away:
            self.running[name].append(lease)
            return
        super().send(name, lease)

    def put(self, name: str, group: Group) -> None:
        self.outbox[name].setdefault(group.group_id, group)
        entry = self.queue.ledger.entries.get(group.group_id)
        before = entry.state if entry is not None else None
        put = deliver(self.queue, group, self.payload(group), name)
        assert put.status != "refused", put
        if put.status == "resolved":
            self.outbox[name].pop(group.group_id, None)
        if put.status in ("admitted", "no_room"):
            assert before in (State.PENDING, State.LEASED, State.KEPT, State.TAKEN)
            self.sampled[group.group_id] = [[s.version for s in t.segments] for t in group.trajectories]
        self.events[put.status] += 1

    def supply(self) -> None:
        for name, group_id in self.queue.room.ask(self.now):
            if group_id in self.outbox[name] and name not in self.away:
                self.put(name, self.outbox[name][group_id])

    def repeat(self) -> None:
        name = self.random.choice(GENERATORS)
        if self.outbox[name] and name not in self.away:
            self.put(name, self.random.choice(list(self.outbox[name].values())))

    def late(self) -> None:
        """Nobody is believed dead for long here; see believed_dead."""

    def expire(self) -> None:
        self.wait(self.random.choice([1.0, 2.0, 5.0, 5.0]))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.punctual and self.now >= self.restarted + GRACE_S:
            for name in sorted(self.away):
                self.come_back(name)
        self.queue.expire(self.now)

    # --- learner --------------------------------------------------------------------------------

    def start_take(self) -> bool:
        """Ranks that lack their shard ask; each may have to ask again after a kill."""
        try:
            for rank in set(range(WORLD)) - set(self.shards):
                self.desk.park(f"r{rank}".encode(), wire.Take(self.take_id, self.u, rank, WORLD), self.now)
            replies = self.desk.answers(self.now, "")
            self.maybe_die()
            self.save()
            for identity, frames in replies:
                self.maybe_die()
                reply = wire.decode(frames)
                if isinstance(reply, wire.TakeReply) and reply.ready:
                    names = [bytes(b).decode().strip() for b in frames[2:]]
                    self.shards[int(identity[1:])] = list(zip(reply.batch, names, strict=True))
        except Killed:
            return False
        if len(self.shards) < WORLD:
            self.wait(self.random.choice([0.0, PATIENCE_S / 4]))
            return False
        everything = [pair for shard in self.shards.values() for pair in shard]
        assert len(set(everything)) == len(everything)
        take = self.queue._takes.by_id[self.take_id]
        for m, ids in enumerate(take.batches):
            got = {i for k, i in everything if k == m}
            assert got <= set(ids) and (not self.punctual or set(ids) - got <= self.gone)
            self.check_promise(tuple(got), self.u + m)
            self.batches.append(sorted(got))
        self.shards, self.take_id = {}, self.take_id + 1
        return True

    def learn(self) -> bool:
        if not self.batches and not self.start_take():
            return False
        ids = self.batches.popleft()
        assert not set(ids) & (set(self.trained) | set(self.skipped))
        outcome = "skipped" if not ids or self.random.random() < 0.1 else "trained"
        self.u += outcome == "trained"
        (self.skipped if outcome == "skipped" else self.trained).extend(ids)
        while not self.commit(ids, outcome):
            pass
        self.publish()
        return True

    def commit(self, ids: list[str], outcome: str) -> bool:
        """One try: kill before, half-way through the journal, or before the acknowledgement."""
        try:
            self.maybe_die()
            done = self.queue.commit(self.take_id - 1, self.u, outcome, ids)
            written = self.random.randint(0, len(done)) if self.random.random() < 0.05 else len(done)
            self.journal += done[:written]
            if written < len(done):
                self.restart()
                return False
            self.maybe_die()
            self.save()
            self.maybe_die()
        except Killed:
            return False
        return True

    def publish(self) -> None:
        version = Version(self.epoch, self.u)
        if self.u % self.limits.sync_every == 0 and version not in self.published:
            self.published.append(version)
            for _ in range(10):
                try:
                    self.queue.publish(version)
                    self.maybe_die()
                    self.save()
                    self.maybe_die()
                    return
                except Killed:
                    continue

    def load(self) -> None:
        name = self.random.choice(GENERATORS)
        if name not in self.away:
            super().load()

    # --- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        q = self.queue
        states = [e.state for e in q.ledger.entries.values()]
        assert all(q.ledger.count(s) == states.count(s) for s in State)
        # A generator that nobody waited for any more may come back with prompts that were given out again.
        assert q.ledger.in_flight <= (q.limits.max_lag + 1) * q.limits.groups_per_update + RESERVE * (not self.punctual)
        assert q.ledger.num_bytes == sum(e.num_bytes for e in q.ledger.entries.values())
        assert q.ledger.num_bytes <= q.tally.peak_bytes <= q.limits.capacity_bytes
        assert q.clock.update == self.u and q.clock.newest == max(self.published)
        taken = {i for ids in self.batches for i in ids} | {i for s in self.shards.values() for _, i in s}
        assert taken <= {e.group_id for e in q.ledger.of_state(State.TAKEN)}
        done = [c.group_id for c in self.journal]
        assert len(done) == len(set(done)) and set(done) == set(self.trained) | set(self.skipped)
        assert not set(done) & set(q.ledger.entries)
        for name, lease_id in q.drain_cancelled():
            self.running[name] = [x for x in self.running[name] if x.lease_id != lease_id]
        for name, group_id in q.drain_resolved():
            self.outbox[name].pop(group_id, None)

    def check_fates(self) -> None:
        fates: list[str] = [*self.trained, *self.skipped, *(i for i, _ in self.queue.tally.dropped)]
        open_ = set(self.queue.ledger.entries)
        assert len(fates) == len(set(fates)) and not set(fates) & open_
        assert self.issued <= set(fates) | open_


def events(s: RestartSimulation, kills: int) -> Iterable:
    out = [s.lease] * 20 + [s.finish] * 30 + [s.learn] * 20 + [s.load] * 6 + [s.expire, s.believed_dead, s.fail]
    out += [s.supply] * 3 + [s.surprise] * 10 * ("capacity_bytes" in s.settings)
    return out + [s.come_back] * 6 + [s.repeat, s.crash] + [s.kill] * kills


@pytest.mark.parametrize("punctual", [True, False])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_nothing_is_lost_or_trained_twice_whenever_replay_is_killed(case, punctual):
    s = RestartSimulation(seed=case, punctual=punctual, **CASES[case])
    choices = list(events(s, 1))
    for _ in range(6_000):
        event = s.random.choice(choices)
        s.events[event.__name__] += 1
        event()
        s.check()
    s.check_fates()
    assert s.kills > 60 and len(s.trained) > 30


@pytest.mark.parametrize("case", range(len(CASES)))
def test_progress_and_whole_data_epochs_after_many_kills(case):
    s = RestartSimulation(seed=50 + case, **CASES[case])
    choices = list(events(s, 3))
    for _ in range(1000):
        s.random.choice(choices)()
        s.check()
    idle = 0
    while s.queue.ledger.cursor.given < 900 and idle < 60:
        before = s.queue.ledger.cursor.given, s.u
        for name in GENERATORS:
            s.held[name] = max(s.published)
            if name in s.away:
                s.come_back(name)
            if len(s.running[name]) < SLOTS:
                s.ask(name, 2)
            while s.running[name] and name not in s.away:
                s.send(name, s.running[name].pop())
            s.check()
        s.learn()
        s.supply()
        s.wait(1.0)
        s.check()
        idle = 0 if (s.queue.ledger.cursor.given, s.u) != before else idle + 1
    assert idle < 60, s.queue.waiting
    s.check_fates()
    # 900 prompts of 300 were given out, so data epoch 0 is over: each prompt was trained once or has its reason.
    fates = [*s.trained, *s.skipped, *(i for i, _ in s.queue.tally.dropped)]
    open_ = [i for i in s.queue.ledger.entries if i.startswith("0/")]
    assert sorted([*open_, *(i for i in fates if i.startswith("0/"))]) == sorted(f"0/p{i}" for i in range(300))
    assert len(open_) == 0
