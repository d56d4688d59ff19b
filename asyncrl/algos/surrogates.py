"""Policy-gradient losses per token (the NEGATED objective: minimise). Knows nothing of aggregation.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.ratio import at_least_float32, bounded_exp, log_ratio


def clip_surrogate(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.27,
    dual_clip: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Clipped surrogate with separate bounds: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).

    logp: [B, T], differentiable. old_logp: [B, T], taken as constant: pi_old (ratio: proximal) or the
    rollout policy (ratio: behaviour); NaN = missing, ratio 1. advantages: [B], or [B, T]. dual_clip: bound c > 1
    on the ratio of tokens with negative advantage, loss <= -c A. mask: [B, T] or None; loss and gradient
    are 0 where it is 0. Returns [B, T], float32 or float64. r = exp(logp - old_logp), exponent clamped to +-20.
    A counted entry whose log-ratio is not finite gives loss NaN, so that it is seen, and gradient 0; an
    aggregate that masks it out is finite. Raises ValueError for wrong shapes or bounds.
    DAPO clip-higher (arXiv 2503.14476); dual clip (arXiv 1912.09729).
    """
    _check_bounds(eps_low, eps_high)
    if dual_clip is not None and dual_clip <= 1 + eps_high:
        raise ValueError(f"dual_clip={dual_clip} must exceed 1 + eps_high = {1 + eps_high}")
    delta, broken = log_ratio(logp, old_logp.detach(), mask)
    ratio = bounded_exp(delta)
    advantage_BT = _per_token(advantages, delta)
    gain = torch.minimum(ratio * advantage_BT, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage_BT)
    if dual_clip is not None:
        gain = torch.where(advantage_BT < 0, torch.maximum(gain, dual_clip * advantage_BT), gain)
    loss = torch.where(broken, float("nan"), -gain)
    return loss if mask is None else torch.where(mask != 0, loss, 0.0)


def clip_fraction(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.27,
) -> torch.Tensor:
    """Number of counted tokens whose gradient the clip cuts off; the caller divides by its token count.

    Arguments as in `clip_surrogate`, mask: [B, T]. Returns a float64 scalar, so that sums over ranks and
    micro-batches add up. A token is clipped when A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low.
    """
    _check_bounds(eps_low, eps_high)
    delta, _ = log_ratio(logp.detach(), old_logp.detach(), mask)
    ratio = bounded_exp(delta)
    advantage_BT = _per_token(advantages, delta)
    is_clipped = ((advantage_BT > 0) & (ratio > 1 + eps_high)) | ((advantage_BT < 0) & (ratio < 1 - eps_low))
    return (is_clipped & (mask != 0)).double().sum()


def _check_bounds(eps_low: float, eps_high: float) -> None:
    if not 0 <= eps_low <= 1 or not eps_high >= 0:
        raise ValueError(f"eps_low={eps_low} must be in [0, 1] and eps_high={eps_high} >= 0")


def _per_token(advantages: torch.Tensor, like_BT: torch.Tensor) -> torch.Tensor:
    advantages = at_least_float32(advantages.detach()).to(like_BT.dtype)
    if advantages.shape == like_BT.shape[:1]:
        return advantages[:, None].expand_as(like_BT)
    if advantages.shape == like_BT.shape:
        return advantages
    raise ValueError(f"advantages must be [B] or [B, T] = {list(like_BT.shape)}, got {list(advantages.shape)}")
