"""What the queue remembers of a group, and whether a group may enter at all.

The payload stays as received frames; ages, lengths and rewards are read once, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.arrays import Buffer
from asyncrl.types import ModelInfo, Version, impossible
from asyncrl.wire import GroupHead

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
        """Last update that may use this group: some loss token is young enough (mask), or all are (evict, wait)."""
        updates = [v.update for v in self.versions]
        return (max(updates) if stale == "mask" else min(updates)) + max_lag


def digest(head: GroupHead) -> GroupDigest:
    """Read a group once. versions is empty when no response has a loss token."""
    versions: set[tuple[int, int]] = set()
    used: set[tuple[int, int]] = set()
    updates: tuple[int, ...] = ()
    responses, tokens = [], len(head.prompt.token_ids) * len(head.trajectories)
    for t, buffer in zip(head.trajectories, head.loss_masks, strict=True):
        mask = buffer if type(buffer) is bytes else bytes(buffer)
        previous, used = used, {(e, u) for e, u, start, end in t.segments if mask.find(1, start, end) >= 0}
        if used != previous:  # most often the responses of a group have the same versions
            versions |= used
            updates = tuple(sorted({update for _, update in used}))
        responses.append(ResponseDigest(len(mask), t.reward, updates))
        tokens += len(mask)
    ordered = tuple(Version(*v) for v in sorted(versions))
    return GroupDigest(head.attempt, head.generator_id, tuple(responses), ordered, tokens)


def problem(head: GroupHead, fewest: int, most: int, model: ModelInfo | None) -> tuple[str, str] | None:
    """Why a group is refused as (counter, sentence), or None. Versions are judged by the queue.

    It must have `fewest` to `most` responses.
    """
    count = len(head.trajectories)
    if not fewest <= count <= most:
        return "group_size", f"{count} responses, algorithm.group_size is {most} and {fewest} are the fewest"
    if len({t.trajectory_id for t in head.trajectories}) != count:
        return "duplicate_trajectory", "two responses have the same trajectory id"
    if not _usual(head.logprobs):
        odd = next(i for i, part in enumerate(head.logprobs) if not _usual([part]))
        return "bad_logprob", f"{head.trajectories[odd].trajectory_id}: a sampled token has log-prob -inf or above 0"
    if model is None:
        return None
    if not _in_vocabulary(head.token_ids, model.vocab_size):
        odd = next(i for i, part in enumerate(head.token_ids) if not _in_vocabulary([part], model.vocab_size))
        name = head.trajectories[odd].trajectory_id
        return "bad_token", f"{name}: a token id is outside [0, {model.vocab_size})"
    return _bad_routes(head, model)


def _usual(parts: Sequence[Buffer]) -> bool:
    """A sampled token has neither probability 0 nor above 1; NaN means that the engine gave none."""
    return not impossible(np.frombuffer(b"".join(parts), np.float32))


def _in_vocabulary(parts: Sequence[Buffer], vocab_size: int) -> bool:
    """The learner could not look up an id beyond its vocabulary."""
    # A negative id is a huge unsigned one.
    ids = np.frombuffer(b"".join(parts), np.uint32)
    return not len(ids) or int(ids.max()) < vocab_size


def _bad_routes(head: GroupHead, model: ModelInfo) -> tuple[str, str] | None:
    """Counts or routes of another model. Their rows fit the tokens: the wire lets nothing else through."""
    layers, dtype = len(model.layers), model.route_dtype
    for t, buffer in zip(head.trajectories, head.routes, strict=True):
        counts, routes = t.route_counts, t.routes
        if counts is not None and counts.shape[1:] != (layers, model.num_experts):
            want = f"[{len(t.segments)}, {layers}, {model.num_experts}]"
            return "bad_routes", f"{t.trajectory_id}: route counts {list(counts.shape)}, expected {want}"
        if routes is not None and (routes.shape[1:] != (layers, model.top_k) or np.dtype(routes.dtype) != dtype):
            want = f"{dtype}[{routes.shape[0]}, {layers}, {model.top_k}]"
            return "bad_routes", f"{t.trajectory_id}: routes {routes.dtype}{list(routes.shape)}, expected {want}"
        # The learner could not force an expert that the model does not have.
        if buffer and int(np.frombuffer(buffer, dtype).max()) >= model.num_experts:
            return "bad_routes", f"{t.trajectory_id}: an expert id is outside [0, {model.num_experts})"
    return None
