"""Guarded log-ratios of two policies, shared by surrogates, corrections and mismatch.

Entries are replaced and exponents clamped BEFORE exp: a `where` after exp still multiplies inf or NaN by
0 in the backward pass. Everything is computed in float32 at least. Knows nothing of what it divides.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Bound on exponents: exp(20) = 4.9e8, and its square is still far inside float32."""


def check_shapes(logp: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Raise ValueError unless all are [B, T] of one shape."""
    shapes = [t.shape for t in (logp, reference, mask) if t is not None]
    if logp.dim() != 2 or len(set(shapes)) != 1:
        raise ValueError(f"log-probs and mask must be [B, T] of one shape, got {[list(s) for s in shapes]}")


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """The tensor itself in float32 or float64, any other type widened to float32."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def log_ratio(
    logp: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """log(pi / reference) with every entry that has none replaced by 0.

    logp, reference: [B, T]; NaN in reference = missing, read as equal to logp (ratio 1, gradient as on
    policy). mask: [B, T] or None; what lies under it is never read. Returns (log-ratio, bool: counted but
    not finite), [B, T] each. Replaced entries get gradient 0.
    """
    check_shapes(logp, reference, mask)
    logp = at_least_float32(logp)
    reference = at_least_float32(reference)
    reference = torch.where(torch.isnan(reference), logp.detach().to(reference.dtype), reference)
    raw = logp - reference
    counted = torch.ones_like(raw, dtype=torch.bool) if mask is None else mask != 0
    usable = counted & torch.isfinite(raw.detach())
    return torch.where(usable, raw, 0.0), counted & ~usable


def bounded_exp(exponent: torch.Tensor) -> torch.Tensor:
    """exp with the exponent clamped to +-MAX_LOG_RATIO; gradient 0 beyond."""
    return exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
