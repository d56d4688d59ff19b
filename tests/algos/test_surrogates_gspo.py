"""`gspo`: values by hand, its bounds, its limits."""

import math

import pytest
import torch

from asyncrl.algos.aggregate import aggregate
from asyncrl.algos.surrogates.gspo import gspo

LOG2 = math.log(2)
NAN, INF = math.nan, math.inf


def test_values_and_gradients_by_hand() -> None:
    # Token ratios 8, 1, 1 and 2, 4, 1: s = 8^(1/3) = 2 for both. A = 1: s is cut to 1 + 1/2, loss -1.5, no gradient.
    # A = -3: min(2 * -3, 1.5 * -3) = -6, loss 6 at each token, with the gradient 6 of its own log-prob.
    logp = torch.tensor([[3 * LOG2, 0.0, 0.0], [LOG2, 2 * LOG2, 0.0]], requires_grad=True)
    loss, clipped = gspo(logp, torch.zeros(2, 3), torch.tensor([1.0, -3.0]), None, 0.25, 0.5)
    assert loss.tolist() == [pytest.approx([-1.5] * 3), pytest.approx([6.0] * 3)]
    assert clipped.tolist() == [[True] * 3, [False] * 3]
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0] * 3, pytest.approx([6.0] * 3)]


def test_the_mean_is_over_the_counted_tokens() -> None:
    # Counted ratios 1/4 and 1: s = 1/2. A = 1: the lower bound 3/4 does not hold it up, loss -1/2, gradient -1/2.
    # A = -3: min(-3 / 2, -3 * 3 / 4) = -9/4, loss 9/4, cut: all counted tokens, no other.
    logp = torch.tensor([[-2 * LOG2, 5.0, 0.0]] * 2, requires_grad=True)
    mask = torch.tensor([[1, 0, 1]] * 2)
    loss, clipped = gspo(logp, torch.zeros(2, 3), torch.tensor([1.0, -3.0]), mask, 0.25, 0.5)
    assert loss.tolist() == [pytest.approx([-0.5, 0.0, -0.5]), pytest.approx([2.25, 0.0, 2.25])]
    assert clipped.tolist() == [[False] * 3, [True, False, True]]
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [pytest.approx([-0.5, 0.0, -0.5]), [0.0] * 3]


def test_sequence_mean_gives_the_objective_of_the_paper() -> None:
    # s = 2, 1/2 and, of one token, 3; A = -3, 1, -1: (6 - 1/2 + 3) / 3. Gradient of s A / n: s A / (T n) at each token.
    logp = (
        torch.tensor([[3 * LOG2, 0.0, 0.0], [-2 * LOG2, 0.0, NAN], [math.log(3), NAN, NAN]]).double().requires_grad_()
    )
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    result = gspo(logp, torch.zeros(3, 3), torch.tensor([-3.0, 1.0, -1.0]), mask)
    total = aggregate(result.loss, mask, "sequence_mean", 6, 3, 1.0)
    assert total.item() == pytest.approx(8.5 / 3)
    (gradient,) = torch.autograd.grad(total, logp)
    assert gradient[0].tolist() == pytest.approx([6 / 9] * 3)
    assert gradient[1].tolist() == pytest.approx([-0.5 / 6] * 2 + [0.0])
    assert gradient[2].tolist() == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_without_bounds_the_loss_is_the_geometric_ratio(advantage: float) -> None:
    # Log-ratios 1.5, -0.5, 0.2: s = e^0.4.
    logp = torch.tensor([[1.5, -0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    loss, clipped = gspo(logp, torch.zeros(1, 3), torch.tensor([advantage]), None, 1.0, INF)
    assert loss[0].tolist() == pytest.approx([-advantage * math.exp(0.4)] * 3)
    assert not clipped.any()
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-advantage * math.exp(0.4)] * 3)


def test_missing_old_log_probs_count_as_zero_in_the_mean() -> None:
    # (log 8 + 0 + 0) / 3 = log 2; the missing ones have the gradient of their response too.
    logp = torch.tensor([[3 * LOG2, -7.0, -0.1]], requires_grad=True)
    loss, _ = gspo(logp, torch.tensor([[0.0, NAN, NAN]]), torch.tensor([-1.0]))
    assert loss[0].tolist() == pytest.approx([2.0] * 3)
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([2.0] * 3)


def test_one_broken_token_leaves_the_response_without_a_ratio() -> None:
    logp = torch.tensor([[0.5, NAN, 0.1], [0.0, 0.0, -INF]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    loss, clipped = gspo(logp, torch.zeros(2, 3), torch.tensor([1.0, 1.0]), mask)
    assert [math.isnan(x) for x in loss[0].tolist()] == [True, True, False]
    assert loss[1].tolist() == [-1.0, -1.0, 0.0]
    assert not clipped.any()
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0] * 3, [-1.0, -1.0, 0.0]]


@pytest.mark.parametrize(("delta", "ratio"), [(300.0, math.exp(20)), (-300.0, math.exp(-20))])
def test_the_exponent_is_clamped_after_the_mean(delta: float, ratio: float) -> None:
    # 300 / 3 = 100: far beyond 20, no gradient. 30 / 3 = 10 is inside, though the token's own log-ratio is not.
    logp = torch.tensor([[delta, 0.0, 0.0], [delta / 10, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    advantage = -1.0 if delta > 0 else 1.0
    loss, _ = gspo(logp, torch.zeros(2, 3), torch.tensor([advantage] * 2))
    inside = math.exp(delta / 30)
    assert loss[0].tolist() == pytest.approx([-advantage * ratio] * 3)
    assert loss[1].tolist() == pytest.approx([-advantage * inside] * 3)
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == [0.0] * 3
    assert logp.grad[1].tolist() == pytest.approx([-advantage * inside] * 3)


def test_advantages_by_token_keep_their_own_bound() -> None:
    # s = 2, bounds 1/2 and 3/2; A = 1 is cut (-1.5, no gradient), A = -1 is not (2), A = 0 does nothing.
    logp = torch.full((1, 3), LOG2, requires_grad=True)
    loss, clipped = gspo(logp, torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 0.0]]), None, 0.5, 0.5)
    assert loss[0].tolist() == pytest.approx([-1.5, 2.0, 0.0])
    assert clipped.tolist() == [[True, False, False]]
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([0.0, 2.0, 0.0])


def test_bounds_of_a_ratio() -> None:
    with pytest.raises(ValueError, match=r"eps_low=1\.5 must be in \[0, 1\]"):
        gspo(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), eps_low=1.5)
