"""`cispo`: values by hand, its bounds, its limits."""

import math

import pytest
import torch

from asyncrl.algos.surrogates.cispo import cispo
from asyncrl.algos.surrogates.clip import clip

LOG2 = math.log(2)
NAN, INF = math.nan, math.inf


def test_values_and_gradients_by_hand() -> None:
    # Ratios 1, 2, 1/2 become weights 1, 3/2, 3/4. Loss -w A logp, gradient -w A.
    # A = 1:  1 * 1, 1.5 * 0.5, 0.75 * 2.    A = -3: -3 times that.
    logp = torch.tensor([[-1.0, -0.5, -2.0]] * 2, requires_grad=True)
    old = logp.detach() - torch.tensor([0.0, LOG2, -LOG2])
    loss, clipped = cispo(logp, old, torch.tensor([1.0, -3.0]), None, 0.25, 0.5)
    assert loss.tolist() == [pytest.approx([1.0, 0.75, 1.5]), pytest.approx([-3.0, -2.25, -4.5])]
    assert clipped.tolist() == [[False, True, True]] * 2
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [pytest.approx([-1.0, -1.5, -0.75]), pytest.approx([3.0, 4.5, 2.25])]


def test_by_default_only_large_ratios_are_cut() -> None:
    # Bounds 0 and 5: ratios 4, 6 and e^-9, both signs.
    logp = torch.tensor([[math.log(4), math.log(6), -9.0]] * 2, requires_grad=True)
    loss, clipped = cispo(logp, torch.zeros(2, 3), torch.tensor([1.0, -1.0]))
    assert clipped.tolist() == [[False, True, False]] * 2
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-4.0, -5.0, -math.exp(-9)])
    assert logp.grad[1].tolist() == pytest.approx([4.0, 5.0, math.exp(-9)])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_without_bounds_it_is_importance_sampling(advantage: float) -> None:
    # The gradient of r A is r A d logp: that of `clip` without bounds.
    deltas = torch.tensor([[1.5, -0.5, 0.2, -4.0]], dtype=torch.float64)
    old = torch.tensor([[-1.0, -2.0, -0.5, -3.0]], dtype=torch.float64)
    logp = (old + deltas).requires_grad_()
    slopes = []
    for method in (cispo, clip):
        loss, clipped = method(logp, old, torch.tensor([advantage]), None, 1.0, INF)
        assert not clipped.any()
        slopes.append(torch.autograd.grad(loss.sum(), logp)[0])
    torch.testing.assert_close(slopes[0], -advantage * deltas.exp())
    torch.testing.assert_close(slopes[0], slopes[1])


def test_missing_old_log_probs_have_weight_one() -> None:
    logp = torch.tensor([[-0.5, -1.5, -2.0]], requires_grad=True)
    loss, clipped = cispo(logp, torch.tensor([[NAN, NAN, -2.0 - LOG2]]), torch.tensor([-1.0]))
    assert loss[0].tolist() == pytest.approx([-0.5, -1.5, -4.0])
    assert not clipped.any()
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([1.0, 1.0, 2.0])


@pytest.mark.parametrize(("delta", "weight"), [(99.0, 5.0), (1e30, 5.0), (-99.0, math.exp(-20))])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_have_the_weight_of_their_bound(delta: float, weight: float, advantage: float) -> None:
    # Below, exponents stop at -20; a gradient stays, however small.
    logp = torch.full((1, 2), -1.0, requires_grad=True)
    old = torch.tensor([[-1.0 - delta, -1.0]])
    cispo(logp, old, torch.tensor([advantage])).loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-advantage * weight, -advantage])


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_a_where_outside_is_enough_without_a_mask(junk: float) -> None:
    logp = torch.tensor([[-0.5, junk]], requires_grad=True)
    loss = cispo(logp, torch.tensor([[-0.5, -1.0]]), torch.tensor([2.0])).loss
    assert math.isnan(loss[0, 1].item())
    torch.where(torch.tensor([[True, False]]), loss, 0.0).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-2.0, 0.0]]


def test_bounds_of_a_ratio() -> None:
    with pytest.raises(ValueError, match=r"eps_low=1\.5 must be in \[0, 1\]"):
        cispo(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), eps_low=1.5)
