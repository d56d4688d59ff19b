"""Group sequence policy optimization: one ratio per response, the geometric mean of its token ratios, and its clip.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.ratio import log_ratio
from asyncrl.algos.tokens import TokenLoss, check_bounds, counted, mean_ratio, per_token, token_loss


def gspo(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> TokenLoss:
    """-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A) at every token, s = exp(mean_t(logp - old_logp)).

    logp: [B, T], differentiable. old_logp: [B, T], taken as constant; NaN = missing, its log-ratio is 0 and counts in
    the mean. advantages: [B], or [B, T]. mask: [B, T] or None; what it leaves out is in no mean. Each token carries its
    own part of the gradient, s A d logp: a weight on the loss of a token, or its own advantage, acts on this token
    alone (GSPO-token). With `sequence_mean` value and gradient are then those of the paper's objective.

    Returns the loss [B, T], float32 or float64; clipped: all tokens of a response with A > 0 and s > 1 + eps_high, or
    A < 0 and s < 1 - eps_low. Exponents are clamped to +-20. A counted log-ratio that is not finite leaves the response
    without a ratio: all its tokens have loss NaN and gradient 0. Raises ValueError for wrong shapes or bounds.
    GSPO (arXiv 2507.18071), sections 4.1 and 4.3.
    """
    check_bounds(eps_low, eps_high)
    delta, broken = log_ratio(logp, old_logp.detach(), mask)
    counted_BT, advantage_BT = counted(mask, delta), per_token(advantages, delta)
    ratio = mean_ratio(delta, counted_BT)
    gain = torch.minimum(ratio * advantage_BT, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage_BT)
    clipped = ((advantage_BT > 0) & (ratio > 1 + eps_high)) | ((advantage_BT < 0) & (ratio < 1 - eps_low))
    return token_loss(gain, broken.any(dim=1, keepdim=True).expand_as(delta), clipped, counted_BT)
