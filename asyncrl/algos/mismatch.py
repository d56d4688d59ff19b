"""How far the learner's policy pi is from the rollout policy mu, over tokens sampled from mu.

Sums first, means last: sums of ranks, micro-batches or lags add up, means do not. Knows nothing of which
tokens it is given; a split (by lag, kept or filtered) is another mask.

Axes: B responses, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from asyncrl.algos.ratio import MAX_LOG_RATIO, bounded_exp, check_shapes


def mismatch(
    logp: torch.Tensor, rollout_logp: torch.Tensor, mask: torch.Tensor, taus: Sequence[float] = (2.0,)
) -> dict[str, float]:
    """Mismatch metrics of counted tokens: `finalise(mismatch_sums(...))`."""
    return finalise(mismatch_sums(logp, rollout_logp, mask, taus))


@torch.no_grad()
def mismatch_sums(
    logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
    taus: Sequence[float] = (2.0,),
    per_response: bool = False,
) -> dict[str, torch.Tensor]:
    """Sums over counted tokens that `finalise` turns into metrics.

    logp, rollout_logp: [B, T] at the same temperature; NaN in rollout_logp = missing: not counted, but
    numbered in `missing`. mask: [B, T]. taus: bounds > 1. Returns float64 scalars, or [B] per_response: count,
    missing, k1 = sum(log mu - log pi), k3 = sum(r - 1 - log r), abs = sum |log r|, w = sum(r), w2 = sum(r^2) and
    f_<tau> = tokens with max(r, 1/r) > tau, r = pi / mu with its exponent clamped to +-20.
    """
    check_shapes(logp, rollout_logp, mask)
    if any(not tau > 1 for tau in taus):
        raise ValueError(f"taus={list(taus)} must all exceed 1")
    is_missing = (mask != 0) & torch.isnan(rollout_logp)
    counted = (mask != 0) & ~is_missing
    # Entries that do not count are replaced before anything is computed from them.
    delta = torch.where(counted, logp.double() - rollout_logp.double(), 0.0)
    ratio = torch.where(counted, bounded_exp(delta), 0.0)
    terms = {
        "count": counted,
        "missing": is_missing,
        "k1": -delta,
        # expm1, not exp - 1: k3 is quadratic in delta, which rounding would swallow where pi and mu nearly agree.
        "k3": (torch.expm1(delta.clamp(max=MAX_LOG_RATIO)) - delta).clamp(min=0),
        "abs": delta.abs(),
        "w": ratio,
        "w2": ratio**2,
    }
    for tau in taus:
        terms[f"f_{float(tau)}"] = delta.abs() > math.log(tau)
    return {name: term.double().sum(dim=1) if per_response else term.double().sum() for name, term in terms.items()}


def finalise(sums: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """Metrics from (added up) sums.

    Returns kl_k1 (mean, can be negative), kl_k3 (mean, never negative), f_<tau> (share of tokens, two-sided)
    and ess = w^2 / (count w2), the effective sample size as a share in (0, 1]. All NaN when no token counts.
    Both KL estimates are of KL(mu || pi) and are metrics: their gradients are not the gradient of the KL.
    """
    values = {name: float(value) for name, value in sums.items()}
    count = values["count"]
    shares = {name: value for name, value in values.items() if name.startswith("f_")}
    if count == 0:
        return dict.fromkeys(["kl_k1", "kl_k3", *shares, "ess"], math.nan)
    metrics = {"kl_k1": values["k1"] / count, "kl_k3": values["k3"] / count}
    metrics.update({name: value / count for name, value in shares.items()})
    metrics["ess"] = values["w"] ** 2 / (count * values["w2"])
    return metrics
