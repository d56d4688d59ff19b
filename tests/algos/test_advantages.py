"""Advantages by hand, retained baselines (B21), zero variance by tolerance (B27)."""

import math

import pytest
import torch

from asyncrl.algos.advantages import group_advantages, zero_variance
from asyncrl.algos.advantages.groups import groups_of
from asyncrl.algos.registry import ADVANTAGES, Method

# Two groups, interleaved. x: rewards 1 0 0 1, mean 1/2, std (n - 1) = sqrt(1/3). y: rewards 3 1, mean 2, std sqrt(2).
REWARDS = torch.tensor([1.0, 3.0, 0.0, 0.0, 1.0, 1.0])
GROUPS = ["x", "y", "x", "x", "y", "x"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [0.866025, 0.707107, -0.866025, -0.866025, -0.707107, 0.866025]),
        ("dr_grpo", [0.5, 1.0, -0.5, -0.5, -1.0, 0.5]),
        # n / (n - 1): 4/3 * 0.5 and 2 * 1
        ("rloo", [0.666667, 2.0, -0.666667, -0.666667, -2.0, 0.666667]),
        # sum of squares 4 * 0.25 + 2 = 3, over N - 1 = 5: std sqrt(0.6) = 0.774597
        ("reinforce_pp", [0.645497, 1.290994, -0.645497, -0.645497, -1.290994, 0.645497]),
    ],
)
def test_by_hand(kind: str, expected: list[float]) -> None:
    got = group_advantages(REWARDS, GROUPS, kind)  # type: ignore[arg-type]
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, abs=5e-6)


def test_eps_is_added_to_the_std() -> None:
    # std of [0, 2] is sqrt(2): 1 / (1.41421 + 0.58579) = 0.5
    got = group_advantages(torch.tensor([0.0, 2.0], dtype=torch.float64), [0, 0], eps=2 - math.sqrt(2))
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx([-0.5, 0.5], abs=1e-12)


def test_group_ids_may_be_tensors_lists_or_strings() -> None:
    results = [
        group_advantages([1.0, 0.0, 5.0, 2.0], ids, "dr_grpo").tolist()
        for ids in (torch.tensor([7, 7, 3, 3]), [7, 7, 3, 3], ["p7", "p7", "p3", "p3"])
    ]
    assert results == [[0.5, -0.5, 1.5, -1.5]] * 3


def test_b21_filter_before_or_after_the_baseline() -> None:
    rewards, keep = torch.tensor([10.0, 1.0, 0.0, 1.0]), torch.tensor([False, True, True, True])
    # baseline: retained
    retained = group_advantages(rewards, [0] * 4, "dr_grpo", keep)
    assert retained.tolist() == pytest.approx([0.0, 0.333333, -0.666667, 0.333333], abs=1e-6)
    # baseline: batch; the caller leaves the first one out of the loss
    batch = group_advantages(rewards, [0] * 4, "dr_grpo")
    assert batch.tolist() == [7.0, -2.0, -3.0, -2.0]
    # std (n - 1) of the kept [1, 0, 1] is sqrt(1/3)
    grpo = group_advantages(rewards, [0] * 4, "grpo", keep)
    assert grpo.tolist() == pytest.approx([0.0, 0.577350, -1.154701, 0.577350], abs=5e-6)
    # others of the kept: 1 - 0.5, 0 - 1, 1 - 0.5
    assert group_advantages(rewards, [0] * 4, "rloo", keep).tolist() == [0.0, 0.5, -1.0, 0.5]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_lone_survivors_and_empty_groups_give_zero(kind: str) -> None:
    keep = torch.tensor([True, False, False, False, False, False, True, True])
    rewards = torch.tensor([9.0, 1.0, 0.0, 4.0, 5.0, 6.0, 1.0, 0.0])
    got = group_advantages(rewards, [0, 0, 0, 1, 1, 1, 2, 2], kind, keep)  # type: ignore[arg-type]
    assert got[:6].tolist() == [0.0] * 6
    assert got[6] == -got[7] > 0
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_retained_advantages_sum_to_zero(kind: str) -> None:
    keep = torch.tensor([True, True, True, False, True, True])
    got = group_advantages(REWARDS.double(), GROUPS, kind, keep)  # type: ignore[arg-type]
    assert got[[0, 2, 5]].sum().item() == pytest.approx(0, abs=1e-12)
    assert got[[1, 4]].sum().item() == pytest.approx(0, abs=1e-12)
    assert got[3] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
