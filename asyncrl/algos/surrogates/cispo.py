"""CISPO, clipped importance-sampling policy optimization: REINFORCE with a clipped ratio as its constant weight.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.ratio import at_least_float32, bounded_exp, log_ratio
from asyncrl.algos.tokens import TokenLoss, check_bounds, counted, per_token, token_loss


def cispo(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    eps_low: float = 1.0,
    eps_high: float = 4.0,
) -> TokenLoss:
    """-c A logp, c = clip(r, 1 - eps_low, 1 + eps_high) without a gradient, r = exp(logp - old_logp).

    logp: [B, T], differentiable. old_logp: [B, T], taken as constant; NaN = missing, ratio 1. advantages: [B], or
    [B, T]. mask: [B, T] or None; loss and gradient are 0 where it is 0. The gradient is -c A whatever the ratio: every
    token trains, where `clip` stops those beyond the bounds. Only the gradient has a meaning, the value has none.

    Returns the loss [B, T], float32 or float64; clipped: r outside the bounds, A not 0. Exponents are clamped to
    +-20. A counted log-ratio that is not finite gives loss NaN and gradient 0. Raises ValueError for wrong shapes or
    bounds.
    MiniMax-M1 (arXiv 2506.13585), section 3.1: eps_low = 1 is no lower bound, as there.
    """
    check_bounds(eps_low, eps_high)
    delta, broken = log_ratio(logp, old_logp.detach(), mask)
    ratio, advantage_BT = bounded_exp(delta.detach()), per_token(advantages, delta)
    # The weight is a constant, so a log-prob that is no number gives no gradient: token_loss passes it none.
    weight = ratio.clamp(1 - eps_low, 1 + eps_high)
    clipped = (advantage_BT != 0) & (ratio != weight)
    return token_loss(weight * advantage_BT * at_least_float32(logp), broken, clipped, counted(mask, delta))
