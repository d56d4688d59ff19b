"""Synthetic groups for learner tests: real record types, seeded contents."""

from __future__ import annotations

import numpy as np

from asyncrl.generator.collect import count_routes
from asyncrl.types import Group, ModelInfo, Prompt, Segment, Trajectory, Version


def make_trajectory(
    tid: str,
    num_prompt: int,
    num_tokens: int,
    info: ModelInfo,
    rng: np.random.Generator,
    versions: tuple[tuple[int, int], ...] = ((0, 10**9),),
    reward: float = 0.0,
    full_routes: bool = True,
) -> Trajectory:
    """A response of num_tokens random tokens; versions lists (update, end) per segment."""
    segments, start = [], 0
    for update, end in versions:
        end = min(end, num_tokens)
        if end > start:
            segments.append(Segment(Version(0, update), start, end))
            start = end
    shape = (max(num_prompt + num_tokens - 1, 0), len(info.layers))
    order = np.argsort(rng.random((*shape, info.num_experts)), axis=-1)[..., : info.top_k]
    routes = order.astype(info.route_dtype)
    counts = [
        count_routes(routes, np.ones(s.end - s.start, bool), num_prompt - 1 + s.start, info.num_experts)
        for s in segments
    ]
    empty = np.zeros((0, len(info.layers), info.num_experts), np.uint16)
    return Trajectory(
        tid,
        rng.integers(0, info.vocab_size, num_tokens).astype(np.int32),
        (-rng.random(num_tokens) * 2 - 0.5).astype(np.float32),
        np.ones(num_tokens, bool),
        tuple(segments),
        reward,
        "stop",
        np.stack(counts) if counts else empty,
        routes if full_routes else None,
    )


def make_groups(
    info: ModelInfo, num_groups: int, group_size: int, seed: int, max_tokens: int = 12, version: int = 0
) -> list[Group]:
    """Groups of random lengths 1..max_tokens and random 0/1 rewards; every third has equal rewards."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        p = int(rng.integers(2, 6))
        prompt = Prompt(f"p{g}", rng.integers(0, info.vocab_size, p).astype(np.int32), "", "", "test")
        trajectories = tuple(
            make_trajectory(
                f"0/p{g}#0.{i}", p, int(rng.integers(1, max_tokens + 1)), info, rng, ((version, 10**9),),
                1.0 if g % 3 == 2 else float(rng.integers(0, 2)),
            )
            for i in range(group_size)
        )  # fmt: skip
        groups.append(Group(f"0/p{g}", prompt, f"g{g % 2}", 0, 1.0, trajectories, 1.0))
    return groups
