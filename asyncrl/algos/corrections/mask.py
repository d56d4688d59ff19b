"""Two-sided masking of tokens by the ratio of learner and rollout policy.

Axes: B responses, T positions.
"""

from __future__ import annotations

import math

import torch

from asyncrl.algos.ratio import log_ratio


@torch.no_grad()
def mask_weights(
    logp: torch.Tensor, rollout_logp: torch.Tensor, mask: torch.Tensor, low: float = 0.5, high: float = 5.0
) -> torch.Tensor:
    """1 where low <= pi_old / mu <= high, 0 elsewhere.

    logp (pi_old), rollout_logp (mu): [B, T] at the same temperature; NaN in rollout_logp = missing, weight 1. mask:
    [B, T]; the weight is 0 where it is 0, whatever lies there. low in [0, 1], 0 is no lower bound; high >= 1, inf is no
    upper bound. Returns [B, T], float32 or float64, without gradient. A counted logp that is not finite or a
    rollout_logp that is infinite gives NaN: such a token must not train unseen. Raises ValueError for wrong shapes or
    bounds.
    The double-sided masking of IcePop ("Small leak can sink a great ship", 2025), whose range is the default; there a
    token inside the range keeps its ratio as weight, here it weighs 1.
    """
    if not 0 <= low <= 1 or not high >= 1:
        raise ValueError(f"low={low} must be in [0, 1] and high={high} >= 1")
    delta, broken = log_ratio(logp, rollout_logp, mask)
    # In logs, so that no bound is met by clamping an exponent.
    inside = (delta >= (math.log(low) if low > 0 else -math.inf)) & (delta <= math.log(high))
    weight = torch.where(broken, float("nan"), inside.to(delta.dtype))
    return torch.where(mask != 0, weight, 0.0)