@pytest.mark.parametrize(
    "rewards", [[0.1 + 0.2, 0.3, 0.3, 0.3], [1, 1, 1, 1 + 1e-7], [0.5] * 4, [1e4, 1e4, 1e4, 1e4 + 0.001]]
)
def test_b27_equal_rewards_give_exactly_zero(rewards: list[float], kind: str, dtype: torch.dtype) -> None:
    # A second group with a real signal, so that the batch std of reinforce_pp is not 0.
    batch = torch.tensor([*rewards, 0.0, 1.0], dtype=dtype)
    groups = ["flat"] * 4 + ["live"] * 2
    got = group_advantages(batch, groups, kind, eps=1e-8)  # type: ignore[arg-type]
    assert got[:4].tolist() == [0.0] * 4
    assert got[4] < 0 < got[5]
    assert zero_variance(batch, groups).tolist() == [True] * 4 + [False] * 2


def test_b27_one_loser_keeps_the_whole_group() -> None:
    rewards = torch.tensor([0.0] + [0.95] * 7)
    assert zero_variance(rewards, [0] * 8).tolist() == [False] * 8
    got = group_advantages(rewards, [0] * 8)
    # mean 0.83125, deviation -0.83125, std (n - 1) = 0.95 sqrt((1/8)(7/8) 8/7) = 0.335876
    assert got[0].item() == pytest.approx(-2.474874, abs=2e-5)
    assert got[1:].tolist() == pytest.approx([0.353553] * 7, abs=2e-5)


def test_b27_small_but_real_differences_count() -> None:
    assert zero_variance([0.5, 0.5 + 2e-6], ["a", "a"]).tolist() == [False, False]
    assert zero_variance([0.5, 0.5 + 2e-6], ["a", "a"], tol=1e-5).tolist() == [True, True]
    assert zero_variance([1.0, 0.0, 3.0], ["a", "a", "b"]).tolist() == [False, False, True]


def test_empty_batch() -> None:
    assert group_advantages(torch.zeros(0), []).shape == (0,)
    assert zero_variance([], []).shape == (0,)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="reward of response 1 is nan"):
        group_advantages([0.0, math.nan], [0, 0])
    with pytest.raises(ValueError, match="reward of response 0 is inf"):
        zero_variance([math.inf, 0.0], [0, 0])
    with pytest.raises(ValueError, match="kind='ppo'"):
        group_advantages([0.0], [0], "ppo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group_ids"):
        group_advantages([0.0, 1.0], [0])
    with pytest.raises(ValueError, match="keep"):
        group_advantages([0.0, 1.0], [0, 0], keep=torch.tensor([True]))


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="kind='ppo' must be one of grpo, dr_grpo, rloo, reinforce_pp"):
        group_advantages([0.0], [0], "ppo")


def test_groups_by_hand() -> None:
    # x: 1, 0 and a dropped 9; y: 3, 3; z: a dropped 2.
    keep = torch.tensor([True, True, True, False, True, False])
    groups = groups_of([1.0, 3.0, 0.0, 9.0, 3.0, 2.0], ["x", "y", "x", "x", "y", "z"], keep)
    assert (groups.number.tolist(), groups.num_groups) == ([0, 1, 0, 0, 1, 2], 3)
    assert groups.sizes.tolist() == [2, 2, 0]
    assert groups.live.tolist() == [True, False, True, False, False, False]
    assert groups.centred.tolist() == [0.5, 0, -0.5, 0, 0, 0]
    assert groups.sum(groups.rewards).tolist() == [10, 6, 2]
    assert groups.spread(torch.tensor([7, 8, 9])).tolist() == [7, 8, 7, 7, 8, 9]


def test_whatever_a_method_says_equal_rewards_and_dropped_responses_get_zero(place, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(ADVANTAGES, "eager", Method(place(lambda groups, eps: groups.rewards + eps)))
    keep = torch.tensor([True, True, False, True, True])
    got = group_advantages([2.0, 1.0, 5.0, 4.0, 4.0], ["x", "x", "x", "y", "y"], "eager", keep, eps=0.5)
    assert got.tolist() == [2.5, 1.5, 0.0, 0.0, 0.0]
    assert got.dtype == torch.float32


def test_a_method_that_forgets_a_response_is_refused(place, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(ADVANTAGES, "short", Method(place(lambda groups: groups.rewards.mean())))
    with pytest.raises(ValueError, match=r"kind='short' gave \[\] for rewards \[B\] = \[2\]"):
        group_advantages([2.0, 1.0], [0, 0], "short")
