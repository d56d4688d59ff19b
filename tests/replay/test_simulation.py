"""10,000 random events: finish, late finish, repeat, fail, crash, expiry, load, train, skip, publish, resume.

Some runs have memory for little more than one take, some wait for groups about to become too old.
The simulation keeps its own books (what was given out, what every group was sampled under) and checks
the queue against them after every event.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque

import pytest

from asyncrl.replay.ledger import Lease, State
from asyncrl.replay.saved import Committed
from asyncrl.replay.takes import Take
from asyncrl.types import Group, Version
from tests.replay.support import answer, deliver, make_queue

GENERATORS = ("g0", "g1", "g2")
SLOTS = 12


class Simulation:
    PROMPTS = 300

    def __init__(self, seed: int, **limits: object) -> None:
        self.random, self.settings = random.Random(seed), limits
        self.queue = make_queue(num_prompts=self.PROMPTS, lease_timeout_s=60.0, max_attempts=4, **limits)
        self.queue.tally.dropped = deque()
        self.now, self.u, self.epoch, self.take_id = 0.0, 0, 0, 0
        self.published = [Version(0, 0)]
        self.held = dict.fromkeys(GENERATORS, Version(0, 0))
        self.running: dict[str, list[Lease]] = {g: [] for g in GENERATORS}
        self.zombies: list[tuple[str, Lease]] = []
        self.sent: list[tuple[str, Group]] = []
        self.outbox: dict[str, dict[str, Group]] = {g: {} for g in GENERATORS}
        self.waited: dict[int, float] = {}
        self.sampled: dict[str, list[list[Version]]] = {}
        self.taken: deque[tuple[Take, int]] = deque()
        self.commits: list[Committed] = []
        self.batches, self.batches_at = 0, {Version(0, 0): 0}
        self.trained: list[str] = []
        self.skipped: list[str] = []
        self.issued: set[str] = set()
        self.uninvited: set[str] = set()
        self.events: Counter[str] = Counter()

    # --- generators -----------------------------------------------------------------------------

    def lease(self) -> None:
        name = self.random.choice(GENERATORS)
        want = min(self.random.randint(1, 4), SLOTS - len(self.running[name]))
        if want:
            self.ask(name, want)

    def ask(self, name: str, want: int) -> int:
        q, held = self.queue, self.held[name]
        grant = q.lease(name, held, want, self.now)
        self.running[name] += grant.leases
        self.issued |= {x.group_id for x in grant.leases}
        if len(grant.leases) < want:
            # Refused only by the rule itself, recounted here.
            a = sum(e.state is not State.PENDING for e in q.ledger.entries.values())
            late = self.u + a // q.limits.groups_per_update - held.update > q.limits.max_lag
            assert late or self.lost(held) or (grant.idle == "capacity" and self.is_full()), grant.idle
        return len(grant.leases)

    def is_full(self) -> bool:
        """What is finished, and one share for every lease and for one more, does not fit; also: a take is there."""
        q, entries = self.queue, self.queue.ledger.entries.values()
        finished = [e for e in entries if e.state in (State.KEPT, State.QUEUED, State.TAKEN)]
        sizes = sum(e.size or e.num_bytes for e in finished)
        leases = sum(e.state is State.LEASED for e in entries) + 1
        share = q.limits.capacity_bytes // (q.limits.groups_per_update * q.limits.updates_per_take)
        enough = len(finished) + leases > q.limits.groups_per_update * q.limits.updates_per_take
        return enough and sizes + leases * share > q.limits.capacity_bytes

    def lost(self, version: Version) -> bool:
        forks = {e: min(v.update for v in self.published if v.epoch == e) for e in range(1, self.epoch + 1)}
        return any(e > version.epoch and version.update > fork for e, fork in forks.items())

    def finish(self, name: str | None = None) -> None:
        name = name or self.random.choice(GENERATORS)
        # One lease in five is a straggler: long after the others, or never.
        leases = [x for x in self.running[name] if zlib.crc32(x.lease_id.encode()) % 5 or self.random.random() < 0.03]
        if leases:
            lease = self.random.choice(leases)
            self.running[name].remove(lease)
            self.send(name, lease)

    def send(self, name: str, lease: Lease) -> None:
        # Weights may have been loaded in mid-response: later segments carry what the generator holds now.
        start, end = lease.version, self.held[name]
        parts = [(start.update, 3)]
        if end > start and end.epoch == start.epoch and self.random.random() < 0.5:
            parts.append((end.update, 2))
        rewards = (1.0, 1.0) if self.random.random() < 0.2 else (1.0, 0.0)
        rest = [[(start.update, 4)]] * (self.queue.limits.fewest_responses - 1)
        rewards = (*rewards, *rewards)[: len(rest) + 1]
        group = answer(lease, parts, *rest, rewards=rewards, generator=name, epoch=start.epoch)
        if self.queue.limits.on_timeout == "partial" and self.random.random() < 0.2:
            # One response more than are always finished.
            group = answer(lease, parts, *rest, parts, rewards=(*rewards, 0.5), generator=name, epoch=start.epoch)
        self.sent.append((name, group))
        self.outbox[name].setdefault(group.group_id, group)
        self.put(name, group)

    def payload(self, group: Group) -> list[bytes]:
        """Most are as large as a group may be: a take's share of the capacity."""
        share, number = min(self.queue.limits.share_bytes, 6000), zlib.crc32(group.group_id.encode())
        return [b"group", group.group_id.encode().ljust(share - 5 if number % 4 else 20 + number % 1000)]

    def surprise(self) -> None:
        """What is sampled now will be larger than all that was seen: too little is reserved for it."""
        self.queue.ledger.largest_bytes = 0

    def supply(self) -> None:
        """Replay asks for what it had no room for."""
        for name, group_id in self.queue.room.ask(self.now):
            if group_id in self.outbox[name]:
                self.put(name, self.outbox[name][group_id])

    def put(self, name: str, group: Group) -> None:
        before = self.queue.ledger.entries.get(group.group_id)
        open_before = before is not None and before.state not in (State.QUEUED, State.TAKEN)
        was_kept = before is not None and before.state is State.KEPT
        unleased = before is not None and before.state is State.PENDING
        status = deliver(self.queue, group, self.payload(group), name).status
        assert status != "refused"
        if status == "admitted":
            assert open_before
        if status in ("admitted", "no_room"):
            assert not was_kept or before.sender == name
            self.uninvited |= {group.group_id} if unleased else set()
            self.sampled[group.group_id] = [[s.version for s in t.segments] for t in group.trajectories]
        self.events[status] += 1

    def late(self) -> None:
        if self.zombies:
            self.send(*self.zombies.pop(self.random.randrange(len(self.zombies))))

    def repeat(self) -> None:
        if self.sent:
            self.put(*self.random.choice(self.sent[-200:]))

    def fail(self) -> None:
        name = self.random.choice(GENERATORS)
        if self.running[name]:
            lease = self.running[name].pop(0)
            self.queue.fail(name, lease.lease_id, "EngineError: lost")

    def crash(self) -> None:
        # Some results of a generator that was believed dead still come.
        name = self.random.choice(GENERATORS)
        self.zombies += [(name, x) for x in self.running[name] if self.random.random() < 0.5]
        self.running[name] = []
        if self.random.random() < 0.5:
            self.outbox[name] = {}
        self.queue.generator_lost(name)

    def expire(self) -> None:
        self.now += self.random.choice([1.0, 2.0, 5.0, 5.0, 5.0, 61.0])
        self.queue.expire(self.now)

    def load(self) -> None:
        self.held[self.random.choice(GENERATORS)] = max(self.published)

    # --- learner --------------------------------------------------------------------------------

    def learn(self) -> bool:
        """One batch: trained or skipped. Takes first when nothing is left of the last take."""
        if not self.taken and not self.start_take():
            return False
        take, m = self.taken.popleft()
        ids = take.batches[m]
        skip = self.random.random() < 0.1
        assert not set(ids) & (set(self.trained) | set(self.skipped))
        self.check_promise(ids, self.u)
        self.u += not skip
        (self.skipped if skip else self.trained).extend(ids)
        done = self.queue.commit(take.take_id, self.u, "skipped" if skip else "trained", ids, self.batches)
        assert [c.group_id for c in done] == list(ids)
        self.commits += done
        self.batches += 1
        self.publish()
        return True

    def start_take(self) -> bool:
        take = self.queue.take(self.take_id, self.u, self.now)
        if take is None:
            return False
        limits = self.queue.limits
        assert 1 <= len(take.batches) <= limits.updates_per_take
        assert all(len(ids) == limits.groups_per_update for ids in take.batches)
        assert take.bounds == tuple(self.u + m - limits.max_lag for m in range(len(take.batches)))
        for m, ids in enumerate(take.batches):
            self.check_promise(ids, self.u + m)
            shards = [[e.group_id for k, e in self.queue.shard(self.take_id, r, 3) if k == m] for r in range(3)]
            assert sorted(i for shard in shards for i in shard) == sorted(ids)
        self.taken.extend((take, m) for m in range(len(take.batches)))
        self.take_id += 1
        return True

    def check_promise(self, ids: tuple[str, ...], update: int) -> None:
        for group_id in ids:
            versions = [v for response in self.sampled[group_id] for v in response]
            young = [update - v.update <= self.queue.limits.max_lag for v in versions]
            assert any(young) if self.queue.limits.stale == "mask" else all(young)
            assert not any(self.lost(v) for v in versions)

    def publish(self) -> None:
        version = Version(self.epoch, self.u)
        if self.u % self.queue.limits.sync_every == 0 and version not in self.published:
            self.published.append(version)
            self.batches_at[version] = self.batches
            self.queue.publish(version)

    def resume(self) -> None:
        """The learner begins again from an older version: what later batches used up is to be trained again."""
        if self.random.random() < 0.1:
            back = self.random.choice([v for v in self.published if v.epoch == self.epoch][-4:])
            self.epoch, self.u, self.take_id, self.batches = self.epoch + 1, back.update, 0, self.batches_at[back]
            self.taken.clear()
            undone = [c for c in self.commits if c.batch >= self.batches]
            self.commits = [c for c in self.commits if c.batch < self.batches]
            self.trained = [c.group_id for c in self.commits if c.outcome == "trained"]
            self.skipped = [c.group_id for c in self.commits if c.outcome == "skipped"]
            version = Version(self.epoch, self.u)
            self.published.append(version)
            self.batches_at[version] = self.batches
            self.queue.publish(version, undone)
            assert all(c.group_id in self.queue.ledger.entries for c in undone)

    # --- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        q = self.queue
        states = Counter(e.state for e in q.ledger.entries.values())
        assert all(q.ledger.count(s) == states[s] for s in State)
        assert q.ledger.in_flight == sum(states[s] for s in State if s is not State.PENDING)
        # B36 (c): admission allows no more; a late result of a prompt that waits to be leased again is welcome, too.
        self.uninvited = {i for i in self.uninvited if i in q.ledger.entries}
        bound = (q.limits.max_lag + 1) * q.limits.groups_per_update
        assert q.ledger.in_flight <= bound + len(self.uninvited)
        assert states[State.TAKEN] == sum(len(take.batches[m]) for take, m in self.taken)
        assert q.ledger.num_bytes == sum(e.num_bytes for e in q.ledger.entries.values())
        assert q.ledger.kept_bytes == sum(e.size for e in q.ledger.entries.values() if e.state is State.KEPT)
        assert q.ledger.num_bytes <= q.tally.peak_bytes <= q.limits.capacity_bytes
        assert set(q.ledger.pending) == {e.group_id for e in q.ledger.entries.values() if e.state is State.PENDING}
        assert q.clock.update == self.u
        for _, lease_id in q.drain_cancelled():
            # A cancelled generator stops, unless it had finished just then.
            for name, leases in self.running.items():
                self.zombies += [(name, x) for x in leases if x.lease_id == lease_id and self.random.random() < 0.5]
                leases[:] = [x for x in leases if x.lease_id != lease_id]
        for _, group_id in q.drain_resolved():
            entry = q.ledger.entries.get(group_id)
            assert entry is None or entry.state in (State.PENDING, State.LEASED, State.KEPT, State.QUEUED)

    def check_no_dead_end(self) -> None:
        """With current weights everywhere and nothing running, a take is ready or a lease is given, if not at once."""
        for name in GENERATORS:
            self.held[name] = max(self.published)
            while self.running[name]:
                self.send(name, self.running[name].pop())
        for _ in range(5 if "capacity_bytes" in self.settings else 1):
            if self.taken or self.start_take() or self.ask("g0", 1) == 1:
                return
            # It may wait for what generators keep: some of it is lost, which shows when it does not come in time.
            self.supply()
            self.now += 61.0
            self.queue.expire(self.now)
        raise AssertionError(self.queue.waiting)

    def check_fates(self) -> None:
        """Every prompt that was ever leased is open, trained, skipped or dropped with a reason: exactly one."""
        fates = Counter(self.trained) + Counter(self.skipped) + Counter(i for i, _ in self.queue.tally.dropped)
        fates += Counter(list(self.queue.ledger.entries))
        assert set(fates) == self.issued and set(fates.values()) == {1}


