"""Clipped surrogate of PPO and GRPO, with separate bounds (DAPO's clip-higher) and an optional dual clip.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.ratio import bounded_exp, log_ratio
from asyncrl.algos.tokens import TokenLoss, check_bounds, counted, per_token, token_loss


def clip_surrogate(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.27,
    dual_clip: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of `clip` alone, [B, T]."""
    return clip(logp, old_logp, advantages, mask, eps_low, eps_high, dual_clip).loss


def clip(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.27,
    dual_clip: float | None = None,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = exp(logp - old_logp).

    logp: [B, T], differentiable. old_logp: [B, T], taken as constant: pi_old (ratio: proximal) or the
    rollout policy (ratio: behaviour); NaN = missing, ratio 1. advantages: [B], or [B, T]. dual_clip: bound c > 1
    on the ratio of tokens with negative advantage, loss <= -c A. mask: [B, T] or None; loss and gradient
    are 0 where it is 0. Returns the loss [B, T], float32 or float64; clipped: A > 0 and r > 1 + eps_high, or A < 0 and
    r < 1 - eps_low. Exponents are clamped to +-20. A counted entry whose log-ratio is not finite gives loss NaN, so
    that it is seen, and gradient 0; an aggregate that masks it out is finite. Raises ValueError for wrong shapes or
    bounds.
    PPO (arXiv 1707.06347, eq. 7); clip-higher (DAPO, arXiv 2503.14476); dual clip (arXiv 1912.09729).
    """
    check_bounds(eps_low, eps_high)
    if dual_clip is not None and dual_clip <= 1 + eps_high:
        raise ValueError(f"dual_clip={dual_clip} must exceed 1 + eps_high = {1 + eps_high}")
    delta, broken = log_ratio(logp, old_logp.detach(), mask)
    ratio, advantage_BT = bounded_exp(delta), per_token(advantages, delta)
    gain = torch.minimum(ratio * advantage_BT, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage_BT)
    if dual_clip is not None:
        gain = torch.where(advantage_BT < 0, torch.maximum(gain, dual_clip * advantage_BT), gain)
    clipped = ((advantage_BT > 0) & (ratio > 1 + eps_high)) | ((advantage_BT < 0) & (ratio < 1 - eps_low))
    return token_loss(gain, broken, clipped, counted(mask, delta))
