"""`clip`: values by hand, gradients against finite differences, guarded exponents and masks. What holds for every
surrogate is in test_surrogates_registry.py.
"""

import math

import pytest
import torch

from asyncrl.algos.surrogates import clip_surrogate
from asyncrl.algos.surrogates.clip import clip

LOG2 = math.log(2)
NAN, INF = math.nan, math.inf


def test_values_by_hand() -> None:
    # Ratios 1, 2, 1/2 under A = 1 and A = -3; bounds 0.8 and 1.27.
    logp = torch.tensor([[-1.0, -1.0 + LOG2, -1.0 - LOG2]] * 2)
    old = torch.full((2, 3), -1.0)
    loss = clip_surrogate(logp, old, torch.tensor([1.0, -3.0]))
    assert loss[0].tolist() == pytest.approx([-1.0, -1.27, -0.5], abs=1e-6)
    assert loss[1].tolist() == pytest.approx([3.0, 6.0, 2.4], abs=1e-6)


def test_dual_clip_bounds_negative_advantages_only() -> None:
    logp = torch.tensor([[math.log(5.0)], [math.log(5.0)], [math.log(1.5)]])
    loss = clip_surrogate(logp, torch.zeros(3, 1), torch.tensor([-2.0, 2.0, -2.0]), dual_clip=3.0)
    assert loss.flatten().tolist() == pytest.approx([6.0, -2.54, 3.0], abs=1e-5)
    with pytest.raises(ValueError, match="dual_clip"):
        clip_surrogate(logp, torch.zeros(3, 1), torch.ones(3), dual_clip=1.2)


def test_on_policy_gradient_is_the_advantage() -> None:
    # Ratio exactly 1: value -A and gradient -A, whatever the bounds.
    logp = torch.tensor([[-0.3, -2.0]], requires_grad=True)
    loss = clip_surrogate(logp, logp.detach(), torch.tensor([1.5]))
    assert loss.tolist() == [[-1.5, -1.5]]
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-1.5, -1.5]]


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_gradient_equals_finite_differences(dual_clip: float | None) -> None:
    # Log-ratios away from the kinks log 0.8 = -0.223, log 1.27 = 0.239, log 3 = 1.099.
    deltas = torch.tensor([[-1.0, -0.1, 0.0, 0.15, 0.5, 1.5]] * 2, dtype=torch.float64)
    old = torch.linspace(-3, -0.5, 12, dtype=torch.float64).view(2, 6)
    logp = (old + deltas).requires_grad_()
    advantages = torch.tensor([1.25, -0.75], dtype=torch.float64)

    def total(x: torch.Tensor) -> torch.Tensor:
        return clip_surrogate(x, old, advantages, dual_clip=dual_clip).sum()

    (gradient,) = torch.autograd.grad(total(logp), logp)
    for b in range(2):
        for t in range(6):
            step = torch.zeros_like(old)
            step[b, t] = 1e-6
            numeric = (total(logp.detach() + step) - total(logp.detach() - step)) / 2e-6
            assert gradient[b, t].item() == pytest.approx(numeric.item(), abs=1e-7)
    # By hand: clipped tokens have none; the others -A r.
    assert gradient[0, 4].item() == gradient[0, 5].item() == gradient[1, 0].item() == 0
    assert gradient[1, 4].item() == pytest.approx(0.75 * math.exp(0.5))
    assert gradient[1, 5].item() == pytest.approx(0.0 if dual_clip else 0.75 * math.exp(1.5))