CASES = [
    {"stale": "mask", "max_lag": 4, "sync_every": 2, "groups_per_update": 3},
    {"stale": "mask", "max_lag": 0, "groups_per_update": 2, "zero_variance": "refill"},
    {"stale": "evict", "max_lag": 4, "sync_every": 3, "groups_per_update": 2, "updates_per_take": 3},
    {
        "stale": "evict",
        "max_lag": 5,
        "sync_every": 4,
        "groups_per_update": 2,
        "updates_per_take": 3,
        "on_evict": "drop",
    },
    {"stale": "mask", "max_lag": 3, "sync_every": 4, "groups_per_update": 2, "updates_per_take": 4},
    {"stale": "wait", "patience": 6.0, "max_lag": 2, "sync_every": 1, "groups_per_update": 3},
    {
        "stale": "wait",
        "patience": 10.0,
        "max_lag": 4,
        "sync_every": 2,
        "groups_per_update": 2,
        "updates_per_take": 2,
        "on_evict": "drop",
        "capacity_bytes": 4 * 4000 + 3000,
    },
    {"stale": "mask", "max_lag": 6, "sync_every": 2, "groups_per_update": 3, "capacity_bytes": 3 * 4000 + 1},
    {"stale": "evict", "max_lag": 4, "sync_every": 1, "groups_per_update": 2, "capacity_bytes": 3 * 4000},
]


