"""Geometric-mean policy optimization: the geometric mean of the token ratios, each bounded before.

Axes: B responses, T positions.
"""

from __future__ import annotations

import math

import torch

from asyncrl.algos.ratio import log_ratio
from asyncrl.algos.tokens import TokenLoss, check_bounds, counted, mean_ratio, per_token, token_loss


def gmpo(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    eps_low: float = 0.4,
    eps_high: float = 0.4,
) -> TokenLoss:
    """-A exp(mean_t b) at every token; b = min(d, eps_high) where A > 0, max(d, -eps_low) where A < 0; d = log-ratio.

    logp: [B, T], differentiable. old_logp: [B, T], taken as constant; NaN = missing, its log-ratio is 0 and counts in
    the mean. advantages: [B], or [B, T]. mask: [B, T] or None; what it leaves out is in no mean. eps_low, eps_high:
    bounds of the LOG-ratio. Each token carries its own part of the gradient, 0 where it was bounded: a weight on the
    loss of a token acts on this token alone. With `sequence_mean` value and gradient are those of the paper's
    objective.

    Returns the loss [B, T], float32 or float64; clipped: A > 0 and d > eps_high, or A < 0 and d < -eps_low. The
    exponent is clamped to +-20. A counted log-ratio that is not finite leaves the response without a mean: all its
    tokens have loss NaN and gradient 0. Raises ValueError for wrong shapes or bounds.
    GMPO (arXiv 2507.20673), with its bounds e^-0.4 and e^0.4 of the ratio.
    """
    check_bounds(eps_low, eps_high, most_low=math.inf)
    delta, broken = log_ratio(logp, old_logp.detach(), mask)
    counted_BT, advantage_BT = counted(mask, delta), per_token(advantages, delta)
    bounded = torch.where(advantage_BT > 0, delta.clamp(max=eps_high), delta)
    bounded = torch.where(advantage_BT < 0, delta.clamp(min=-eps_low), bounded)
    gain = mean_ratio(bounded, counted_BT) * advantage_BT
    return token_loss(gain, broken.any(dim=1, keepdim=True).expand_as(delta), bounded != delta, counted_BT)
