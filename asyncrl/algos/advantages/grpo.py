"""Rewards standardised within the group."""

from __future__ import annotations

import torch

from asyncrl.algos.advantages.groups import Groups


def grpo(groups: Groups, eps: float) -> torch.Tensor:
    """(r - mean) / (std + eps), mean and std over the kept responses of the group, std with n - 1.

    Returns float64 [B]. GRPO (arXiv 2402.03300), whose formula leaves the divisor of the variance open.
    """
    variance_G = groups.sum(groups.centred**2) / (groups.sizes - 1).clamp(min=1)
    return groups.centred * groups.spread(1 / (variance_G.sqrt() + eps))
