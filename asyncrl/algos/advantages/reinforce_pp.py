"""Rewards less the mean of their group, standardised over the batch."""

from __future__ import annotations

import torch

from asyncrl.algos.advantages.groups import Groups


def reinforce_pp(groups: Groups, eps: float) -> torch.Tensor:
    """(r - mean of the group) / (std of r - mean over the whole batch + eps), std over the kept responses with N - 1.

    groups: the whole batch, over all ranks. Returns float64 [B]. REINFORCE++ with group baseline (arXiv 2501.03262).
    """
    variance = (groups.centred**2).sum() / (groups.kept.double().sum() - 1).clamp(min=1)
    return groups.centred * (1 / (variance.sqrt() + eps))
