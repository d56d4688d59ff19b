"""Advantages from the rewards of a batch. Knows nothing of tokens, models or why a response was dropped.

A group whose rewards do not differ teaches nothing: its advantages are exactly 0 under every kind. Rewards
count as equal when their range is at most `tol` times max(1, largest |reward|); a comparison of a float
standard deviation with 0 would turn rounding into advantages above 1.

Axes: B responses, G groups. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Kind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"]
GroupIds = torch.Tensor | Sequence[str] | Sequence[int]

TOLERANCE = 1e-6
"""Range of rewards that counts as equal."""


def group_advantages(
    rewards: torch.Tensor | Sequence[float],
    group_ids: GroupIds,
    kind: Kind = "grpo",
    keep: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Advantage of each response against the others of its group.

    rewards: [B]. group_ids: [B], integers or strings. keep: bool [B] or None; with it (baseline: retained)
    all statistics come from the kept responses, the others get 0, and a lone survivor gets 0. Returns [B],
    float64 for float64 rewards, else float32.

    grpo          (r - mean) / (std + eps), std over the group with n - 1 (arXiv 2402.03300; TRL, verl)
    dr_grpo       r - mean (arXiv 2503.20783)
    rloo          r - mean of the others = n / (n - 1) (r - mean) (arXiv 2402.14740)
    reinforce_pp  (r - mean) / (std of r - mean over the whole batch, with N - 1, + eps): REINFORCE++ with
                  group baseline (arXiv 2501.03262); needs the whole batch, over all ranks

    Raises ValueError for unequal lengths, an unknown kind, and a reward that is NaN or inf.
    """
    if kind not in ("grpo", "dr_grpo", "rloo", "reinforce_pp"):
        raise ValueError(f"kind={kind!r} must be one of grpo, dr_grpo, rloo, reinforce_pp")
    reward_B, group_B, num_groups = _inputs(rewards, group_ids)
    kept_B = torch.ones_like(reward_B, dtype=torch.bool)
    if keep is not None:
        if keep.shape != reward_B.shape:
            raise ValueError(f"keep must be [B] = {list(reward_B.shape)}, got {list(keep.shape)}")
        kept_B = keep.to(device=reward_B.device, dtype=torch.bool)
    live_B = kept_B & ~_equal(reward_B, group_B, num_groups, kept_B, TOLERANCE)
    weight_B = kept_B.double()
    size_G = _sum(weight_B, group_B, num_groups)
    mean_G = _sum(weight_B * reward_B, group_B, num_groups) / size_G.clamp(min=1)
    centred_B = torch.where(live_B, reward_B - mean_G[group_B], 0.0)
    scale_B = torch.ones_like(centred_B)
    if kind == "grpo":
        variance_G = _sum(centred_B**2, group_B, num_groups) / (size_G - 1).clamp(min=1)
        scale_B = 1 / (variance_G.sqrt() + eps)[group_B]
    elif kind == "rloo":
        scale_B = (size_G / (size_G - 1).clamp(min=1))[group_B]
    elif kind == "reinforce_pp":
        variance = (centred_B**2).sum() / (weight_B.sum() - 1).clamp(min=1)
        scale_B = scale_B / (variance.sqrt() + eps)
    advantage_B = torch.where(live_B, centred_B * scale_B, 0.0)
    is_double = isinstance(rewards, torch.Tensor) and rewards.dtype == torch.float64
    return advantage_B if is_double else advantage_B.float()


def zero_variance(rewards: torch.Tensor | Sequence[float], group_ids: GroupIds, tol: float = TOLERANCE) -> torch.Tensor:
    """Which responses belong to a group whose rewards do not differ.

    rewards, group_ids: [B]. tol: range that counts as equal, times max(1, largest |reward| of the group).
    Returns bool [B]; a group of one response is such a group. Errors as in `group_advantages`.
    """
    reward_B, group_B, num_groups = _inputs(rewards, group_ids)
    return _equal(reward_B, group_B, num_groups, torch.ones_like(reward_B, dtype=torch.bool), tol)


def _inputs(rewards: torch.Tensor | Sequence[float], group_ids: GroupIds) -> tuple[torch.Tensor, torch.Tensor, int]:
    """float64 rewards [B], group number [B], number of groups."""
    reward_B = torch.as_tensor(rewards, dtype=torch.float64).detach()
    if reward_B.dim() != 1 or len(group_ids) != len(reward_B):
        raise ValueError(f"rewards and group_ids must be [B], got {list(reward_B.shape)} and {len(group_ids)} ids")
    bad = (~torch.isfinite(reward_B)).nonzero()
    if len(bad):
        raise ValueError(f"reward of response {int(bad[0])} is {float(reward_B[bad[0]])}")
    names = group_ids.tolist() if isinstance(group_ids, torch.Tensor) else list(group_ids)
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    group_B = torch.tensor([number[name] for name in names], dtype=torch.int64, device=reward_B.device)
    return reward_B, group_B, len(number)


def _sum(values_B: torch.Tensor, group_B: torch.Tensor, num_groups: int) -> torch.Tensor:
    return values_B.new_zeros(num_groups).scatter_add(0, group_B, values_B)


def _equal(
    reward_B: torch.Tensor, group_B: torch.Tensor, num_groups: int, kept_B: torch.Tensor, tol: float
) -> torch.Tensor:
    """bool [B]: the kept rewards of the response's group span at most the tolerance."""
    low_G = reward_B.new_full((num_groups,), float("inf"))
    low_G = low_G.scatter_reduce(0, group_B[kept_B], reward_B[kept_B], "amin")
    high_G = reward_B.new_full((num_groups,), float("-inf"))
    high_G = high_G.scatter_reduce(0, group_B[kept_B], reward_B[kept_B], "amax")
    largest_G = torch.maximum(low_G.abs(), high_G.abs()).clamp(min=1)
    return (high_G - low_G <= tol * largest_G)[group_B]
