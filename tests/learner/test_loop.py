"""The learner's own stops: replay that replays nothing, updates that are skipped for ever."""

import math
from types import SimpleNamespace

import pytest

from asyncrl.config import validate
from asyncrl.errors import TrainingError
from asyncrl.learner.health import Skips
from asyncrl.learner.loop import MAX_UNFORCED, Learner


def bare_learner(**learner_settings) -> Learner:
    """The counters of a Learner without model, sockets or sink."""
    learner = Learner.__new__(Learner)
    learner.config = validate({"model": {"path": "x"}, "learner": learner_settings, "algorithm": {"routes": "r3"}})
    learner.update, learner.carry = 7, 0.0
    learner.skips, learner.unforced_in_a_row = Skips(learner.config.learner.max_skipped_updates, {}), 0
    return learner


def outcome(kind="stepped", forced=math.nan, carry=0.5, reason=""):
    return SimpleNamespace(
        step=SimpleNamespace(outcome=kind, reason=reason),
        selection=SimpleNamespace(carry=carry),
        forced_fraction=forced,
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


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        ("non_finite", "gradient", r"3 x a non-finite gradient \(look at optim/grad_norm"),
        ("non_finite", "log_prob", r"3 x a non-finite log-prob of the learner \(the log names the responses"),
        ("non_finite", "loss", r"3 x a non-finite loss \(look at policy/reward"),
        ("non_finite", "weight", r"3 x a non-finite weight \(the log names it; check model\.path"),
        ("filtered", "filtered", r"3 x nothing left to train \(look at filter/dropped"),
    ],
)
def test_skipped_updates_leave_clock_and_carry_and_end_the_run_after_the_limit(kind, reason, words):
    learner = bare_learner(max_skipped_updates=3)
    learner._advance(outcome(kind, reason=reason))
    learner._advance(outcome(kind, reason=reason))
    assert (learner.update, learner.carry, learner.skips.total) == (7, 0.0, 2)
    with pytest.raises(TrainingError, match=rf"3 updates in a row were skipped .* at update 7: {words}"):
        learner._advance(outcome(kind, reason=reason))
    assert learner.skips.scalars() == {"optim/skipped_updates": 3, f"optim/skipped/{reason}": 3}


def test_the_last_words_name_every_kind_of_the_row_and_none_of_before():
    learner = bare_learner(max_skipped_updates=3)
    for step in ("loss", "", "filtered", "gradient"):
        learner._advance(outcome("non_finite" if step else "stepped", reason=step))
    with pytest.raises(TrainingError, match=r"2 x nothing left to train .*; 1 x a non-finite gradient") as ended:
        learner._advance(outcome("filtered", reason="filtered"))
    assert "non-finite loss" not in str(ended.value)
    assert learner.skips.by_reason == {"loss": 1, "filtered": 2, "gradient": 1}


def test_a_step_between_skips_starts_the_count_anew():
    learner = bare_learner(max_skipped_updates=2)
    for kind in ("filtered", "stepped", "filtered", "stepped"):
        learner._advance(outcome(kind, reason=kind.replace("stepped", "")))
    assert (learner.update, learner.carry, learner.skips.total) == (9, 0.5, 2)
