"""The learning rate against closed forms."""

import math

import pytest

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.learner.schedule import learning_rate


def rates(**learner):
    settings = validate({"model": {"path": "x"}, "learner": {"lr": 0.1} | learner}).learner
    return [learning_rate(u, settings) for u in range(settings.updates)]


def test_constant_has_a_warm_up_and_then_stays():
    assert rates(updates=6, warmup_updates=4) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert rates(updates=3, warmup_updates=0) == [0.1] * 3


def test_linear_falls_in_equal_steps_to_min_lr_behind_the_last_update():
    got = rates(updates=7, warmup_updates=2, lr_schedule="linear", min_lr=0.05)
    assert got == pytest.approx([0.05, 0.1, 0.1, 0.09, 0.08, 0.07, 0.06])


def test_cosine_is_half_a_period_between_lr_and_min_lr():
    got = rates(updates=8, warmup_updates=0, lr_schedule="cosine", min_lr=0.02)
    assert got == pytest.approx([0.02 + 0.08 * (1 + math.cos(math.pi * u / 8)) / 2 for u in range(8)])
    assert got[0] == 0.1 and got[4] == pytest.approx(0.06)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_longer_than_the_run_is_only_a_warm_up(schedule):
    assert rates(updates=3, warmup_updates=10, lr_schedule=schedule) == pytest.approx([0.01, 0.02, 0.03])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_lr": 1e-5}, r"learner\.min_lr=1e-05 has no effect with learner\.lr_schedule=constant"),
        ({"min_lr": 0.2, "lr_schedule": "cosine"}, r"learner\.min_lr=0\.2 is above learner\.lr=0\.1.*not a share"),
    ],
)
def test_a_min_lr_that_cannot_be_meant_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        rates(**changes)
