"""The learner's own stops: replay that replays nothing, updates that are skipped for ever."""

import math
from types import SimpleNamespace

import pytest

from asyncrl.config import validate
from asyncrl.errors import TrainingError
from asyncrl.learner.loop import MAX_UNFORCED, Learner


def bare_learner(**learner_settings) -> Learner:
    """The counters of a Learner without model, sockets or sink."""
    learner = Learner.__new__(Learner)
    learner.config = validate({"model": {"path": "x"}, "learner": learner_settings})
    learner.update, learner.carry = 7, 0.0
    learner.skipped, learner.skipped_in_a_row, learner.unforced_in_a_row = 0, 0, 0
    return learner


def outcome(kind="stepped", forced=math.nan, carry=0.5):
    return SimpleNamespace(
        step=SimpleNamespace(outcome=kind), selection=SimpleNamespace(carry=carry), forced_fraction=forced
    )


def test_ten_updates_of_replay_without_a_forced_row_are_an_error():
    learner = bare_learner()
    for _ in range(MAX_UNFORCED - 1):
        learner._advance(outcome(forced=0.0))
    with pytest.raises(TrainingError, match=r"algorithm\.routes=r3.*r3/forced_fraction = 0"):
        learner._advance(outcome(forced=0.0))


def test_one_forced_update_in_between_starts_the_count_anew():
    learner = bare_learner()
    for forced in [0.0] * (MAX_UNFORCED - 1) + [1.0] + [0.0] * (MAX_UNFORCED - 1):
        learner._advance(outcome(forced=forced))
    assert learner.update == 7 + 2 * MAX_UNFORCED - 1


@pytest.mark.parametrize("kind", ["non_finite", "filtered"])
def test_skipped_updates_leave_clock_and_carry_and_end_the_run_after_the_limit(kind):
    learner = bare_learner(max_skipped_updates=3)
    learner._advance(outcome(kind))
    learner._advance(outcome(kind))
    assert (learner.update, learner.carry, learner.skipped) == (7, 0.0, 2)
    with pytest.raises(TrainingError, match="3 updates in a row were skipped"):
        learner._advance(outcome(kind))


def test_a_step_between_skips_starts_the_count_anew():
    learner = bare_learner(max_skipped_updates=2)
    for kind in ("filtered", "stepped", "filtered", "stepped"):
        learner._advance(outcome(kind))
    assert (learner.update, learner.carry, learner.skipped) == (9, 0.5, 2)
