"""Completions -> trajectories: alignment checks and route histograms per version segment.

Axes: P prompt tokens, T response tokens, S = P + T, L MoE layers, E experts, K per token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from asyncrl.errors import RouteError, TrajectoryError
from asyncrl.types import LOGPROB_TOLERANCE, Completion, ModelInfo, Trajectory, impossible


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
    """Raises RouteError unless there are S - 1 rows of L x K ids in [0, E), and routes_from is in [0, S - 1]."""
    want = (num_prompt + len(completion.token_ids) - 1, len(info.layers), info.top_k)
    routes = completion.routes
    if routes is None or routes.shape != want:
        got = None if routes is None else list(routes.shape)
        raise RouteError(f"{owner}: expected {list(want)} route rows x layers x experts, received {got}")
    if routes.dtype != info.route_dtype:
        raise RouteError(f"{owner}: routes are {routes.dtype}, {info.num_experts} experts need {info.route_dtype}")
    if routes.size and int(routes.max()) >= info.num_experts:
        raise RouteError(f"{owner}: expert id {int(routes.max())} is outside [0, {info.num_experts})")
    if not 0 <= completion.routes_from <= want[0]:
        raise RouteError(f"{owner}: routes_from={completion.routes_from} is outside [0, {want[0]}], the number of rows")


def segment_counts(
    completion: Completion, mask: NDArray[np.bool_], num_prompt: int, info: ModelInfo
) -> NDArray[np.unsignedinteger]:
    """Route counts [V, L, E] of checked routes at the tokens that mask [T] sets, without rows below routes_from."""
    assert completion.routes is not None
    # Input position P - 1 + j predicts response token j, so its row holds that token's route.
    known = mask.copy()
    known[: max(0, completion.routes_from - (num_prompt - 1))] = False
    parts = [
        count_routes(completion.routes, known[s.start : s.end], num_prompt - 1 + s.start, info.num_experts)
        for s in completion.segments
    ]
    return np.stack(parts) if parts else np.zeros((0, len(info.layers), info.num_experts), np.uint16)


def check_tokens(completion: Completion, owner: str, vocab_size: int, stop_token_ids: Collection[int] | None) -> None:
    """Raises TrajectoryError for ids that the learner could not train, or that are not what was sampled.

    Ids are what counts: text is never encoded again, so a response without ids is refused. One that ended with "stop"
    must end with its stop token, or the policy would never be trained to stop; stop_token_ids None: not checked.
    """
    if completion.token_ids is None:
        raise TrajectoryError(f"{owner}: no token ids; the engine must return the ids that it sampled, not text")
    ids = np.asarray(completion.token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TrajectoryError(f"{owner}: token ids are {ids.dtype}{list(ids.shape)}, expected integers [T]")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise TrajectoryError(f"{owner}: token ids span [{ids.min()}, {ids.max()}], the vocabulary has {vocab_size}")
    stops = None if completion.finish_reason != "stop" or not ids.size else stop_token_ids
    if stops is not None and int(ids[-1]) not in stops:
        raise TrajectoryError(
            f"{owner}: ended with 'stop', but its last id {int(ids[-1])} is no stop token {sorted(stops)}; "
            "the engine must leave the stop token in the ids, with its log-prob"
        )


def loss_mask_of(completion: Completion, owner: str) -> NDArray[np.bool_]:
    """Which tokens the policy sampled, bool [T]. Raises TrajectoryError on another length."""
    n = len(completion.token_ids)
    if completion.sampled is None:
        return np.ones(n, bool)
    mask = np.array(completion.sampled, bool)
    if mask.shape != (n,):
        raise TrajectoryError(f"{owner}: {n} token ids but 'sampled' has shape {list(mask.shape)}")
    return mask


def logprobs_of(completion: Completion, mask: NDArray[np.bool_], owner: str) -> NDArray[np.float32]:
    """Log-probs float32 [T] of the sampled tokens. Raises TrajectoryError for what no policy can have sampled.

    None or NaN in the list, or None for the list, means that the engine gave none (NaN; the learner uses ratio 1
    there). Refused: -inf, values above 0 by more than rounding (LOGPROB_TOLERANCE), and another count than the
    tokens'. A token that was not sampled has no log-prob, whatever stands there.
    """
    n = len(mask)
    given: Any = completion.logprobs
    logprobs = np.full(n, np.nan, np.float32) if given is None else np.array(given, np.float32)
    if logprobs.shape != (n,):
        found = len(logprobs) if logprobs.ndim == 1 else list(logprobs.shape)
        raise TrajectoryError(f"{owner}: {n} token ids but {found} log-probs; refused, not cut")
    logprobs[~mask] = np.nan
    if impossible(logprobs):
        with np.errstate(invalid="ignore"):
            bad = logprobs[np.isinf(logprobs) | (logprobs > LOGPROB_TOLERANCE)]
        raise TrajectoryError(f"{owner}: log-prob {float(bad[0])} of a sampled token")
    return logprobs


def to_trajectory(
    completion: Completion,
    trajectory_id: str,
    num_prompt: int,
    reward: float,
    info: ModelInfo,
    full_routes: bool,
    stop_token_ids: Collection[int] | None = None,
) -> Trajectory:
    """One checked trajectory. Raises RouteError or TrajectoryError naming it on any misalignment.

    stop_token_ids: of the request, to see that a response which ended with "stop" holds its stop token.
    """
    check_tokens(completion, trajectory_id, info.vocab_size, stop_token_ids)
    mask = loss_mask_of(completion, trajectory_id)
    logprobs = logprobs_of(completion, mask, trajectory_id)
    counts = None
    if info.is_moe:
        check_routes(completion, num_prompt, info, trajectory_id)
        counts = segment_counts(completion, mask, num_prompt, info)
    return Trajectory(
        trajectory_id,
        np.asarray(completion.token_ids, np.int32),
        logprobs,
        mask,
        completion.segments,
        reward,
        completion.finish_reason,
        counts,
        completion.routes if full_routes else None,
        completion.routes_from if info.is_moe else 0,
    )
