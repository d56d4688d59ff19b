"""The KL term of the batch loss, by exact expectation over two outcomes (B29)."""

import math
from dataclasses import replace

import pytest
import torch

from asyncrl.config import validate
from asyncrl.learner.objective import LossSums, Tokens, Totals, batch_loss

P, REF = [0.7, 0.3], [0.4, 0.6]
KL = 0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.3 / 0.6)
GRADIENT = 0.7 * 0.3 * (math.log(0.7 / 0.4) - math.log(0.3 / 0.6))


def expected(a, mu, advantages=(0.0, 0.0)):
    """Loss and gradient by logit 0 of batch_loss, over both outcomes of a policy P that mu sampled; and its KL part."""
    logits = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    total, kl = torch.zeros((), dtype=torch.float64), 0.0
    for i in (0, 1):
        logp = torch.log_softmax(logits, 0)[i].reshape(1, 1)
        log_mu, ref = (torch.tensor([[math.log(x[i])]], dtype=torch.float64) for x in (mu, REF))
        mask, sums = torch.ones(1, 1, dtype=torch.bool), LossSums()
        advantage = torch.tensor([advantages[i]], dtype=torch.float64)
        tokens = Tokens(logp, logp.detach(), log_mu, advantage, mask, ref_logp=ref)
        total = total + mu[i] * batch_loss(tokens, a, Totals(1.0, 1.0, 1.0), sums)
        kl += mu[i] * sums.kl
    total.backward()
    return total.item(), logits.grad[0].item(), kl


def objective(estimator="unbiased", **algorithm):
    kl = {"coef": 0.1, "estimator": estimator}
    return validate({"model": {"path": "x"}, "algorithm": {"kl": kl, **algorithm}}).algorithm


@pytest.mark.parametrize(("kind", "gradient"), [("k1", 0.0), ("k3", 0.3), ("k2", GRADIENT), ("unbiased", GRADIENT)])
def test_b29_the_term_in_the_loss_pulls_as_its_estimator_says(kind, gradient):
    loss, pull, kl = expected(objective(kind), P)
    assert pull == pytest.approx(0.1 * gradient, abs=1e-12) and loss == pytest.approx(kl, abs=1e-12)
    if kind in ("k1", "k3", "unbiased"):
        assert kl == pytest.approx(0.1 * KL, abs=1e-12)


@pytest.mark.parametrize("mu", [[0.5, 0.5], [0.1, 0.9], [0.95, 0.05]])
@pytest.mark.parametrize(
    "algorithm",
    [{}, {"ratio": "behaviour", "correction": {"kind": "none"}}, {"correction": {"kind": "tis", "cap": 1.01}},
     {"correction": {"kind": "mask", "low": 0.99, "high": 1.01}}, {"aggregation": "sequence_mean"},
     {"aggregation": "constant"}],
)  # fmt: skip
def test_b29_the_unbiased_term_is_right_off_policy_whatever_surrounds_it(mu, algorithm):
    """Neither the weights of a correction nor the ratio of the surrogate reach it."""
    assert expected(objective(**algorithm), mu) == pytest.approx((0.1 * KL, 0.1 * GRADIENT, 0.1 * KL), abs=1e-12)
    for kind in ("k1", "k2", "k3"):
        assert abs(expected(objective(kind, **algorithm), mu)[1] - 0.1 * GRADIENT) > 0.001


def test_the_term_is_added_to_the_policy_loss():
    off = objective().model_copy(update={"kl": objective().kl.model_copy(update={"coef": 0.0})})
    plain, both = (expected(a, P, (1.0, -0.5)) for a in (off, objective()))
    assert plain[2] == 0 and both[2] == pytest.approx(0.1 * KL)
    assert both[0] - plain[0] == pytest.approx(0.1 * KL, abs=1e-12)
    assert both[1] - plain[1] == pytest.approx(0.1 * GRADIENT, abs=1e-12)


def test_a_missing_rollout_log_prob_is_ratio_1_and_a_loss_without_a_reference_is_refused():
    nan = [math.nan, math.nan]
    a, logits = objective(), torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for i in (0, 1):
        logp = torch.log_softmax(logits, 0)[i].reshape(1, 1)
        log_mu, ref = torch.tensor([[nan[i]]]), torch.tensor([[math.log(REF[i])]], dtype=torch.float64)
        mask = torch.ones(1, 1, dtype=torch.bool)
        x = Tokens(logp, logp.detach(), log_mu.double(), torch.zeros(1), mask, ref_logp=ref)
        loss = loss + P[i] * batch_loss(x, a, Totals(1.0, 1.0, 1.0), LossSums())
    loss.backward()
    assert (loss.item(), logits.grad[0].item()) == pytest.approx((0.1 * KL, 0.1 * GRADIENT), abs=1e-12)
    with pytest.raises(ValueError, match="needs log-probs of the reference policy"):
        batch_loss(replace(x, ref_logp=None), a, Totals(1.0, 1.0, 1.0), LossSums())
