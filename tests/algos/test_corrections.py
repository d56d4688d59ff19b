"""Truncated importance sampling: numbers by hand, detachment, guards, temperature (B17), missing values (B15)."""

import math

import pytest
import torch

from asyncrl.algos.corrections import tis_weights

NAN, INF = math.nan, math.inf
LOG2 = math.log(2)


def test_token_weights_by_hand() -> None:
    # Ratios 1, 1/2, 4 (capped), masked
    logp = torch.tensor([[-1.0, -2.0, -0.5, -3.0]])
    rollout = torch.tensor([[-1.0, -2.0 + LOG2, -0.5 - 2 * LOG2, -1.0]])
    weights = tis_weights(logp, rollout, torch.tensor([[1, 1, 1, 0]]))
    assert weights.tolist() == [pytest.approx([1.0, 0.5, 2.0, 0.0], abs=1e-6)]
    assert tis_weights(logp, rollout, torch.tensor([[1, 1, 1, 0]]), cap=5.0)[0, 2].item() == pytest.approx(4.0)


def test_sequence_weights_by_hand() -> None:
    # Row 0: 2 * 1/4 = 1/2 (the masked 8 left out). Row 1: 2 * 2 = 4, capped.
    logp = torch.tensor([[LOG2, -2 * LOG2, 3 * LOG2], [LOG2, LOG2, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    weights = tis_weights(logp, torch.zeros(2, 3), mask, level="sequence")
    assert weights[0].tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-6)
    assert weights[1].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_detached(level: str) -> None:
    # d/dlogp of w * logp must be w, not w * (1 + logp).
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    weights = tis_weights(logp, torch.tensor([[-0.5, -2.0]], dtype=torch.float64), torch.ones(1, 2), level=level)  # type: ignore[arg-type]
    assert not weights.requires_grad
    (weights * logp).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == weights.tolist()
    assert weights[0, 0].item() == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [99.0, -99.0, 1e30, -1e30])
def test_finite_weights_and_gradients_at_huge_log_ratios(delta: float, level: str) -> None:
    logp = torch.tensor([[delta, delta, -1.0]], requires_grad=True)
    weights = tis_weights(logp, torch.tensor([[0.0, 0.0, -1.0]]), torch.ones(1, 3), level=level)  # type: ignore[arg-type]
    assert torch.isfinite(weights).all()
    assert weights[0, 0].item() == pytest.approx(2.0 if delta > 0 else math.exp(-20.0))
    (weights * logp).sum().backward()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 99.0])
def test_masked_entries_are_never_read(junk: float, level: str) -> None:
    logp = torch.tensor([[-1.0, junk, -1.0]], requires_grad=True)
    rollout = torch.tensor([[-1.0, -1.0, junk]])
    weights = tis_weights(logp, rollout, torch.tensor([[1.0, 0.0, 0.0]]), level=level)  # type: ignore[arg-type]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]
    torch.where(weights > 0, weights * logp, 0.0).sum().backward()
    assert logp.grad is not None
    assert logp.grad[0, 0] == 1


def test_b15_missing_rollout_log_probs_weigh_one() -> None:
    logp = torch.tensor([[-0.2, -0.3, -0.4, -1.5]])
    weights = tis_weights(logp, torch.tensor([[-0.1, NAN, NAN, -2.0]]), torch.ones(1, 4))
    clean = tis_weights(logp, torch.tensor([[-0.1, -0.9, -0.9, -2.0]]), torch.ones(1, 4))
    assert weights[0, [1, 2]].tolist() == [1.0, 1.0]
    assert weights[0, [0, 3]].tolist() == clean[0, [0, 3]].tolist()
    # Per sequence a missing token adds nothing: exp(-0.1 + 0.5)
    whole = tis_weights(logp, torch.tensor([[-0.1, NAN, NAN, -2.0]]), torch.ones(1, 4), level="sequence")
    assert whole.tolist() == [pytest.approx([math.exp(0.4)] * 4)]


def test_a_broken_learner_log_prob_is_seen() -> None:
    weights = tis_weights(torch.tensor([[NAN, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2))
    assert math.isnan(weights[0, 0])
    assert weights[0, 1] == 1


def test_b17_temperature_belongs_in_both_log_probs() -> None:
    # Logits [2, 1, 0] at T = 0.6: the right log-probs, those of a T = 1 learner, those divided by T afterwards.
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    mu = torch.log_softmax(logits / 0.6, 0)[None]
    mask = torch.ones(1, 3)
    assert mu[0].tolist() == pytest.approx([-0.2026, -1.8692, -3.5359], abs=1e-4)
    same = tis_weights(torch.log_softmax(logits / 0.6, 0)[None], mu, mask, cap=10.0)
    assert same[0].tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
    wrong = tis_weights(torch.log_softmax(logits, 0)[None], mu, mask, cap=10.0)
    assert wrong[0].tolist() == pytest.approx([0.8146, 1.5867, 3.0904], abs=1e-4)
    divided = (torch.log_softmax(logits, 0) / 0.6)[None]
    assert divided[0].tolist() == pytest.approx([-0.6793, -2.3460, -4.0127], abs=1e-4)
    # exp(-0.6793 + 0.2026) = 0.6208, the same for every token
    assert tis_weights(divided, mu, mask)[0].tolist() == pytest.approx([0.6208] * 3, abs=1e-4)


def test_a_response_without_tokens() -> None:
    weights = tis_weights(torch.zeros(1, 2), torch.full((1, 2), NAN), torch.zeros(1, 2), level="sequence")
    assert weights.tolist() == [[0.0, 0.0]]
    assert tis_weights(torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0, 2)).shape == (0, 2)


def test_refusals() -> None:
    z = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="cap"):
        tis_weights(z, z, z, cap=0.0)
    with pytest.raises(ValueError, match="level"):
        tis_weights(z, z, z, level="group")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        tis_weights(z, z, torch.zeros(2))
