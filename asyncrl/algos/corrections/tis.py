"""Truncated importance sampling.

Axes: B responses, T positions.
"""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.algos.ratio import bounded_exp, log_ratio


@torch.no_grad()
def tis_weights(
    logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
) -> torch.Tensor:
    """Truncated importance sampling: min(pi_old / mu, cap), detached.

    logp (pi_old), rollout_logp (mu): [B, T] at the same temperature; NaN in rollout_logp = missing, weight
    exactly 1 (if cap >= 1). mask: [B, T]; the weight is 0 where it is 0, whatever lies there. level: "token", or
    "sequence" for one weight per response, min(prod_t pi_old / mu, cap). Returns [B, T], float32 or float64,
    without gradient; exponents are clamped to +-20. A counted logp that is NaN or a rollout_logp that is
    infinite gives NaN: such a token must not train.
    Raises ValueError for wrong shapes, cap <= 0 or an unknown level.
    TIS ("Your efficient RL framework secretly brings you off-policy RL training", 2025).
    """
    if not cap > 0:
        raise ValueError(f"cap={cap} must be positive")
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r} must be 'token' or 'sequence'")
    delta, broken = log_ratio(logp, rollout_logp, mask)
    if level == "sequence":
        delta = delta.sum(dim=1, keepdim=True).expand_as(delta)
        broken = broken.any(dim=1, keepdim=True).expand_as(delta)
    weight = bounded_exp(delta).clamp(max=cap)
    return torch.where(mask != 0, torch.where(broken, float("nan"), weight), 0.0)
