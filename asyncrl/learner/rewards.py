"""Rewards of a batch to advantages: which rows need no gradient, and what a KL penalty takes from a reward.

Columns of the table in, tensors and columns out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algos.advantages import group_advantages, zero_variance
from asyncrl.algos.kl import kl_values
from asyncrl.learner.batch import Row
from asyncrl.learner.score import Scores
from asyncrl.learner.step import RowValues
from asyncrl.learner.table import Table
from asyncrl.sections.algorithm import AlgorithmSection


def silent_rows(table: Table, a: AlgorithmSection) -> Tensor:
    """bool [n]: rows that no term of the loss can give a gradient, known before anything is scored.

    A row without a token left (withheld, too old, refused) never trains. One of a group of equal rewards does not,
    unless a KL term pulls on it or its reward is not final yet.
    """
    empty = torch.from_numpy(table["tokens"] == 0)
    if a.kl_in_loss or a.kl_in_reward:
        return empty
    rewards = torch.from_numpy(table["reward"])
    base = group_advantages(rewards, table.group_index, kind=a.advantage, settings=a)
    return zero_variance(rewards, table.group_index) & (base == 0) | empty


def kl_columns(rows: Sequence[Row], scores: Scores, values: RowValues) -> dict[str, NDArray[np.float64]]:
    """Columns [n] of a rank, sums over the loss tokens of every response: ref_penalty, log pi_old - log ref, and ref_k1
    and ref_k3, estimates of KL(pi || ref) under the weights of this update. NaN without a reference policy, and where
    a log-prob of it is not finite."""
    columns = {name: np.full(len(rows), np.nan) for name in ("ref_penalty", "ref_k1", "ref_k3")}
    for part in scores.parts:
        index, ref, mask = list(part.batch.index), part.ref_logp, part.batch.predict_mask
        if ref is None or not index:
            continue
        logp, old = part.logp.detach(), part.padded(values.old_logp)
        # A missing log-prob reads as no divergence; of a reference there is none that may be missing.
        broken = (mask & ~torch.isfinite(ref)).any(dim=1)
        found = {
            "ref_penalty": kl_values(old, ref, mask, "k1"),
            "ref_k1": kl_values(logp, ref, mask, "k1"),
            "ref_k3": kl_values(logp, ref, mask, "k3"),
        }
        for name, value in found.items():
            columns[name][index] = torch.where(broken, torch.nan, value.double().sum(dim=1)).cpu().numpy()
    return columns


def shaped_rewards(table: Table, a: AlgorithmSection) -> Tensor:
    """Rewards float64 [n] that advantages come from: the task's, less coef times the KL of the response under
    algorithm.kl.where=reward (k1 in the reward has the gradient of KL(pi || ref), arXiv 2510.01555)."""
    rewards = torch.from_numpy(table["reward"])
    return rewards - a.kl.coef * _penalties(table) if a.kl_in_reward else rewards


def _penalties(table: Table) -> Tensor:
    """KL of each response [n]. One of which no token is left to train has none, and gets the mean of its group: charged
    nothing, it would raise the baseline of those that train."""
    penalty, group = torch.from_numpy(table["ref_penalty"]), table.group_index
    charged = torch.from_numpy(table["tokens"] > 0)
    zeros = penalty.new_zeros(len(table.groups))
    total = zeros.scatter_add(0, group[charged], penalty[charged])
    count = zeros.scatter_add(0, group[charged], torch.ones_like(penalty[charged]))
    return torch.where(charged, penalty, (total / count.clamp(min=1))[group])
