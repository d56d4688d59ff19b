"""Advantages from the rewards of a batch, one file each. None knows of tokens, models or why a response was dropped.

What holds for every kind is said here once: a group whose rewards do not differ teaches nothing, so that its advantages
are exactly 0, and so are those of responses that do not count. A method gets the groups (groups.py) and gives a number
per response.

Axes: B responses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.algos.advantages.groups import TOLERANCE, GroupIds, groups_of
from asyncrl.algos.registry import ADVANTAGES
from asyncrl.algos.seam import call

__all__ = ["group_advantages", "zero_variance"]


def group_advantages(
    rewards: torch.Tensor | Sequence[float],
    group_ids: GroupIds,
    kind: str = "grpo",
    keep: torch.Tensor | None = None,
    eps: float = 1e-6,
    settings: object = None,
) -> torch.Tensor:
    """Advantage of each response against the others of its group.

    rewards: [B]. group_ids: [B], integers or strings. kind: a name of ADVANTAGES (asyncrl.algos.registry). keep: bool
    [B] or None; with it (baseline: retained) all statistics come from the kept responses, the others get 0, and a lone
    survivor gets 0. eps: what is added to a standard deviation. settings: the config's `algorithm` section, where the
    kind has knobs. Returns [B], float64 for float64 rewards, else float32.
    Raises ValueError for unequal lengths, an unknown kind, and a reward that is NaN or inf.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(ADVANTAGES)}")
    groups = groups_of(rewards, group_ids, keep)
    found_B: torch.Tensor = call(ADVANTAGES[kind], {"groups": groups, "eps": eps}, settings)
    if found_B.shape != groups.rewards.shape:
        raise ValueError(f"kind={kind!r} gave {list(found_B.shape)} for rewards [B] = {list(groups.rewards.shape)}")
    advantage_B = torch.where(groups.live, found_B, 0.0)
    is_double = isinstance(rewards, torch.Tensor) and rewards.dtype == torch.float64
    return advantage_B if is_double else advantage_B.float()


def zero_variance(rewards: torch.Tensor | Sequence[float], group_ids: GroupIds, tol: float = TOLERANCE) -> torch.Tensor:
    """Which responses belong to a group whose rewards do not differ.

    rewards, group_ids: [B]. tol: range that counts as equal, times max(1, largest |reward| of the group).
    Returns bool [B]; a group of one response is such a group. Errors as in `group_advantages`.
    """
    return groups_of(rewards, group_ids).equal(tol)
