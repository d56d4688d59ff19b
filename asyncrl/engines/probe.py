"""The start-up check of an engine: two small requests whose answers must make sense. Knows any engine.

Engines were seen that return zeros, one repeated row or a row too many as routes, or another request's rows for a
prompt that they have in a cache; training on them fails silently, so a generator refuses to start.
Axes: P prompt tokens, T response tokens, S = P + T, L MoE layers, K experts per token.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.base import Engine
from asyncrl.errors import EngineError, RouteError, TrajectoryError
from asyncrl.types import Completion, ModelInfo, SamplingParams

PROMPT_TOKENS = 32
NEW_TOKENS = 32
OVERLAP = 0.9
"""Least share of a prompt's experts that an engine must choose again: low precision flips a few near ties, another
request's rows have little in common."""


async def probe(engine: Engine, sampling: SamplingParams | None = None, timeout_s: float = 120.0) -> Completion:
    """Generate 32 tokens after 32 prompt tokens and check them, then ask for one more token of the same prompt.

    sampling: as the run samples; its stop tokens are left out. timeout_s bounds each answer. Returns the first
    completion. Raises EngineError that names the check.
    """
    info = engine.describe()
    sampling = sampling or SamplingParams(1.0, NEW_TOKENS, ())
    sampling = replace(sampling, max_new_tokens=NEW_TOKENS, stop_token_ids=(), greedy=False)
    prompt = np.random.default_rng(0).integers(0, info.vocab_size, PROMPT_TOKENS).astype(np.int32)
    first = await _ask(engine, prompt, sampling, timeout_s)
    _check_routes(first, info)
    # An engine with a prefix cache has the prompt's rows from there now.
    again = await _ask(engine, prompt, replace(sampling, max_new_tokens=1), timeout_s)
    _check_again(first, again, info)
    return first


async def _ask(engine: Engine, prompt: NDArray[np.int32], sampling: SamplingParams, timeout_s: float) -> Completion:
    """One checked completion; whatever the engine made of the request becomes an EngineError that names the check."""
    try:
        completions = await asyncio.wait_for(engine.generate(prompt, 1, sampling), timeout_s)
    except TimeoutError as exc:
        raise _refused("answer", f"nothing within {timeout_s:.0f} s") from exc
    except RouteError as exc:
        raise _refused("routes", str(exc)) from exc
    except TrajectoryError as exc:
        raise _refused("tokens and log-probs", str(exc)) from exc
    except EngineError as exc:
        raise _refused("answer", str(exc)) from exc
    if len(completions) != 1:
        raise _refused("sample count", f"asked for 1 sample, got {len(completions)}")
    _check_tokens(completions[0], engine.describe(), sampling.max_new_tokens)
    return completions[0]


def _refused(check: str, found: str) -> EngineError:
    return EngineError(f"the engine failed the start-up probe, check {check!r}: {found}")


def _check_tokens(done: Completion, info: ModelInfo, asked: int) -> None:
    tokens, logprobs = np.asarray(done.token_ids), np.asarray(done.logprobs)
    if len(tokens) != asked or done.finish_reason != "length":
        raise _refused("token count", f"asked for {asked} tokens, got {len(tokens)} ({done.finish_reason!r})")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= info.vocab_size:
        raise _refused("token range", f"ids span [{low}, {high}], the vocabulary has {info.vocab_size}")
    if logprobs.shape != tokens.shape:
        raise _refused("log-prob count", f"{len(tokens)} tokens, log-probs {logprobs.shape}")
    if not np.isfinite(logprobs).all():
        raise _refused("log-probs finite", f"{int((~np.isfinite(logprobs)).sum())} of {len(logprobs)} are not")
    if logprobs.max() > 1e-6:
        raise _refused("log-probs <= 0", f"the largest is {logprobs.max():.3g}")
    ends = [0] + [segment.end for segment in done.segments]
    if [segment.start for segment in done.segments] != ends[:-1] or ends[-1] != len(tokens):
        raise _refused("version segments", f"{done.segments} do not cover [0, {len(tokens)})")


def _check_routes(done: Completion, info: ModelInfo) -> None:
    if not info.is_moe:
        return
    routes = _sorted(done, info)
    if len(np.unique(routes[PROMPT_TOKENS:], axis=0)) < 2:
        raise _refused("distinct rows", "all generated tokens have the same routes")


def _check_again(first: Completion, again: Completion, info: ModelInfo) -> None:
    """The rows of the prompt must be what they were: those of a cached prefix come from somewhere else."""
    if not info.is_moe:
        return
    old, new = _sorted(first, info)[: PROMPT_TOKENS - 1], _sorted(again, info)[: PROMPT_TOKENS - 1]
    overlap = float((old[..., :, None] == new[..., None, :]).any(axis=-1).mean())
    if overlap < OVERLAP:
        raise _refused("same prompt again", f"{overlap:.0%} of its experts are those of the first time")


def _sorted(done: Completion, info: ModelInfo) -> NDArray[np.int64]:
    """Routes [S - 1, L, K] with the experts of each row in order; rows that no router can have chosen are refused."""
    if done.routes is None:
        raise _refused("routes", "none were returned")
    expected = (PROMPT_TOKENS + len(done.token_ids) - 1, len(info.layers), info.top_k)
    if done.routes.shape != expected:
        raise _refused("row count", f"routes must be [S - 1, L, K] = {expected}, got {done.routes.shape}")
    routes = np.sort(done.routes.astype(np.int64), axis=-1)
    if routes.min() < 0 or routes.max() >= info.num_experts:
        raise _refused("expert range", f"ids span [{routes.min()}, {routes.max()}], the model has {info.num_experts}")
    repeated = (routes[..., 1:] == routes[..., :-1]).any(axis=(1, 2))
    if repeated.any():
        raise _refused("distinct experts", f"{int(repeated.sum())} of {len(routes)} rows name an expert twice")
    return routes
