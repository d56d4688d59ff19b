"""Selective importance sampling: tokens that pass a rejection test count as sampled from the learner's policy.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.ratio import bounded_exp, log_ratio


@torch.no_grad()
def sis_weights(
    logp: torch.Tensor, rollout_logp: torch.Tensor, mask: torch.Tensor, envelope: float = 2.0
) -> torch.Tensor:
    """a + (1 - a) r with r = pi_old / mu and a = min(1, r / envelope), the chance that the token is accepted.

    An accepted token weighs 1, a rejected one r: this is the mean over the test, so that every pass over a token finds
    the same weight; the loss is linear in it, so its expected gradient is that of the test itself. 1 at r = 1 and from
    r = envelope on, at most (envelope + 1)^2 / (4 envelope) between; as envelope goes to infinity the weight goes to r.
    logp (pi_old), rollout_logp (mu): [B, T] at the same temperature; NaN in rollout_logp = missing, weight exactly 1.
    mask: [B, T]; the weight is 0 where it is 0, whatever lies there. envelope >= 1. Returns [B, T], float32 or float64,
    without gradient; exponents are clamped to +-20. A counted logp that is not finite or a rollout_logp that is
    infinite gives NaN: such a token must not train unseen. Raises ValueError for wrong shapes or envelope < 1.
    SIS (arXiv 2607.04728) tests the ratio inside the surrogate, against an envelope of its own for every position: the
    largest ratio of the rollout policy's likeliest tokens. Rollouts have that of the sampled token alone, so here the
    envelope is given, and the default is ours.
    """
    if not envelope >= 1:
        raise ValueError(f"envelope={envelope} must be at least 1")
    delta, broken = log_ratio(logp, rollout_logp, mask)
    ratio = bounded_exp(delta)
    weight = torch.where(ratio < envelope, ratio + ratio / envelope * (1 - ratio), 1.0)
    return torch.where(mask != 0, torch.where(broken, float("nan"), weight), 0.0)
