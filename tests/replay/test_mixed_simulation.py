"""Replay is killed again and again while weighted sources take turns and solved prompts rest: nothing leaks."""

from __future__ import annotations

import pytest

from asyncrl.replay.curriculum import Bounds
from asyncrl.replay.mixing import Mixing
from tests.replay.support import make_prompts
from tests.replay.test_restart_simulation import RestartSimulation, events

WEIGHTS = {"s0": 1.0, "s1": 2.0, "s2": 4.0}
MIXED = {
    "weights": {"weights": WEIGHTS},
    "curriculum": {"curriculum": Bounds(0.0, 0.9, 3)},
    "both, refill": {"weights": WEIGHTS, "curriculum": Bounds(0.0, 0.9, 3), "zero_variance": "refill"},
}


class MixedSimulation(RestartSimulation):
    PROMPTS = 30


@pytest.mark.parametrize("case", MIXED)
def test_every_prompt_of_a_data_epoch_is_used_up_or_rests(case):
    changes = MIXED[case]
    s = MixedSimulation(seed=7, max_lag=4, sync_every=2, groups_per_update=3, **changes)
    choices = list(events(s, 1))
    for _ in range(4_000):
        s.random.choice(choices)()
        s.check()
    s.check_fates()
    fates = [*s.trained, *s.skipped, *(i for i, _ in s.queue.tally.dropped)]
    used = {*fates, *s.queue.ledger.entries}
    prompts = make_prompts(30)
    mixing = Mixing(30, 0, [p.data_source for p in prompts], changes.get("weights"))
    last, rested = s.queue.ledger.cursor.save(0).epoch, 0
    for epoch in range(last):
        members = {f"{epoch}/p{i}" for i in mixing.order(epoch)}
        left = members - used
        assert all(s.queue.ledger.is_resolved(i) for i in left)
        rested += len(left)
        assert len(members) == (30 if "weights" not in changes else mixing.start(epoch + 1) - mixing.start(epoch))
    assert not used - {f"{e}/p{i}" for e in range(last + 1) for i in mixing.order(e)}
    counted = s.queue.tally.counters["curriculum"]
    assert rested <= counted <= rested + 30 and (counted > 20) == ("curriculum" in changes)
    assert s.kills > 40 and last > 5
