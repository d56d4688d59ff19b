"""Log-probs and the next token of every row at once. Knows nothing of requests, caches or models.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_probs(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """log_softmax(logits / T) of the full distribution, in at least fp32: [B, V]."""
    logits_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    return torch.log_softmax(logits_BV / temperature_B.to(logits_BV.dtype)[:, None], dim=-1)


def draw(logp_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One sample per row, int64 [B], by inverting the cumulative distribution at uniform_B (float64 in [0, 1)).

    float64, because a float32 sum over a large vocabulary would lose its rare tokens. A token of
    probability 0 is never drawn.
    """
    cumulative_BV = logp_BV.double().exp().cumsum(dim=-1)
    target_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0].clamp_(max=logp_BV.shape[1] - 1)
