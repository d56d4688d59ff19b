"""Rewards sorted into groups: what every advantage method starts from. Knows no method.

Rewards of a group count as equal when their range is at most `tol` times max(1, largest |reward|); a comparison of a
float standard deviation with 0 would turn rounding into advantages above 1.

Axes: B responses, G groups. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

GroupIds = torch.Tensor | Sequence[str] | Sequence[int]

TOLERANCE = 1e-6
"""Range of rewards that counts as equal."""


@dataclass(frozen=True)
class Groups:
    """The responses of a batch by group.

    rewards: float64 [B]. kept: bool [B], the responses that statistics come from. number: int64 [B], the group of each
    response, in 0 .. num_groups - 1.
    """

    rewards: torch.Tensor
    kept: torch.Tensor
    number: torch.Tensor
    num_groups: int

    def sum(self, values_B: torch.Tensor) -> torch.Tensor:
        """Sum of values [B] over each group, [G]. It adds what it is given: 0 is for responses that do not count."""
        return values_B.new_zeros(self.num_groups).scatter_add(0, self.number, values_B)

    def spread(self, values_G: torch.Tensor) -> torch.Tensor:
        """The value of its group for each response, [B]."""
        return values_G[self.number]

    @cached_property
    def sizes(self) -> torch.Tensor:
        """Kept responses of each group, float64 [G]."""
        return self.sum(self.kept.double())

    @cached_property
    def live(self) -> torch.Tensor:
        """bool [B]: kept, and the kept rewards of its group differ. Elsewhere an advantage is 0 in any case."""
        return self.kept & ~self.equal(TOLERANCE)

    @cached_property
    def centred(self) -> torch.Tensor:
        """Reward less the mean of the kept rewards of its group, float64 [B]; 0 where not live."""
        mean_G = self.sum(self.kept.double() * self.rewards) / self.sizes.clamp(min=1)
        return torch.where(self.live, self.rewards - self.spread(mean_G), 0.0)

    def equal(self, tol: float) -> torch.Tensor:
        """bool [B]: the kept rewards of the response's group span at most the tolerance."""
        number, rewards = self.number[self.kept], self.rewards[self.kept]
        low_G = self.rewards.new_full((self.num_groups,), float("inf"))
        low_G = low_G.scatter_reduce(0, number, rewards, "amin")
        high_G = self.rewards.new_full((self.num_groups,), float("-inf"))
        high_G = high_G.scatter_reduce(0, number, rewards, "amax")
        largest_G = torch.maximum(low_G.abs(), high_G.abs()).clamp(min=1)
        return self.spread(high_G - low_G <= tol * largest_G)


def groups_of(rewards: torch.Tensor | Sequence[float], group_ids: GroupIds, keep: torch.Tensor | None = None) -> Groups:
    """The groups of a batch. rewards: [B]. group_ids: [B], integers or strings. keep: bool [B], None for all.

    Raises ValueError for unequal lengths and a reward that is NaN or inf.
    """
    reward_B = torch.as_tensor(rewards, dtype=torch.float64).detach()
    if reward_B.dim() != 1 or len(group_ids) != len(reward_B):
        raise ValueError(f"rewards and group_ids must be [B], got {list(reward_B.shape)} and {len(group_ids)} ids")
    bad = (~torch.isfinite(reward_B)).nonzero()
    if len(bad):
        raise ValueError(f"reward of response {int(bad[0])} is {float(reward_B[bad[0]])}")
    if keep is not None and keep.shape != reward_B.shape:
        raise ValueError(f"keep must be [B] = {list(reward_B.shape)}, got {list(keep.shape)}")
    names = group_ids.tolist() if isinstance(group_ids, torch.Tensor) else list(group_ids)
    place = {name: i for i, name in enumerate(dict.fromkeys(names))}
    number_B = torch.tensor([place[name] for name in names], dtype=torch.int64, device=reward_B.device)
    everything = torch.ones_like(reward_B, dtype=torch.bool)
    kept_B = everything if keep is None else keep.to(device=reward_B.device, dtype=torch.bool)
    return Groups(reward_B, kept_B, number_B, len(place))
