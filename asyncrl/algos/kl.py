"""KL divergence to a reference policy from sampled tokens: what to log, and what to minimise. Knows no model.

The three estimators of J. Schulman, "Approximating KL Divergence" (2020). For a token sampled from pi, with
r = ref / pi, all three estimate the reverse KL(pi || ref):

k1 = -log r           unbiased, may be negative
k2 = (log r)^2 / 2    biased, never negative
k3 = r - 1 - log r    unbiased, never negative

An unbiased value does not make an unbiased gradient: differentiating an estimator leaves out that pi also decides
what is sampled. On policy the gradient of k1 is 0 in expectation, that of k3 is the gradient of KL(ref || pi), and
that of k2 is right (arXiv 2510.01555). With the importance ratio pi / mu of the policy mu that sampled the token,
ratio * k3 has the right value and the right gradient for any mu (DeepSeek-V3.2, arXiv 2512.02556, eq. 7).

All of this is per token, given the tokens before it: these stay those that mu sampled.

The mismatch metrics (mismatch.py) are another quantity, KL(mu || pi).

Axes: B responses, T positions.
"""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.algos.ratio import MAX_LOG_RATIO, bounded_exp, log_ratio

Estimator = Literal["k1", "k2", "k3"]
Loss = Literal["k1", "k2", "k3", "unbiased"]


@torch.no_grad()
def kl_values(
    logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor | None = None, kind: Estimator = "k3"
) -> torch.Tensor:
    """One estimate of KL(pi || ref) per token, for metrics.

    logp (pi), ref_logp: [B, T] at one temperature; NaN in ref_logp = missing, 0 there. mask: [B, T] or None; 0 where
    it is 0. Returns [B, T] in float32 or float64, NaN where a counted entry is not finite. Average k3 under a name
    with `kl`, k1 under one with `kl_k1`: k1 may be negative. ValueError for wrong shapes or an unknown kind.
    """
    return _estimate(logp, ref_logp, mask, kind)


def kl_loss(
    logp: torch.Tensor,
    ref_logp: torch.Tensor,
    mask: torch.Tensor | None = None,
    kind: Loss = "unbiased",
    sampled_logp: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss per token whose gradient pulls pi towards ref, to be aggregated like any other token loss.

    logp: [B, T], differentiable. ref_logp: [B, T], taken as constant. mask: [B, T] or None. Returns [B, T].

    unbiased   exp(log pi - log mu) * k3. sampled_logp is log mu [B, T]; None, or NaN in it, means mu = pi (ratio 1,
               which still carries its gradient). Value and gradient are those of KL(pi || ref), off policy too. A
               token's gradient is pi / mu (log pi - log ref) times that of log pi. The ratio is not truncated: below
               the bound of +-20 on exponents any bound would bring back the bias that it is there to remove
    k2         right gradient on policy only, wrong value
    k3         the gradient is that of KL(ref || pi)
    k1         the expected gradient is 0: it adds noise and nothing else

    The last two are there to be compared with. Entries as in `kl_values`; gradient 0 where they are replaced.
    ValueError for wrong shapes, an unknown kind, or sampled_logp with another kind than unbiased.
    """
    if kind != "unbiased":
        if sampled_logp is not None:
            raise ValueError(f"kind={kind!r} has no importance ratio; leave out sampled_logp or use kind='unbiased'")
        return _estimate(logp, ref_logp.detach(), mask, kind)
    sampled = logp.detach() if sampled_logp is None else sampled_logp.detach()
    delta, broken = log_ratio(logp, sampled, mask)
    value = _estimate(logp, ref_logp.detach(), mask, "k3")
    return torch.where(broken, float("nan"), bounded_exp(delta) * value)


def _estimate(logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor | None, kind: str) -> torch.Tensor:
    """[B, T] of one estimator, differentiable in logp."""
    delta, broken = log_ratio(logp, ref_logp, mask)
    if kind == "k1":
        value = delta
    elif kind == "k2":
        value = delta**2 / 2
    elif kind == "k3":
        # log r = -delta. expm1, not exp - 1: k3 is quadratic in delta where the policies nearly agree.
        value = torch.expm1((-delta).clamp(max=MAX_LOG_RATIO)) + delta
    else:
        raise ValueError(f"kind={kind!r} must be one of k1, k2, k3, or unbiased for a loss")
    return torch.where(broken, float("nan"), value)
