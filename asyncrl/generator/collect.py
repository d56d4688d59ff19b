"""Completions -> trajectories: alignment checks and route histograms per version segment.

Axes: P prompt tokens, T response tokens, S = P + T, L MoE layers, E experts, K per token.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from asyncrl.errors import RouteError, TrajectoryError
from asyncrl.types import Completion, ModelInfo, Trajectory


@njit(cache=True, nogil=True)
def _count(routes, mask, first, out):  # type: ignore[no-untyped-def]
    for t in range(mask.shape[0]):
        if mask[t]:
            for layer in range(routes.shape[1]):
                for k in range(routes.shape[2]):
                    out[layer, routes[first + t, layer, k]] += 1


def count_routes(
    routes: NDArray[np.unsignedinteger], mask: NDArray[np.bool_], first: int, num_experts: int
) -> NDArray[np.unsignedinteger]:
    """How often each expert was chosen at rows first .. first + len(mask) - 1 where mask is set.

    routes [S - 1, L, K] with ids below num_experts (checked by the caller). Returns [L, E],
    uint16 while no count can exceed 65,535 (an expert is chosen at most once per row and layer).
    """
    out = np.zeros((routes.shape[1], num_experts), np.uint16 if len(mask) <= 65535 else np.uint32)
    _count(routes, mask, first, out)
    return out


def check_routes(completion: Completion, num_prompt: int, info: ModelInfo, owner: str) -> None:
    """Raises RouteError unless there are exactly S - 1 rows of L x K ids in [0, E)."""
    want = (num_prompt + len(completion.token_ids) - 1, len(info.layers), info.top_k)
    routes = completion.routes
    if routes is None or routes.shape != want:
        got = None if routes is None else list(routes.shape)
        raise RouteError(f"{owner}: expected {list(want)} route rows x layers x experts, received {got}")
    if routes.dtype != info.route_dtype:
        raise RouteError(f"{owner}: routes are {routes.dtype}, {info.num_experts} experts need {info.route_dtype}")
    if routes.size and int(routes.max()) >= info.num_experts:
        raise RouteError(f"{owner}: expert id {int(routes.max())} is outside [0, {info.num_experts})")


def check_logprobs(completion: Completion, owner: str) -> None:
    """Raises TrajectoryError for log-probs with which nothing can have been sampled.

    NaN means "missing" and passes (the learner uses ratio 1 there); -inf and positive values are
    refused, and so is a count that differs from the tokens'.
    """
    if len(completion.logprobs) != len(completion.token_ids):
        raise TrajectoryError(
            f"{owner}: {len(completion.token_ids)} token ids but {len(completion.logprobs)} log-probs; refused, not cut"
        )
    bad = np.isinf(completion.logprobs) | (completion.logprobs > 1e-6)
    if bad.any():
        raise TrajectoryError(f"{owner}: log-prob {float(completion.logprobs[bad][0])} of a sampled token")


def to_trajectory(
    completion: Completion,
    trajectory_id: str,
    num_prompt: int,
    reward: float,
    info: ModelInfo,
    full_routes: bool,
) -> Trajectory:
    """One checked trajectory. Raises RouteError or TrajectoryError naming it on any misalignment."""
    check_logprobs(completion, trajectory_id)
    n = len(completion.token_ids)
    mask = np.ones(n, bool)
    counts = None
    if info.is_moe:
        check_routes(completion, num_prompt, info, trajectory_id)
        assert completion.routes is not None
        # Input position P - 1 + j predicts response token j, so its row holds that token's route.
        parts = [
            count_routes(completion.routes, mask[s.start : s.end], num_prompt - 1 + s.start, info.num_experts)
            for s in completion.segments
        ]
        empty = np.zeros((0, len(info.layers), info.num_experts), np.uint16)
        counts = np.stack(parts) if parts else empty
    return Trajectory(
        trajectory_id,
        np.asarray(completion.token_ids, np.int32),
        np.asarray(completion.logprobs, np.float32),
        mask,
        completion.segments,
        reward,
        completion.finish_reason,
        counts,
        completion.routes if full_routes else None,
    )
