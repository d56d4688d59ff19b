"""Gradients of the surrogates against finite differences in float64, away from the kinks, on both sides of the bounds.

Per response what is differentiated is its mean loss: the losses of `gspo` and `gmpo` share their gradient out to the
tokens, so only their sum is a derivative.
"""

import math

import pytest
import torch

from asyncrl.algos.aggregate import aggregate
from asyncrl.algos.registry import SURROGATES
from asyncrl.algos.seam import call
from asyncrl.sections.algorithm import AlgorithmSection

STEP = 1e-6

# Rows with the sign of their mean log-ratio: inside, above, below every bound, mixed. Each comes with both signs of A.
DELTAS = [
    [0.0001, -0.0001, 0.0002, 0.0001],
    [0.5, 0.9, 0.6, 1.2],
    [-0.5, -0.9, -0.6, -1.2],
    [1.9, -0.1, -0.8, 0.1],
    [-0.1, 0.15, -0.05, 0.1],
    [3.0, -2.0, 0.0, -0.3],
]
SIGNS = [1.25, -0.75]


def toy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp, old_logp, advantages, mask."""
    deltas = torch.tensor(DELTAS, dtype=torch.float64).repeat_interleave(2, dim=0)
    n = len(deltas)
    old = torch.linspace(-3, -0.5, 4 * n, dtype=torch.float64).view(n, 4)
    mask = torch.ones(n, 4)
    mask[8:, 3] = 0
    return old + deltas, old, torch.tensor(SIGNS * len(DELTAS), dtype=torch.float64), mask


def total(name: str, logp: torch.Tensor) -> torch.Tensor:
    _, old, advantages, mask = toy()
    inputs = {"logp": logp, "old_logp": old, "advantages": advantages, "mask": mask}
    loss = call(SURROGATES[name], inputs, AlgorithmSection()).loss
    return aggregate(loss, mask, "sequence_mean", float(mask.sum()), len(mask), 1.0)


def slope(name: str, logp: torch.Tensor, b: int, t: int) -> float:
    step = torch.zeros_like(logp)
    step[b, t] = STEP
    return float((total(name, logp + step) - total(name, logp - step)) / (2 * STEP))


@pytest.mark.parametrize("name", ["clip", "gspo", "gmpo"])
def test_gradient_equals_finite_differences(name: str) -> None:
    logp = toy()[0].requires_grad_()
    (gradient,) = torch.autograd.grad(total(name, logp), logp)
    for b in range(len(logp)):
        for t in range(4):
            assert gradient[b, t].item() == pytest.approx(slope(name, logp.detach(), b, t), abs=1e-8)
    # The toy has tokens with a gradient, and tokens that a bound stops.
    mask = toy()[3]
    assert 0 < gradient.count_nonzero() < mask.sum()


def test_gradient_of_cispo_is_that_of_its_formula_with_the_weight_held() -> None:
    # -clip(r, 0, 5) A logp / T / n is linear in logp once its weight is held.
    logp, old, advantages, mask = toy()
    leaf = logp.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total("cispo", leaf), leaf)

    def held(b: int, t: int, x: float) -> float:
        weight = min(math.exp(logp[b, t].item() - old[b, t].item()), 5.0)
        return -weight * advantages[b].item() * x / mask[b].sum().item() / len(mask)

    for b, t in mask.nonzero().tolist():
        x = logp[b, t].item()
        wanted = (held(b, t, x + STEP) - held(b, t, x - STEP)) / (2 * STEP)
        assert gradient[b, t].item() == pytest.approx(wanted, abs=1e-8)
    assert gradient.count_nonzero() == mask.sum()
    # Where the weight is cut it does not move with logp: there the value itself can be differentiated. Ratio e^3 > 5.
    for b in (10, 11):
        assert gradient[b, 0].item() == pytest.approx(slope("cispo", logp, b, 0), abs=1e-8)
        assert gradient[b, 1].item() != pytest.approx(slope("cispo", logp, b, 1), abs=1e-8)
