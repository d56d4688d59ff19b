"""Rewards against the mean of the other responses of their group."""

from __future__ import annotations

import torch

from asyncrl.algos.advantages.groups import Groups


def rloo(groups: Groups) -> torch.Tensor:
    """r - mean of the others = n / (n - 1) (r - mean), n the kept responses of the group.

    Returns float64 [B]. RLOO (arXiv 2402.14740): the baseline of a response does not depend on it, so that the gradient
    is unbiased.
    """
    return groups.centred * groups.spread(groups.sizes / (groups.sizes - 1).clamp(min=1))
