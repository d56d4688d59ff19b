"""Random live changes of the staleness rule under a learner that publishes by what its takes say: nothing ever stops.

The learner of this simulation follows asyncrl.learner.publishing: it waits for a version only where its next take could
use none that is out, by the newest settings that it was told.
"""

from __future__ import annotations

import json
import random

import pytest

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.replay.knobs import Knobs
from asyncrl.replay.limits import limits_of
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import Version
from tests.replay.support import MODEL, answer, deliver, make_prompts

UPDATES, TRIES = 40, 400
LAGS = ((0, 1), (1, 1), (1, 2), (3, 4), (16, 1), (16, 4), (16, 16), (7, 8), (2, 1))


class Job:
    """A queue, a learner's clock and what it published, two generators of which one loads late."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.m = self.random.choice((1, 1, 2, 3))
        lag, every = self.random.choice([x for x in LAGS if x[0] >= self.m - 1])
        tree = {
            "model": {"path": "m"},
            "staleness": {
                "max_lag": lag, "sync_every": every, "updates_per_take": self.m,
                "stale": self.random.choice(("mask", "evict", "wait")), "patience": 0.0,
            },
            "algorithm": {"groups_per_update": 2, "group_size": 2}, "learner": {"updates": UPDATES},
        }  # fmt: skip
        self.knobs = Knobs(validate(tree))
        self.queue = ReplayQueue(make_prompts(500), limits_of(self.knobs.base), MODEL, self.knobs)
        self.update, self.published, self.coming, self.changes = 0, -1, self.knobs.base, 0
        self.late: int | None = None
        self.held = [Version(0, 0)] * 2
        self.now = 0.0

    def tune(self) -> None:
        lag, every = self.random.choice(LAGS)
        values = {"staleness.max_lag": lag, "staleness.sync_every": every}
        if self.random.random() < 0.3:
            values["staleness.stale"] = self.random.choice(("mask", "evict", "wait"))
        try:
            if self.random.random() < 0.2:
                self.knobs.undo(self.random.randint(1, 2), "me", "", self.update, self.now)
            else:
                texts = {k: json.dumps(v) for k, v in values.items()}
                self.changes += self.knobs.change(texts, "me", "", self.update, self.now) is not None
        except ConfigError:
            pass

    def announce(self, update: int) -> None:
        self.queue.publish(Version(0, update))
        self.published, self.late = update, None

    def publish(self, num_batches: int) -> None:
        """As Publishing: a version that is not needed at once may come out late."""
        s = self.coming.staleness
        num_batches = max(1, min(num_batches, UPDATES - self.update))
        u, newest = self.update, self.late if self.late is not None else self.published
        if self.late is not None and u + num_batches - 1 - self.published > s.max_lag:
            self.announce(self.late)
            newest = self.published
        if u == newest or not (newest < 0 or u // s.sync_every > newest // s.sync_every):
            return
        if self.late is not None:
            self.announce(self.late)
        self.late = u
        if self.published < 0 or u + num_batches - 1 - self.published > s.max_lag or self.random.random() < 0.5:
            self.announce(u)

    def sample(self) -> None:
        """One generator leases and answers; the first holds the newest version, the other one perhaps an older."""
        assert self.queue.clock.newest is not None
        self.held[0] = self.queue.clock.newest
        if self.random.random() < 0.2:
            self.held[1] = self.queue.clock.newest
        i = self.random.randrange(2)
        for lease in self.queue.lease(f"g{i}", self.held[i], self.random.randint(1, 4), self.now).leases:
            deliver(self.queue, answer(lease, generator=f"g{i}"), [b"group", b"head", b"x" * 10], f"g{i}")

    def take(self, take_id: int):
        for tried in range(TRIES):
            self.now += 0.1
            # Not for ever: the next change must not be what lets a stuck run go on.
            if tried < 3 and self.random.random() < 0.4:
                self.tune()
            # Between two looks at the queue a version may come out that was not needed.
            if self.late is not None and self.random.random() < 0.3:
                self.announce(self.late)
            self.sample()
            take = self.queue.take(take_id, self.update, self.now)
            if take is not None:
                return take
        raise AssertionError(
            f"no take for update {self.update} after {TRIES} tries: {self.queue.waiting}; newest "
            f"{self.published}, told {self.coming.staleness}, in force {self.queue.limits}"
        )


def run(seed: int) -> Job:
    job, take_id, last = Job(seed), 0, 0
    job.publish(job.m)
    while job.update < UPDATES:
        take = job.take(take_id)
        config = job.knobs.config(take.tuned)
        max_lag = config.staleness.max_lag
        assert take.bounds == tuple(job.update + m - max_lag for m in range(len(take.batches)))
        for m, ids in enumerate(take.batches):
            for i in ids:
                digest = job.queue.ledger.entries[i].digest
                assert digest.versions[-1].update >= take.bounds[m], "every group has a token that is young enough"
        assert last <= take.tuned.seq <= take.coming.seq == job.knobs.seq
        last, job.coming = take.tuned.seq, job.knobs.config(take.coming)
        for m, ids in enumerate(take.batches):
            job.update += 1
            job.queue.commit(take_id, job.update, "trained", ids)
            job.publish(job.m if m + 1 == len(take.batches) else 1)
        take_id += 1
    return job


@pytest.mark.parametrize("first", [0, 8])
def test_changes_of_the_staleness_rule_never_stop_a_run(first):
    jobs = [run(seed) for seed in range(first, first + 8)]
    assert sum(job.changes for job in jobs) > 40
    assert sum(job.knobs.in_force for job in jobs) > 40
