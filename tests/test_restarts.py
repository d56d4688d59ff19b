"""The one restart policy: who is started again, when, and what ends a run."""

import pytest

from asyncrl.config import validate
from asyncrl.restarts import GRACE_S, LOST, RestartPolicy, Verdict

GENERATORS = ("g0", "g1")


def make(generators=GENERATORS, **run):
    return RestartPolicy(validate({"model": {"path": "m"}, "run": run}).run, generators)


@pytest.mark.parametrize(
    ("name", "status", "erred", "verdict"),
    [
        ("learner", 0, False, Verdict.FINISHED),
        ("learner", -9, False, Verdict.AGAIN),
        ("learner", 137, False, Verdict.AGAIN),
        ("learner", LOST, False, Verdict.AGAIN),
        ("learner", 1, False, Verdict.FAILED),
        ("learner", 1, True, Verdict.FAILED),
        ("learner", 137, True, Verdict.FAILED),
        ("learner", LOST, True, Verdict.FAILED),
        ("learner", 2, False, Verdict.FAILED),
        ("replay", 0, False, Verdict.LEFT),
        ("replay", -9, False, Verdict.AGAIN),
        ("replay", 1, False, Verdict.AGAIN),
        ("replay", 1, True, Verdict.FAILED),
        ("replay", 2, False, Verdict.FAILED),
        ("g0", 0, False, Verdict.LEFT),
        ("g0", -9, False, Verdict.AGAIN),
        ("g0", 1, True, Verdict.AGAIN),
        ("g0", LOST, False, Verdict.AGAIN),
        ("g0", 2, True, Verdict.ASIDE),
    ],
)
def test_the_end_of_a_role_has_one_verdict(name, status, erred, verdict):
    policy = make()
    assert policy.ended(name, status, erred, 100.0, 0.0) is verdict
    assert policy.judged(name) == (verdict in (Verdict.AGAIN, Verdict.ASIDE, Verdict.LEFT))


def test_every_role_has_its_own_restarts_and_a_generator_without_is_set_aside():
    policy = make(max_generator_restarts=1, max_replay_restarts=0, max_learner_restarts=1)
    for name in GENERATORS:
        assert policy.ended(name, -9, False, 100.0, 0.0) is Verdict.AGAIN
        assert policy.starts(0.0) == [name] and policy.starts(0.0) == [] and not policy.judged(name)
    assert policy.ended("g1", -9, False, 100.0, 0.0) is Verdict.ASIDE
    assert policy.missing(1e6) is None
    assert policy.ended("replay", -9, False, 100.0, 0.0) is Verdict.FAILED
    assert policy.ended("learner", -9, False, 100.0, 0.0) is Verdict.AGAIN
    assert policy.starts(0.0) == ["learner"]
    assert policy.ended("learner", -9, False, 100.0, 0.0) is Verdict.FAILED


def test_what_dies_soon_is_started_again_later_each_time_and_a_steady_one_at_once():
    policy = make(max_generator_restarts=12)

    def delay(name, lived_s, now):
        assert policy.ended(name, -9, False, lived_s, now) is Verdict.AGAIN
        at = policy.due[name]
        assert policy.starts(at - 0.01) == [] and policy.starts(at) == [name]
        return at - now

    assert [delay("g0", 1.0, 100.0 * i) for i in range(8)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert delay("g1", 1.0, 105.0) == 0.0
    assert [delay("g0", lived_s, 900.0) for lived_s in (90.0, 1.0)] == [0.0, 1.0]


def test_the_run_ends_with_its_last_generator_at_once_unless_all_left_in_order():
    policy = make(max_generator_restarts=0)
    assert policy.ended("g0", 0, False, 100.0, 10.0) is Verdict.LEFT and policy.missing(1e6) is None
    assert policy.ended("g1", -9, False, 100.0, 20.0) is Verdict.ASIDE and policy.missing(20.0) is None
    assert policy.missing(11 + GRACE_S) == "g1"
    policy = make()
    for at, name in enumerate(GENERATORS):
        policy.ended(name, 0, False, 100.0, float(at))
    assert policy.missing(1 + GRACE_S) is None and policy.missing(1.1 + GRACE_S) == "g0"
    assert make(()).missing(1e6) is None


def test_one_that_waits_for_its_next_start_keeps_the_run_alive():
    policy = make(max_generator_restarts=1)
    policy.ended("g0", 2, False, 100.0, 0.0)
    policy.ended("g1", -9, False, 100.0, 0.0)
    assert policy.missing(1e6) is None
    policy.starts(0.0)
    policy.ended("g1", -9, False, 100.0, 0.0)
    assert policy.missing(0.0) == "g0"


def test_a_replay_that_left_in_order_is_outlived_only_for_a_while():
    policy = make()
    policy.ended("replay", 0, False, 100.0, 5.0)
    assert policy.missing(5 + GRACE_S) is None and policy.missing(5.1 + GRACE_S) == "replay"


def test_a_fleet_that_left_in_order_is_no_failure_although_one_was_set_aside_before():
    policy = make(max_generator_restarts=0)
    assert policy.ended("g1", -9, False, 100.0, 0.0) is Verdict.ASIDE
    assert policy.ended("g0", 0, False, 100.0, 50.0) is Verdict.LEFT
    assert policy.missing(50.0 + GRACE_S) is None
    assert policy.missing(51.0 + GRACE_S) == "g1", "the one with the cause"
    policy = make(max_generator_restarts=0)
    assert policy.ended("g1", -9, False, 100.0, 0.0) is Verdict.ASIDE
    assert policy.ended("g0", -9, False, 100.0, 50.0) is Verdict.ASIDE
    assert policy.missing(50.0) == "g1"


@pytest.mark.parametrize("name", ["replay", "g0"])
def test_a_role_that_somebody_outside_told_to_leave_is_started_again(name):
    assert make().ended(name, 143, False, 100.0, 0.0) is Verdict.AGAIN
