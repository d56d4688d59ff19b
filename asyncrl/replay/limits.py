"""The settings of the queue as plain values, taken from a Config or given by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.replay.curriculum import Bounds
from asyncrl.types import ModelInfo, Prompt

LIVE = ("max_lag", "sync_every", "stale", "on_evict", "zero_variance", "patience")
"""Limits that a running queue takes new values of."""


@dataclass(slots=True)
class Limits:
    """What the queue allows; all its parts share one, which takes new values while they run.

    G groups per update, M updates per take, N updates per publication. total_updates: updates of the whole run, 0
    for no end. group_bytes: payload reserved for a leased group until a larger one was seen. weights: share of each
    data source in the prompts, none for every prompt as often as the next. curriculum: None is off.
    """

    groups_per_update: int
    group_size: int
    max_lag: int
    sync_every: int = 1
    updates_per_take: int = 1
    stale: Literal["mask", "evict", "wait"] = "mask"
    on_evict: Literal["requeue", "drop"] = "requeue"
    zero_variance: Literal["keep", "refill"] = "keep"
    capacity_bytes: int = 2**31
    lease_timeout_s: float = 120.0
    max_attempts: int = 5
    total_updates: int = 0
    group_bytes: int = 0
    seed: int = 0
    patience: float = 3.0
    on_timeout: Literal["reissue", "partial"] = "reissue"
    weights: Mapping[str, float] = field(default_factory=dict)
    curriculum: Bounds | None = None

    def follow(self, new: Limits) -> None:
        """Take over the values of `new` that may change while the queue runs (LIVE)."""
        for name in LIVE:
            setattr(self, name, getattr(new, name))

    @property
    def take_groups(self) -> int:
        """Groups of a whole take."""
        return self.updates_per_take * self.groups_per_update

    @property
    def fewest_responses(self) -> int:
        """Responses that a group must have: those that were too slow or that nothing could score are left out."""
        return min(2, self.group_size)

    @property
    def share_bytes(self) -> int:
        """Largest payload of a group: a whole take of such groups fits, so that the learner can always go on."""
        return self.capacity_bytes // self.take_groups


def limits_of(config: Config, group_bytes: int = 0, weights: Mapping[str, float] | None = None) -> Limits:
    """The queue's settings of a run. weights: of its task."""
    a, s, r, c = config.algorithm, config.staleness, config.replay, config.task.curriculum
    return Limits(
        groups_per_update=a.groups_per_update,
        group_size=a.group_size,
        max_lag=s.max_lag,
        sync_every=s.sync_every,
        updates_per_take=s.updates_per_take,
        stale=s.stale,
        on_evict=s.on_evict,
        zero_variance=a.zero_variance,
        capacity_bytes=r.capacity_bytes,
        lease_timeout_s=r.lease_timeout_s,
        max_attempts=r.max_attempts,
        total_updates=config.learner.updates,
        group_bytes=group_bytes,
        seed=config.run.seed,
        patience=s.patience,
        on_timeout=r.on_timeout,
        weights=dict(weights or {}),
        curriculum=Bounds(c.low, c.high, c.rest) if c.kind == "solve_rate" else None,
    )


def group_bytes(config: Config, model: ModelInfo, prompts: Sequence[Prompt]) -> int:
    """Payload of the largest group that can be expected: of the longest prompt, every response as long as allowed."""
    return largest_group_bytes(config, model, longest_of(prompts), texts_of(prompts))


def longest_of(prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt."""
    return max((len(p.token_ids) for p in prompts), default=0)


def texts_of(prompts: Sequence[Prompt]) -> int:
    """Most bytes of the texts that travel with one prompt: its own, its gold answer, what a reward reads of its row."""
    return max((sum(len(t.encode()) for t in (p.text, p.answer, p.extra)) for p in prompts), default=0)


def largest_group_bytes(config: Config, model: ModelInfo, prompt: int, texts: int = 0) -> int:
    """As `group_bytes`, for a prompt of that many tokens with that many bytes of texts.

    A response has as many version segments as one update may use, or two: the counts of each are kept.
    """
    tokens = config.sampling.max_new_tokens
    response = tokens * (4 + 4 + 1)  # ids, log-probs, loss mask
    s = config.staleness
    segments = max(2, s.max_lag // s.sync_every + 1)
    response += segments * len(model.layers) * model.num_experts * (2 if tokens <= 65535 else 4)
    if config.full_routes:
        response += (prompt + tokens) * len(model.layers) * model.top_k * model.route_dtype.itemsize
    return config.algorithm.group_size * (response + 128) + 4 * prompt + texts + 512


def largest_message(one_group: int, group_size: int) -> tuple[int, int]:
    """(bytes, frames) that no message to replay exceeds: beyond them, a peer is no generator of this run.

    Four times the largest expected group, for headers and texts besides the arrays. A group has two frames and five
    arrays per response.
    """
    return max(2**22, 4 * one_group), 5 * group_size + 2


def check_capacity(config: Config, one_group: int) -> None:
    """Raise ConfigError when the capacity cannot hold one take and one group per generator."""
    groups = config.staleness.updates_per_take * config.algorithm.groups_per_update + max(1, config.generator.count)
    if config.replay.capacity_bytes < groups * one_group:
        raise ConfigError(
            f"replay.capacity_bytes={config.replay.capacity_bytes} cannot hold one take and one group per generator "
            f"({groups} groups of up to {one_group} bytes); set replay.capacity_bytes >= {groups * one_group}, or "
            "lower sampling.max_new_tokens or algorithm.groups_per_update"
        )


def fits(model: ModelInfo, prompts: Sequence[Prompt], max_bytes: int) -> Callable[[Config], None]:
    """What refuses a live change that this model cannot have, or under which groups would outgrow this replay's
    capacity or its socket's limit."""
    longest, texts = longest_of(prompts), texts_of(prompts)

    def check(config: Config) -> None:
        if config.algorithm.compares_routers and not model.is_moe:
            raise ConfigError(
                f"algorithm.correction.kind={config.algorithm.correction.kind} compares routers and needs a "
                f"Mixture-of-Experts model, but model.path={config.model.path!r} is dense; choose another kind"
            )
        one_group = largest_group_bytes(config, model, longest, texts)
        check_capacity(config, one_group)
        # The socket keeps half of its room for what stands beside the arrays.
        if one_group > max_bytes // 2:
            raise ConfigError(
                f"staleness.max_lag={config.staleness.max_lag} with sync_every={config.staleness.sync_every}: a group "
                f"may have {one_group} bytes then, and replay was started for messages of {max_bytes} bytes; stop the "
                "run and go on with `asyncrl run RUN/config.yaml --resume staleness.max_lag=...`"
            )

    return check
