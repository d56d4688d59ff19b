"""An engine around another one, which does all that a subclass does not say otherwise. Knows any engine."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.base import Engine, Source, Turn
from asyncrl.types import Completion, ModelInfo, SamplingParams, Version


class Around:
    """Passes every call of asyncrl.engines.base.Engine on; each method is as the engine's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def version(self) -> Version:
        """The version of the weights it samples with now."""
        return self._engine.version

    def describe(self) -> ModelInfo:
        """MoE layers, experts, top-k, vocabulary and fingerprint of its model."""
        return self._engine.describe()

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        n: int,
        sampling: SamplingParams,
        limit_s: float | None = None,
        cut: asyncio.Event | None = None,
        turn: Turn | None = None,
    ) -> list[Completion]:
        """n samples of one prompt [P]; EngineError."""
        return await self._engine.generate(prompt_ids, n, sampling, limit_s, cut, turn)

    def forget(self, conversation: str) -> None:
        """Free what is kept of a conversation."""
        self._engine.forget(conversation)

    async def load(self, version: Version, source: Source) -> None:
        """Load weights; WeightSyncError."""
        await self._engine.load(version, source)

    def stats(self) -> dict[str, float]:
        """Counters since start and gauges."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop; requests that wait fail with EngineError."""
        self._engine.close()
