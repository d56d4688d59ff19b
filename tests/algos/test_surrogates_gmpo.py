"""`gmpo`: values by hand, its bounds, its limits."""

import math

import pytest
import torch

from asyncrl.algos.aggregate import aggregate
from asyncrl.algos.surrogates.gmpo import gmpo
from asyncrl.algos.surrogates.gspo import gspo

LOG2 = math.log(2)
NAN, INF = math.nan, math.inf


def test_values_and_gradients_by_hand() -> None:
    # Ratios 16, 1/16, 1 and bounds 1/2, 2.
    # A = 1:  2, 1/16, 1 have the geometric mean 1/2: loss -1/2, gradient -1/2 where nothing was cut.
    # A = -3: 16, 1/2, 1 have the geometric mean 2: loss 6, gradient 6 where nothing was cut.
    logp = torch.tensor([[4 * LOG2, -4 * LOG2, 0.0]] * 2, requires_grad=True)
    loss, clipped = gmpo(logp, torch.zeros(2, 3), torch.tensor([1.0, -3.0]), None, LOG2, LOG2)
    assert loss.tolist() == [pytest.approx([-0.5] * 3), pytest.approx([6.0] * 3)]
    assert clipped.tolist() == [[True, False, False], [False, True, False]]
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [pytest.approx([0.0, -0.5, -0.5]), pytest.approx([6.0, 0.0, 6.0])]


def test_the_mean_is_over_the_counted_tokens() -> None:
    # Counted ratios 4, 1 and bound e^5: geometric mean 2. One cut to 2 without the masked: (2 * 1)^(1/2).
    logp = torch.tensor([[2 * LOG2, 3.0, 0.0]] * 2)
    mask = torch.tensor([[1, 0, 1]] * 2)
    loss, clipped = gmpo(logp, torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, 5.0, 5.0)
    assert loss.tolist() == [pytest.approx([-2.0, 0.0, -2.0]), pytest.approx([2.0, 0.0, 2.0])]
    assert not clipped.any()
    loss, clipped = gmpo(logp, torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, LOG2, LOG2)
    assert loss.tolist() == [pytest.approx([-math.sqrt(2), 0.0, -math.sqrt(2)]), pytest.approx([2.0, 0.0, 2.0])]
    assert clipped.tolist() == [[True, False, False], [False, False, False]]


def test_sequence_mean_gives_the_objective_of_the_paper() -> None:
    # sign(A) (prod_t |min(r_t A, clip(r_t) A)|)^(1/T), averaged over n = 2, bounds e^-0.4 and e^0.4.
    # A = 2, ratios e^1, e^-1, e^0.1:   (2 e^0.4 * 2 e^-1 * 2 e^0.1)^(1/3) = 2 e^(-1/6).
    # A = -1, ratios e^1, e^-1:         -(e^1 * e^-0.4)^(1/2) = -e^0.3.
    logp = torch.tensor([[1.0, -1.0, 0.1], [1.0, -1.0, NAN]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    result = gmpo(logp, torch.zeros(2, 3), torch.tensor([2.0, -1.0]), mask)
    total = aggregate(result.loss, mask, "sequence_mean", 5, 2, 1.0)
    first, second = 2 * math.exp(-1 / 6), math.exp(0.3)
    assert total.item() == pytest.approx((second - first) / 2)
    (gradient,) = torch.autograd.grad(total, logp)
    assert gradient[0].tolist() == pytest.approx([0.0, -first / 6, -first / 6])
    assert gradient[1].tolist() == pytest.approx([second / 4, 0.0, 0.0])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_without_bounds_it_is_the_geometric_ratio(advantage: float) -> None:
    # Log-ratios 1.5, -0.5, 0.2: e^0.4, as `gspo` without bounds.
    logp = torch.tensor([[1.5, -0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.zeros(1, 3), torch.tensor([advantage])
    loss, clipped = gmpo(logp, old, advantages, None, INF, INF)
    assert not clipped.any()
    assert loss[0].tolist() == pytest.approx([-advantage * math.exp(0.4)] * 3)
    assert torch.equal(loss, gspo(logp, old, advantages, None, 1.0, INF).loss)
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-advantage * math.exp(0.4)] * 3)


def test_missing_old_log_probs_count_as_zero_in_the_mean() -> None:
    # (log 8 + 0 + 0) / 3 = log 2; A < 0 has no upper bound.
    logp = torch.tensor([[3 * LOG2, -7.0, -0.1]], requires_grad=True)
    loss, clipped = gmpo(logp, torch.tensor([[0.0, NAN, NAN]]), torch.tensor([-1.0]))
    assert loss[0].tolist() == pytest.approx([2.0] * 3)
    assert not clipped.any()
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([2.0] * 3)


def test_one_broken_token_leaves_the_response_without_a_mean() -> None:
    logp = torch.tensor([[0.5, NAN, 0.1], [0.0, 0.0, -INF]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    loss, clipped = gmpo(logp, torch.zeros(2, 3), torch.tensor([1.0, 1.0]), mask)
    assert [math.isnan(x) for x in loss[0].tolist()] == [True, True, False]
    assert loss[1].tolist() == [-1.0, -1.0, 0.0]
    assert not clipped.any()
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0] * 3, [-1.0, -1.0, 0.0]]


def test_huge_log_ratios_by_hand() -> None:
    # A = 1: 100 is bounded to 0.4 (mean 0.2), -100 is not (mean -50, clamped to -20, no gradient).
    # A = -1: 100 is not (mean 50, clamped to 20, no gradient), -100 is bounded to -0.4 (mean -0.2).
    logp = torch.tensor([[100.0, 0.0], [-100.0, 0.0]] * 2, dtype=torch.float64, requires_grad=True)
    loss, clipped = gmpo(logp, torch.zeros(4, 2), torch.tensor([1.0, 1.0, -1.0, -1.0]))
    wanted = [-math.exp(0.2), -math.exp(-20), math.exp(20), math.exp(-0.2)]
    assert loss[:, 0].tolist() == loss[:, 1].tolist() == pytest.approx(wanted)
    assert clipped.tolist() == [[True, False], [False, False], [False, False], [True, False]]
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[:, 0].tolist() == [0.0] * 4
    assert logp.grad[:, 1].tolist() == pytest.approx([wanted[0], 0.0, 0.0, wanted[3]])


def test_advantages_by_token_keep_their_own_bound() -> None:
    # Log-ratios of log 4 each: the first is cut to log 2 (A > 0), the others are not; mean 5/3 log 2.
    logp = torch.full((1, 3), 2 * LOG2, requires_grad=True)
    loss, clipped = gmpo(logp, torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 0.0]]), None, LOG2, LOG2)
    mean = 2 ** (5 / 3)
    assert loss[0].tolist() == pytest.approx([-mean, mean, 0.0])
    assert clipped.tolist() == [[True, False, False]]


def test_bounds_of_a_log_ratio_may_exceed_one() -> None:
    gmpo(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), eps_low=1.5)
    with pytest.raises(ValueError, match=r"eps_low=-0\.1"):
        gmpo(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), eps_low=-0.1)
