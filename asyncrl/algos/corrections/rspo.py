"""Router-shift ratio: tokens whose routing moved since the start of the take get a smaller ratio.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.ratio import at_least_float32, bounded_exp


@torch.no_grad()
def rspo_weights(router_shift: torch.Tensor, mask: torch.Tensor, floor: float = 0.8) -> torch.Tensor:
    """max(exp(-router_shift), floor), the factor of the ratio pi / pi_old before it is clipped.

    router_shift: [B, T], mean over layers and the experts that the token used at the start of the take of
    |log router score now - log router score then|; 0 = the router did not move, factor exactly 1. mask: [B, T]; the
    factor is 0 where it is 0, whatever lies there. floor in (0, 1]; 1 switches it off. Returns [B, T], float32 or
    float64, without gradient. A counted shift that is not finite gives NaN: such a token must not train unseen. Raises
    ValueError for wrong shapes or floor outside (0, 1].
    Router-shift policy optimization (arXiv 2510.23027), which stops the gradient here too. The default is that of a
    public implementation of the paper.
    """
    if not 0 < floor <= 1:
        raise ValueError(f"floor={floor} must be in (0, 1]")
    if router_shift.dim() != 2 or router_shift.shape != mask.shape:
        shapes = f"{list(router_shift.shape)} and {list(mask.shape)}"
        raise ValueError(f"router_shift and mask must be [B, T] of one shape, got {shapes}")
    shift = at_least_float32(router_shift)
    usable = (mask != 0) & torch.isfinite(shift)
    weight = bounded_exp(-torch.where(usable, shift, 0.0)).clamp(floor, 1.0)
    return torch.where(mask != 0, torch.where(usable, weight, float("nan")), 0.0)
