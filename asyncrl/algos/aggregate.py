"""From token losses to one number. Knows nothing of ranks: the caller passes the global totals.

Axes: B responses, T positions.
"""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregate(
    loss: torch.Tensor,
    mask: torch.Tensor,
    kind: Aggregation,
    total_tokens: float,
    total_sequences: float,
    constant: float,
) -> torch.Tensor:
    """Part of the batch loss that these responses contribute.

    loss: [B, T]. mask: [B, T], non-zero where a token counts; what lies elsewhere, NaN included, gives no value
    and no gradient. total_tokens, total_sequences: of the whole batch, over all ranks and micro-batches,
    so that the parts add up to the batch loss for any split. Returns a scalar.

    token_mean     sum of all token losses / total_tokens
    sequence_mean  sum over responses of their mean token loss / total_sequences
    constant       sum of all token losses / constant; constant = responses of the batch times the longest
                   response allowed gives dr_grpo (arXiv 2503.20783)

    A divisor of 0 (nothing to train on) gives the plain sum, which then is 0. Raises ValueError for wrong
    shapes, an unknown kind or a negative divisor.
    """
    if loss.dim() != 2 or loss.shape != mask.shape:
        raise ValueError(f"loss and mask must be [B, T] of one shape, got {list(loss.shape)} and {list(mask.shape)}")
    if min(total_tokens, total_sequences, constant) < 0:
        raise ValueError(f"{total_tokens=}, {total_sequences=} and {constant=} must not be negative")
    counted = mask != 0
    sum_B = torch.where(counted, loss, 0.0).sum(dim=1)
    if kind == "token_mean":
        return _divide(sum_B.sum(), total_tokens)
    if kind == "sequence_mean":
        return _divide((sum_B / counted.sum(dim=1).clamp(min=1)).sum(), total_sequences)
    if kind == "constant":
        return _divide(sum_B.sum(), constant)
    raise ValueError(f"kind={kind!r} must be one of token_mean, sequence_mean, constant")


def _divide(total: torch.Tensor, count: float) -> torch.Tensor:
    # Nothing counted: the sum is 0 already, and must stay attached to the graph for the other ranks.
    return total / count if count > 0 else total
