"""Random settings, random events: 10,000 in many short runs, and one long run (hypothesis shrinks the settings)."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.test_restart_simulation import RestartSimulation
from tests.replay.test_simulation import GENERATORS, SLOTS, Simulation

EVENTS = 250
RUNS = 44


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Settings that the config allows, with room for one take and little more, or plenty."""
    groups, sync_every, take = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    out = {
        "groups_per_update": groups,
        "sync_every": sync_every,
        "updates_per_take": take,
        "max_lag": max(sync_every, take) - 1 + draw(st.integers(0, 5)),
        "stale": draw(st.sampled_from(["mask", "evict", "wait"])),
        "patience": draw(st.sampled_from([0.0, 1.0, 10.0])),
        "on_evict": draw(st.sampled_from(["requeue", "drop"])),
        "zero_variance": draw(st.sampled_from(["keep", "refill"])),
        "on_timeout": draw(st.sampled_from(["reissue", "partial"])),
        "group_size": 3,
    }
    if draw(st.booleans()):
        out["capacity_bytes"] = 4000 * groups * take + draw(st.integers(0, 3)) * 3999
    return out


def storm(s: Simulation, events: int) -> None:
    """Anything happens, in any order."""
    choices = [s.lease] * 10 + [s.finish] * 15 + [s.learn] * 10 + [s.load] * 4 + [s.supply] * 3 + [s.surprise] * 2
    choices += [s.late, s.repeat, s.fail, s.crash, s.expire]
    if isinstance(s, RestartSimulation):
        choices += [s.kill, s.believed_dead] + [s.come_back] * 4
    else:
        choices += [s.resume] * 3
    for _ in range(events):
        s.random.choice(choices)()
        s.check()


def calm(s: Simulation, updates: int) -> None:
    """Plain generators and a plain learner make these updates: nobody waits for what cannot come."""
    target, idle = s.u + updates, 0
    while s.u < target:
        before = s.u, len(s.trained) + len(s.skipped)
        s.learn()
        s.now += 1.0
        s.queue.expire(s.now)
        s.supply()
        for name in GENERATORS:
            s.held[name] = max(s.published)
            if isinstance(s, RestartSimulation) and name in s.away:
                s.come_back(name)
            if len(s.running[name]) < SLOTS:
                s.ask(name, 2)
            while s.running[name]:
                s.send(name, s.running[name].pop())
            s.check()
        # A lost payload is missed as late as a lease may end, twice if its second generator lost it as well.
        idle = 0 if (s.u, len(s.trained) + len(s.skipped)) != before else idle + 1
        assert idle < 200, s.queue.waiting


@settings(max_examples=RUNS, deadline=None, derandomize=True, database=None)
@given(limits=limits(), seed=st.integers(0, 2**31), restarts=st.booleans())
def test_many_short_runs_of_any_settings(limits, seed, restarts):
    s = RestartSimulation(seed, **limits) if restarts else Simulation(seed, **limits)
    storm(s, EVENTS)
    calm(s, 3)
    s.check_fates()


@settings(max_examples=2, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**31), on_evict=st.sampled_from(["requeue", "drop"]))
def test_one_long_run_with_everything(seed, on_evict):
    s = Simulation(
        seed, groups_per_update=3, group_size=3, sync_every=2, updates_per_take=2, max_lag=3, stale="wait",
        patience=8.0, on_evict=on_evict, on_timeout="partial", capacity_bytes=6 * 4000 + 2000,
    )  # fmt: skip
    storm(s, 10_000)
    calm(s, 20)
    s.check_fates()


def test_the_short_runs_are_ten_thousand_events():
    assert EVENTS * RUNS >= 10_000
