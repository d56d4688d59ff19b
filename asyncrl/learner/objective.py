"""The loss of one micro-batch: surrogate x correction x masks, aggregated by global counts, and the KL term.

Tensors and plain settings in, tensors out; the pieces live in asyncrl.algos and are called through its seam.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.algos.aggregate import aggregate
from asyncrl.algos.kl import kl_loss
from asyncrl.algos.registry import CORRECTIONS, SURROGATES
from asyncrl.algos.seam import call
from asyncrl.algos.tokens import TokenLoss
from asyncrl.sections.algorithm import AlgorithmSection


class Totals(NamedTuple):
    """Global normalisers of one update: loss tokens, responses, and the constant of `constant`."""

    tokens: float
    sequences: float
    constant: float


@dataclass(slots=True)
class LossSums:
    """Sums over a rank's tokens for logging: the loss (already normalised), the clipped tokens, and the part of the
    loss that is the KL term.

    Rows that cannot train contribute to none, so it does not matter whether they were forwarded: a row of advantage 0
    has loss 0 and nothing clipped, and with a KL term in the loss it can train.
    """

    loss: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0

    def vector(self) -> list[float]:
        """In a fixed order, for the reduction over ranks."""
        return [self.loss, self.clipped, self.kl]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a loss is made of, at the predicting positions, [B, S] but advantages [B].

    logp: pi, with a gradient. old_logp: pi_old. rollout_logp: mu, NaN where missing. mask: bool, the kept tokens.
    router_shift: how far the router moved since the start of the take, None where nothing measures it.
    ref_logp: the reference policy, None without one.
    """

    logp: Tensor
    old_logp: Tensor
    rollout_logp: Tensor
    advantages: Tensor
    mask: Tensor
    router_shift: Tensor | None = None
    ref_logp: Tensor | None = None


def correction_weights(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, router_shift: Tensor | None, a: AlgorithmSection
) -> Tensor:
    """Weights [B, S] of algorithm.correction, without a gradient; arguments as in `Tokens`."""
    shift = torch.zeros_like(old_logp) if router_shift is None else router_shift
    inputs: Mapping[str, Tensor] = {"logp": old_logp, "rollout_logp": rollout_logp, "mask": mask, "router_shift": shift}
    weights: Tensor = call(CORRECTIONS[a.correction.kind], inputs, a.correction)
    if weights.shape != old_logp.shape:
        raise ValueError(
            f"algorithm.correction.kind={a.correction.kind} gave weights {list(weights.shape)} for tokens "
            f"{list(old_logp.shape)}"
        )
    return weights


def batch_loss(x: Tokens, a: AlgorithmSection, totals: Totals, sums: LossSums) -> Tensor:
    """Scalar loss of one micro-batch (its share of the batch loss).

    With ratio=behaviour the denominator is mu; where mu is missing (NaN) the ratio is 1. A correction that rescales
    the ratio acts on its denominator, any other on the loss. The KL term has neither advantage, clip nor correction;
    its own importance ratio is pi / mu, whatever algorithm.ratio is.
    """
    old = x.old_logp
    if a.ratio == "behaviour":
        old = torch.where(torch.isnan(x.rollout_logp), x.logp.detach().to(x.rollout_logp.dtype), x.rollout_logp)
    weight = correction_weights(x.old_logp, x.rollout_logp, x.mask, x.router_shift, a)
    rescales = CORRECTIONS[a.correction.kind].rescales
    if rescales:
        # A factor that is none must be seen, and not be read as a log-prob that is missing.
        old = old - torch.where(x.mask != 0, weight, 1.0).log().nan_to_num(nan=torch.inf)
    inputs = {"logp": x.logp, "old_logp": old, "advantages": x.advantages, "mask": x.mask}
    result: TokenLoss = call(SURROGATES[a.surrogate], inputs, a)
    loss = result.loss if rescales else result.loss * weight
    if a.kl_in_loss:
        kl = _kl_term(x, a) * a.kl.coef
        sums.kl += float(_share(kl.detach(), x.mask, a, totals))
        loss = loss + kl
    total = _share(loss, x.mask, a, totals)
    sums.loss += float(total.detach())
    sums.clipped += float(result.clipped.double().sum())
    return total


def _share(loss_BS: Tensor, mask: Tensor, a: AlgorithmSection, totals: Totals) -> Tensor:
    return aggregate(loss_BS, mask, a.aggregation, totals.tokens, totals.sequences, totals.constant, a)


def _kl_term(x: Tokens, a: AlgorithmSection) -> Tensor:
    if x.ref_logp is None:
        raise ValueError("algorithm.kl.coef > 0 needs log-probs of the reference policy")
    sampled = x.rollout_logp if a.kl.estimator == "unbiased" else None
    return kl_loss(x.logp, x.ref_logp, x.mask, a.kl.estimator, sampled)
