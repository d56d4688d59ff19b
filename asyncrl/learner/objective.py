"""The loss of one micro-batch: surrogate x correction x masks, aggregated by global counts.

Tensors and plain settings in, tensors out; the pieces live in asyncrl.algos.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.algos.aggregate import aggregate
from asyncrl.algos.corrections import tis_weights
from asyncrl.algos.surrogates import clip_fraction, clip_surrogate
from asyncrl.sections.training import AlgorithmSection


class Totals(NamedTuple):
    """Global normalisers of one update: loss tokens, responses, and the constant of `constant`."""

    tokens: float
    sequences: float
    constant: float


@dataclass(slots=True)
class LossSums:
    """Sums over a rank's tokens for logging: the loss (already normalised) and the clipped tokens.

    Rows without advantage contribute to neither, so it does not matter whether they were forwarded.
    """

    loss: float = 0.0
    clipped: float = 0.0

    def vector(self) -> list[float]:
        """In a fixed order, for the reduction over ranks."""
        return [self.loss, self.clipped]


def batch_loss(
    logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    a: AlgorithmSection,
    totals: Totals,
    sums: LossSums,
) -> Tensor:
    """Scalar loss of one micro-batch (its share of the batch loss).

    logp, old_logp, rollout_logp [B, S], advantages [B], mask bool [B, S] of the kept tokens.
    With ratio=behaviour the denominator is mu; where mu is missing (NaN) the ratio is 1.
    """
    if a.ratio == "behaviour":
        old = torch.where(torch.isnan(rollout_logp), logp.detach().to(rollout_logp.dtype), rollout_logp)
    else:
        old = old_logp
    loss = clip_surrogate(logp, old, advantages, a.eps_low, a.eps_high, dual_clip=a.dual_clip, mask=mask)
    if a.correction.kind == "tis":
        weight = tis_weights(old_logp, rollout_logp, mask, cap=a.correction.cap, level=a.correction.level)
        loss = loss * weight
    total = aggregate(loss, mask, a.aggregation, totals.tokens, totals.sequences, totals.constant)
    sums.loss += float(total.detach())
    sums.clipped += float(clip_fraction(logp.detach(), old, advantages, mask, a.eps_low, a.eps_high))
    return total
