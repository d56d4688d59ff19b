"""No correction: every token weighs 1.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.ratio import at_least_float32, check_shapes


@torch.no_grad()
def none(logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """1 where the mask is not 0, 0 elsewhere. logp, mask: [B, T]. Returns [B, T], float32 or float64. Raises
    ValueError for wrong shapes."""
    check_shapes(logp, mask)
    return (mask != 0).to(at_least_float32(logp).dtype)
