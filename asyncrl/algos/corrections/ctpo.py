"""Cumulative importance ratios, bounded wider the later a token stands.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.ratio import bounded_exp, log_ratio


@torch.no_grad()
def ctpo_weights(
    logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
    spread_low: float = 0.025,
    spread_high: float = 0.05,
) -> torch.Tensor:
    """exp(clamp(sum over s <= t of log pi_old / mu, -spread_low sqrt(t), spread_high sqrt(t))) for counted token t.

    t = 1, 2, ... counts counted tokens only, so that neither pads nor observations widen the range. logp (pi_old),
    rollout_logp (mu): [B, T] at the same temperature; NaN in rollout_logp = missing: it adds nothing to the sum, its
    weight is that of the tokens before it. mask: [B, T]; the weight is 0 where it is 0, whatever lies there. Returns
    [B, T], float32 or float64, without gradient; exponents are clamped to +-20. A counted logp that is not finite or a
    rollout_logp that is infinite makes its token and all later ones of the response NaN. Raises ValueError for wrong
    shapes or a spread <= 0.
    CTPO (arXiv 2605.07331) has the product of pi / pi_old inside its clipped surrogate, where it carries the gradient;
    here it is a constant weight outside of any surrogate, of pi_old against mu. The spreads are those of its code.
    """
    if not spread_low > 0 or not spread_high > 0:
        raise ValueError(f"spread_low={spread_low} and spread_high={spread_high} must be positive")
    delta, broken = log_ratio(logp, rollout_logp, mask)
    # float64: sums of tens of thousands of terms, of which a small difference matters.
    total = delta.cumsum(dim=1, dtype=torch.float64)
    root = (mask != 0).cumsum(dim=1).double().sqrt()
    weight = bounded_exp(total.clamp(-spread_low * root, spread_high * root)).to(delta.dtype)
    weight = torch.where(broken.cumsum(dim=1) > 0, float("nan"), weight)
    return torch.where(mask != 0, weight, 0.0)