SEEN = {
    "skipped",
    "late_result",
    "lease_expired",
    "dead_generator",
    "failed_engineerror",
    "lost_version",
    "rolled_back",
}
RARE: list[set[str]] = [
    {"stale", "stale_response", "max_attempts"},
    {"zero_variance"},
    {"stale", "doomed_lease"},
    {"stale", "doomed_lease"},
    {"max_attempts"},
    {"doomed_lease"},
    {"doomed_lease", "no_room"},
    {"no_room", "stale"},
    {"no_room", "doomed_lease"},
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_ten_thousand_random_events(case):
    s = Simulation(seed=20 + case, **CASES[case])
    events = [s.lease] * 20 + [s.finish] * 30 + [s.learn] * 14 + [s.load] * 6
    events += [s.late, s.repeat, s.fail, s.crash, s.expire, s.resume] + [s.supply] * 2
    events += [s.surprise] * 20 * ("capacity_bytes" in CASES[case])
    for i in range(10_000):
        event = s.random.choice(events)
        s.events[event.__name__] += 1
        event()
        s.check()
        if i % 400 == 0:
            s.check_no_dead_end()
            s.check()
    s.check_fates()
    counters = s.queue.tally.counters
    # The events that matter did happen, the rare ones of this policy too.
    assert len(s.trained) + len(s.skipped) + len(s.queue.tally.dropped) > 250  # nearly one data epoch, or more
    assert s.epoch > 3 and s.events["late"] > 80 and counters["duplicate"] > 50
    for reason in SEEN | RARE[case]:
        assert counters[reason] > 0, reason
    assert (s.queue.tally.waits > 10 and s.queue.tally.wait_s > 10) == (CASES[case]["stale"] == "wait")


@pytest.mark.parametrize("case", range(len(CASES)))
def test_progress_never_stops_after_random_events(case):
    # Once the storm is over, plain generators and a plain learner make 60 updates without a wait that does not end.
    s = Simulation(seed=100 + case, **CASES[case])
    events = [s.lease] * 5 + [s.finish] * 3 + [s.learn, s.load, s.late, s.fail, s.crash, s.expire, s.resume, s.supply]
    events += [s.surprise] * 10 * ("capacity_bytes" in CASES[case])
    for _ in range(1500):
        s.random.choice(events)()
        s.check()
    target, idle = s.u + 60, 0
    while s.u < target:
        moved = s.learn()
        s.now += 1.0
        s.queue.expire(s.now)
        s.supply()
        for name in GENERATORS:
            s.held[name] = max(s.published)
            moved |= s.ask(name, 2) > 0 if len(s.running[name]) < SLOTS else False
            moved |= bool(s.running[name])
            s.finish(name)
            s.check()
        idle = 0 if moved else idle + 1
        # A kept group that its generator lost is missed when it was asked for as long ago as a lease may last.
        assert idle < (65 if "capacity_bytes" in CASES[case] else 5), s.queue.waiting
    s.check_fates()
