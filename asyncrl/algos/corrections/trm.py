"""Trust region masking: a response with a token too far from the rollout policy does not train.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.ratio import MAX_LOG_RATIO, log_ratio


@torch.no_grad()
def trm_weights(logp: torch.Tensor, rollout_logp: torch.Tensor, mask: torch.Tensor, bound: float = 0.5) -> torch.Tensor:
    """1 for every token of a response whose largest token KL is at most bound, 0 for every token of another.

    KL of a token: k3 = r - 1 - log r with r = pi_old / mu, from the sampled token alone, never negative. logp (pi_old),
    rollout_logp (mu): [B, T] at the same temperature; NaN in rollout_logp = missing, KL 0. mask: [B, T]; where it is 0
    the weight is 0, and what lies there is never read. Returns [B, T], float32 or float64, without gradient; the
    exponent is clamped to 20. A counted logp that is not finite or a rollout_logp that is infinite makes its whole
    response NaN: whether it may train is not known. Raises ValueError for wrong shapes or bound <= 0.
    Trust region masking (arXiv 2512.23075), whose bound is on the KL of whole next-token distributions; rollouts have
    the sampled token's alone, and k3 estimates it from that. The default is ours: ratios from 0.30 to 2.36.
    """
    if not bound > 0:
        raise ValueError(f"bound={bound} must be positive")
    delta, broken = log_ratio(logp, rollout_logp, mask)
    too_far = torch.expm1(delta.clamp(max=MAX_LOG_RATIO)) - delta > bound
    weight = (~too_far.any(dim=1, keepdim=True)).to(delta.dtype)
    weight = torch.where(broken.any(dim=1, keepdim=True), float("nan"), weight).expand_as(delta)
    return torch.where(mask != 0, weight, 0.0)
