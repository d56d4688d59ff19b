"""Mismatch sums per response, so that any split of a batch is a sum over rows of the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algos.mismatch import finalise, mismatch_sums
from asyncrl.learner.batch import Row
from asyncrl.learner.objective import correction_weights
from asyncrl.learner.score import Scores
from asyncrl.learner.step import RowValues
from asyncrl.learner.table import Table
from asyncrl.sections.algorithm import AlgorithmSection

TAUS = (1.2, 2.0, 5.0, 10.0)
"""Bounds of F(tau): the share of tokens whose ratio or inverse ratio exceeds tau."""

_SUMS = ("count", "missing", "k1", "k3", "abs", "w", "w2", *(f"f_{t}" for t in TAUS))


def mismatch_columns(rows: Sequence[Row], scores: Scores) -> dict[str, NDArray[np.float64]]:
    """Columns [n] of a rank: the sums of every response, its entropy sum and mean |log-ratio|."""
    columns = {name: np.zeros(len(rows)) for name in (*_SUMS, "entropy_sum")}
    for part in scores.parts:
        index = list(part.batch.index)
        if not index:
            continue
        b = part.batch
        sums = mismatch_sums(part.logp.detach(), b.rollout_logp, b.predict_mask, TAUS, per_response=True)
        for name in _SUMS:
            columns[name][index] = sums[name].cpu().numpy()
        entropy = torch.where(b.predict_mask, part.entropy.double(), 0.0).sum(dim=1)
        columns["entropy_sum"][index] = entropy.cpu().numpy()
    columns["abs_log_ratio"] = columns["abs"] / np.maximum(columns["count"], 1)
    return columns


def weight_columns(
    rows: Sequence[Row], scores: Scores, values: RowValues, a: AlgorithmSection
) -> dict[str, NDArray[np.float64]]:
    """Columns [n]: weight, the sum of the correction weights of every response's tokens, and unweighted, how many of
    them weigh 0; NaN when there is no correction."""
    weight, unweighted = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    if a.correction.kind == "none":
        return {"weight": weight, "unweighted": unweighted}
    for part in scores.parts:
        index, b = list(part.batch.index), part.batch
        if not index:
            continue
        old = part.padded(values.old_logp)
        weights = correction_weights(old, b.rollout_logp, b.predict_mask, part.router_shift, a)
        weight[index] = weights.double().sum(dim=1).cpu().numpy()
        unweighted[index] = ((weights == 0) & b.predict_mask).double().sum(dim=1).cpu().numpy()
    return {"weight": weight, "unweighted": unweighted}


def mismatch_of(table: Table, rows: NDArray[np.bool_]) -> dict[str, float]:
    """kl_k1, kl_k3, f_<tau> and ess over the tokens of some rows; NaN when there is none."""
    metrics = finalise({name: float(table[name][rows].sum()) for name in _SUMS})
    return {name.removesuffix(".0"): value for name, value in metrics.items()}
