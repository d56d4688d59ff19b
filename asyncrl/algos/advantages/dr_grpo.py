"""Rewards less the mean of their group, not divided by a spread."""

from __future__ import annotations

import torch

from asyncrl.algos.advantages.groups import Groups


def dr_grpo(groups: Groups) -> torch.Tensor:
    """r - mean, the mean over the kept responses of the group.

    Returns float64 [B]. Dr. GRPO (arXiv 2503.20783): dividing by the standard deviation weighs a question more the
    closer its answers are to all right or all wrong.
    """
    return groups.centred
