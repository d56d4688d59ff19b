"""An engine whose tokens, log-probs and routes say where they stand, so that any shift shows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.base import Turn
from asyncrl.types import Completion, ModelInfo, SamplingParams, Segment, Version

INFO = ModelInfo((1, 4, 5), 512, 2, 64)
"""Three MoE layers, two of 512 experts each."""
STOP = 1


def routes_at(rows: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Routes [R, L, K] of absolute rows [R]: every number is of one row, layer and place only."""
    layers, top_k = len(INFO.layers), INFO.top_k
    base = rows[:, None, None] * layers * top_k
    return (base + np.arange(layers)[:, None] * top_k + np.arange(top_k)).astype(np.uint16)


def logprobs_at(positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """The log-prob of a token at an absolute position."""
    return (-(positions + 1) / 64).astype(np.float32)


class TracerEngine:
    """lengths: tokens of the turns of a conversation, the stop token included. versions: of those turns, one or two
    each (a load in the middle of the turn). A turn that finds no room ends with "length"."""

    def __init__(self, lengths: Sequence[int], versions: Sequence[Sequence[int]] | None = None) -> None:
        self.lengths, self.versions = lengths, versions or [[0]] * len(lengths)
        self.version = Version(0, 0)
        self.turns: dict[str, list[tuple[NDArray[np.int32], Turn]]] = {}
        self.forgotten: list[str] = []
        self.hangs_at = -1
        self.routes_from: dict[int, int] = {}
        self.finish = "stop"

    def describe(self) -> ModelInfo:
        return INFO

    async def generate(
        self, prompt_ids: Any, n: int, sampling: SamplingParams, limit_s: Any = None, cut: Any = None, turn: Any = None
    ) -> list[Completion]:
        assert n == 1 and turn is not None and limit_s is not None
        seen = self.turns.setdefault(turn.conversation, [])
        number = len(seen)
        seen.append((prompt_ids.copy(), turn))
        await asyncio.sleep(0)
        if number == self.hangs_at:
            await asyncio.sleep(limit_s)
            return []
        p, t = len(prompt_ids), min(self.lengths[number], sampling.max_new_tokens)
        ids = (2 + (np.arange(p, p + t) + number) % 14).astype(np.int32)
        stopped = t == self.lengths[number] and t > 0
        if stopped:
            ids[-1] = STOP
        marks = self.versions[number]
        cuts = [0, t] if len(marks) == 1 else [0, t // 2, t]
        segments = tuple(Segment(Version(0, v), a, b) for v, a, b in zip(marks, cuts, cuts[1:], strict=False))
        routes = routes_at(np.arange(turn.rows, p + t - 1))
        reason = self.finish if stopped or not t else "length"
        logprobs = logprobs_at(np.arange(p, p + t))
        return [Completion(ids, logprobs, segments, reason, routes, routes_from=self.routes_from.get(number, 0))]

    def forget(self, conversation: str) -> None:
        self.forgotten.append(conversation)
