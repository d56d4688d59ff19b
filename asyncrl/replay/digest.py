"""What the queue remembers of a group, and whether a group may enter at all.

The payload stays as received frames; ages, lengths and rewards are read once, here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from asyncrl.types import Group, ModelInfo, Trajectory, Version

ZERO_VARIANCE = 1e-6
"""Rewards that differ by no more than this are equal (the learner uses the same tolerance)."""


class ResponseDigest(NamedTuple):
    """One response: tokens, reward, updates of the versions of its loss tokens (ascending)."""

    length: int
    reward: float
    updates: tuple[int, ...]


class GroupDigest(NamedTuple):
    """One group. oldest and newest are over its loss tokens; tokens count input and output."""

    attempt: int
    generator_id: str
    responses: tuple[ResponseDigest, ...]
    versions: tuple[Version, ...]
    tokens: int

    @property
    def oldest(self) -> Version:
        """Lowest version of a loss token."""
        return self.versions[0]

    @property
    def zero_variance(self) -> bool:
        """True when no response was better than another."""
        rewards = [r.reward for r in self.responses]
        return max(rewards) - min(rewards) <= ZERO_VARIANCE

    def last_update(self, stale: str, max_lag: int) -> int:
        """Last update that may use this group: some loss token is young enough (mask), or all are (evict)."""
        updates = [v.update for v in self.versions]
        return (max(updates) if stale == "mask" else min(updates)) + max_lag


def digest(group: Group) -> GroupDigest:
    """Read a group once. versions is empty when no response has a loss token."""
    versions: set[Version] = set()
    responses = []
    for t in group.trajectories:
        used = {s.version for s in t.segments if t.loss_mask[s.start : s.end].any()}
        versions |= used
        responses.append(ResponseDigest(t.num_tokens, t.reward, tuple(sorted({v.update for v in used}))))
    tokens = group.num_tokens + len(group.prompt.token_ids) * len(group.trajectories)
    return GroupDigest(group.attempt, group.generator_id, tuple(responses), tuple(sorted(versions)), tokens)


def problem(group: Group, group_size: int, model: ModelInfo | None) -> tuple[str, str] | None:
    """Why a group is refused as (counter, sentence), or None. Versions are judged by the queue."""
    if len(group.trajectories) != group_size:
        return "group_size", f"{len(group.trajectories)} responses, algorithm.group_size is {group_size}"
    if len({t.trajectory_id for t in group.trajectories}) != group_size:
        return "duplicate_trajectory", "two responses have the same trajectory id"
    if not (math.isfinite(group.temperature) and group.temperature > 0):
        return "bad_temperature", f"sampling temperature {group.temperature}"
    for t in group.trajectories:
        found = _problem(t, len(group.prompt.token_ids), model)
        if found is not None:
            return found[0], f"{t.trajectory_id}: {found[1]}"
    return None


def _problem(t: Trajectory, num_prompt: int, model: ModelInfo | None) -> tuple[str, str] | None:
    if not math.isfinite(t.reward):
        return "bad_reward", f"reward {t.reward}"
    # NaN means that the engine gave none; a sampled token has neither probability 0 nor above 1.
    if np.isinf(t.logprobs).any() or (t.logprobs > 1e-3).any():
        return "bad_logprob", "a sampled token has log-prob -inf or above 0"
    if model is None:
        return None
    if t.route_counts is not None and t.route_counts.shape[1:] != (len(model.layers), model.num_experts):
        return (
            "bad_routes",
            f"route counts {list(t.route_counts.shape)}, expected [{len(t.segments)}, {len(model.layers)}, "
            f"{model.num_experts}]",
        )
    want = (max(0, num_prompt + t.num_tokens - 1), len(model.layers), model.top_k)
    if t.routes is not None and (t.routes.shape != want or t.routes.dtype != model.route_dtype):
        return "bad_routes", f"routes {t.routes.dtype}{list(t.routes.shape)}, expected {model.route_dtype}{list(want)}"
    return None
