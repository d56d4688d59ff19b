"""From token losses to one number, one file each. None knows of ranks: the caller passes the global totals.

What holds for every kind is said here once: shapes are checked, and what lies under the mask gives no value and no
gradient. A method gets sums and counts per response.

Axes: B responses, T positions.
"""

from __future__ import annotations

import torch

from asyncrl.algos.registry import AGGREGATIONS
from asyncrl.algos.seam import call

__all__ = ["aggregate"]


def aggregate(
    loss: torch.Tensor,
    mask: torch.Tensor,
    kind: str,
    total_tokens: float,
    total_sequences: float,
    constant: float,
    settings: object = None,
) -> torch.Tensor:
    """Part of the batch loss that these responses contribute.

    loss: [B, T]. mask: [B, T], non-zero where a token counts; what lies elsewhere, NaN included, gives no value
    and no gradient. kind: a name of AGGREGATIONS (asyncrl.algos.registry). total_tokens, total_sequences: of the whole
    batch, over all ranks and micro-batches, so that the parts add up to the batch loss for any split. constant: the
    divisor of `constant`. settings: the config's `algorithm` section, where the kind has knobs. Returns a scalar; a
    divisor of 0 (nothing to train on) gives the plain sum, which then is 0.
    Raises ValueError for wrong shapes, an unknown kind or a negative divisor.
    """
    if kind not in AGGREGATIONS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(AGGREGATIONS)}")
    if loss.dim() != 2 or loss.shape != mask.shape:
        raise ValueError(f"loss and mask must be [B, T] of one shape, got {list(loss.shape)} and {list(mask.shape)}")
    if min(total_tokens, total_sequences, constant) < 0:
        raise ValueError(f"{total_tokens=}, {total_sequences=} and {constant=} must not be negative")
    counted = mask != 0
    inputs = {
        "sum_B": torch.where(counted, loss, 0.0).sum(dim=1),
        "count_B": counted.sum(dim=1),
        "total_tokens": total_tokens,
        "total_sequences": total_sequences,
        "constant": constant,
    }
    part: torch.Tensor = call(AGGREGATIONS[kind], inputs, settings)
    return part