def test_old_policy_and_advantage_get_no_gradient() -> None:
    logp = torch.zeros(1, 2, requires_grad=True)
    old = torch.zeros(1, 2, requires_grad=True)
    advantages = torch.ones(1, requires_grad=True)
    clip_surrogate(logp, old, advantages).sum().backward()
    assert old.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize("delta", [99.0, -99.0, 1e30, -1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_log_ratios_stay_finite(delta: float, advantage: float, dtype: torch.dtype) -> None:
    logp = torch.tensor([[delta, -1.0]], dtype=dtype, requires_grad=True)
    loss = clip_surrogate(logp, torch.tensor([[0.0, -1.0]], dtype=dtype), torch.tensor([advantage]))
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert logp.grad is not None
    assert torch.isfinite(loss).all()
    assert logp.grad.tolist() == [[0.0, -advantage]]


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 99.0])
@pytest.mark.parametrize("side", ["logp", "old", "both"])
def test_masked_entries_give_zero_loss_and_gradient(junk: float, side: str) -> None:
    values = torch.tensor([[-0.5, junk if side != "old" else -1.0]])
    old = torch.tensor([[-0.5, junk if side != "logp" else -1.0]])
    logp = values.clone().requires_grad_()
    mask = torch.tensor([[1.0, 0.0]])
    loss = clip_surrogate(logp, old, torch.tensor([2.0]), mask=mask)
    assert loss.tolist() == [[-2.0, 0.0]]
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-2.0, 0.0]]
    # Without the argument, a `where` outside is enough for finite gradients too.
    logp = values.clone().requires_grad_()
    torch.where(mask != 0, clip_surrogate(logp, old, torch.tensor([2.0])), 0.0).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-2.0, 0.0]]


def test_a_broken_counted_token_is_seen() -> None:
    loss = clip_surrogate(torch.tensor([[NAN, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.tensor([1.0]))
    assert math.isnan(loss[0, 0])
    assert loss[0, 1] == -1


def test_missing_rollout_log_probs_have_ratio_one() -> None:
    # B15: positions 0 and 3 are bit-equal to the clean case, 1 and 2 act as on policy.
    logp = torch.tensor([[-0.2, -0.3, -0.4, -1.5]], requires_grad=True)
    rollout = torch.tensor([[-0.1, NAN, NAN, -2.0]])
    clean = torch.tensor([[-0.1, -0.9, -0.9, -2.0]])
    loss = clip_surrogate(logp, rollout, torch.tensor([-1.0]))
    wanted = clip_surrogate(logp, clean, torch.tensor([-1.0]))
    assert loss[0, [1, 2]].tolist() == [1.0, 1.0]
    assert loss[0, [0, 3]].tolist() == wanted[0, [0, 3]].tolist()
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0, [1, 2]].tolist() == [1.0, 1.0]


def test_clipped_tokens_by_hand() -> None:
    # Ratios 2, 1/2, 1 and a masked 2; A = 1 clips the first, A = -1 the second.
    logp = torch.tensor([[LOG2, -LOG2, 0.0, LOG2]] * 2)
    mask = torch.tensor([[1, 1, 1, 0]] * 2)
    old = torch.zeros(2, 4)

    def clipped(advantages: list[float], eps_high: float = 0.27) -> list[list[bool]]:
        return clip(logp, old, torch.tensor(advantages), mask, 0.2, eps_high).clipped.tolist()

    assert clipped([1.0, -1.0]) == [[True, False, False, False], [False, True, False, False]]
    assert clipped([1.0, 1.0], eps_high=1.5) == [[False] * 4] * 2
    assert clipped([0.0, 0.0]) == [[False] * 4] * 2
    logp[0, 3] = NAN
    assert clipped([1.0, -1.0]) == [[True, False, False, False], [False, True, False, False]]
    logp[0, 0] = NAN
    assert clipped([1.0, -1.0]) == [[False] * 4, [False, True, False, False]]


def test_advantages_per_token_and_refusals() -> None:
    per_token = clip_surrogate(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]))
    assert per_token.tolist() == [[-1.0, -2.0]]
    with pytest.raises(ValueError, match="advantages"):
        clip_surrogate(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        clip_surrogate(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(ValueError, match="eps_low"):
        clip_surrogate(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), eps_low=1.5)
