"""KL estimators by exact expectation over two outcomes (B29): values, gradients, off policy, guards, metric names."""

import math
import re

import pytest
import torch

from asyncrl.algos.kl import kl_loss, kl_values
from asyncrl.algos.mismatch import mismatch
from asyncrl.metrics.names import NAMES

P, REF = [0.7, 0.3], [0.4, 0.6]
KL = 0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.3 / 0.6)
"""0.18379: KL(p || ref)."""
GRADIENT = 0.7 * 0.3 * (math.log(0.7 / 0.4) - math.log(0.3 / 0.6))
"""0.26308: its derivative by logit 0, p0 p1 (log p0/ref0 - log p1/ref1)."""


def column(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()[:, None]


def expected(kind: str, mu: list[float] | None = None) -> tuple[float, float]:
    """Exact expectation over both outcomes of a loss and of its gradient by logit 0; mu is what samples."""
    logits = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    logp = torch.log_softmax(logits, 0)[:, None]
    sampled = None if mu is None or kind != "unbiased" else column(mu)
    loss = kl_loss(logp, column(REF), kind=kind, sampled_logp=sampled)  # type: ignore[arg-type]
    total = (torch.tensor(mu or P, dtype=torch.float64)[:, None] * loss).sum()
    total.backward()
    assert logits.grad is not None
    return total.item(), logits.grad[0].item()


def test_b29_the_numbers() -> None:
    assert pytest.approx(0.18379, abs=5e-6) == KL
    assert pytest.approx(0.26308, abs=5e-6) == GRADIENT


@pytest.mark.parametrize(("kind", "gradient"), [("k1", 0.0), ("k3", 0.3), ("k2", GRADIENT), ("unbiased", GRADIENT)])
def test_b29_gradients_of_the_estimators_as_losses(kind: str, gradient: float) -> None:
    assert expected(kind)[1] == pytest.approx(gradient, abs=1e-12)


def test_b29_values_of_the_estimators() -> None:
    p = torch.tensor(P, dtype=torch.float64)[:, None]
    for kind in ("k1", "k3"):
        assert (p * kl_values(column(P), column(REF), kind=kind)).sum().item() == pytest.approx(KL, abs=1e-12)  # type: ignore[arg-type]
    # k2 is biased: 0.7 * 0.5596^2 / 2 + 0.3 * 0.6931^2 / 2
    assert (p * kl_values(column(P), column(REF), kind="k2")).sum().item() == pytest.approx(0.181677, abs=1e-6)
    assert kl_values(column(P), column(REF), kind="k1").min() < 0
    assert kl_values(column(P), column(REF)).min() > 0


@pytest.mark.parametrize("mu", [[0.5, 0.5], [0.1, 0.9], [0.95, 0.05]])
def test_b29_only_the_unbiased_loss_is_right_off_policy(mu: list[float]) -> None:
    assert expected("unbiased", mu) == pytest.approx((KL, GRADIENT), abs=1e-12)
    for kind in ("k1", "k2", "k3"):
        assert abs(expected(kind, mu)[1] - GRADIENT) > 0.01


def test_b29_a_metric_named_kl_is_never_negative_or_is_named_k1() -> None:
    named = {name for name in NAMES if re.search(r"(^|[/_])kl", name)}
    assert len(named) >= 8
    # ref_kl is k3; kl_loss is a part of a loss.
    assert all(re.search(r"[/_]kl_k[13]$", name) for name in named - {"policy/ref_kl", "policy/kl_loss"}), named
    # Tokens of which pi thinks more than mu: k1 is negative, k3 is not.
    found = mismatch(torch.tensor([[-0.5, -0.5]]), torch.tensor([[-1.0, -0.6]]), torch.ones(1, 2))
    assert found["kl_k1"] < 0 < found["kl_k3"]


def test_k3_of_policies_that_nearly_agree_is_not_negative_by_rounding() -> None:
    logp = -torch.rand(1, 100_000, generator=torch.Generator().manual_seed(0))
    for spread in (1e-7, 1e-6, 1e-5):
        noise = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1)) * spread
        assert kl_values(logp, logp + noise).min() >= 0


@pytest.mark.parametrize("log_mu", [-0.4, -2.0, -9.0])
def test_the_unbiased_gradient_of_a_token_is_its_ratio_times_the_log_ratio_to_the_reference(log_mu: float) -> None:
    logp = torch.tensor([[-0.5]], dtype=torch.float64, requires_grad=True)
    ref, mu = torch.tensor([[-1.7]], dtype=torch.float64), torch.tensor([[log_mu]], dtype=torch.float64)
    loss = kl_loss(logp, ref, sampled_logp=mu)
    loss.sum().backward()
    ratio = math.exp(-0.5 - log_mu)
    # Not truncated: exp(8.5) = 4915 at the last one.
    assert loss.item() == pytest.approx(ratio * (math.exp(-1.2) - 1 + 1.2), rel=1e-12)
    assert logp.grad is not None and logp.grad.item() == pytest.approx(ratio * 1.2, rel=1e-12)
    step = 1e-6
    near = [kl_loss(logp.detach() + d, ref, sampled_logp=mu).item() for d in (step, -step)]
    assert (near[0] - near[1]) / (2 * step) == pytest.approx(ratio * 1.2, rel=1e-6)


def test_equal_policies_cost_nothing_and_pull_nowhere() -> None:
    for kind in ("k2", "k3", "unbiased"):
        logp = torch.tensor([[-0.3, -4.0]], requires_grad=True)
        loss = kl_loss(logp, logp.detach(), kind=kind)  # type: ignore[arg-type]
        loss.sum().backward()
        assert loss.tolist() == [[0.0, 0.0]]
        assert logp.grad is not None and logp.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
def test_masked_and_missing_entries_give_nothing(kind: str) -> None:
    logp = torch.tensor([[-1.0, math.nan, -1.0]], requires_grad=True)
    reference = torch.tensor([[-2.0, -1.0, math.nan]])
    loss = kl_loss(logp, reference, torch.tensor([[1, 0, 1]]), kind=kind)  # type: ignore[arg-type]
    assert loss[0, 1:].tolist() == [0.0, 0.0] and loss[0, 0] > 0
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0, 1] == 0 and math.isfinite(logp.grad[0, 0])


@pytest.mark.parametrize("kind", ["k2", "k3", "unbiased"])
@pytest.mark.parametrize("delta", [99.0, -99.0])
def test_huge_differences_stay_finite(kind: str, delta: float) -> None:
    logp = torch.full((1, 2), delta, requires_grad=True)
    mu = torch.zeros(1, 2) if kind == "unbiased" else None
    loss = kl_loss(logp, torch.zeros(1, 2), kind=kind, sampled_logp=mu)  # type: ignore[arg-type]
    loss.sum().backward()
    assert logp.grad is not None
    assert torch.isfinite(loss).all() and torch.isfinite(logp.grad).all()


def test_a_broken_counted_token_is_seen() -> None:
    broken, ones = torch.tensor([[math.nan, -1.0]]), torch.full((1, 2), -1.0)
    assert torch.isnan(kl_values(broken, ones)).tolist() == [[True, False]]
    assert torch.isnan(kl_loss(ones, ones, sampled_logp=torch.tensor([[-math.inf, -1.0]]))).tolist() == [[True, False]]
    assert torch.isnan(kl_loss(ones, ones, sampled_logp=broken)).tolist() == [[False, False]]


def test_refusals() -> None:
    z = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="kind='k4'"):
        kl_values(z, z, kind="k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no importance ratio"):
        kl_loss(z, z, kind="k2", sampled_logp=z)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        kl_loss(z, torch.zeros(2, 2))
