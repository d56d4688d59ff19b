"""What a generator must know of an engine's server besides its answers: whether it ended, whether it was probed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.around import Around
from asyncrl.engines.base import Engine, Source, Turn
from asyncrl.engines.sglang.client import Unreachable
from asyncrl.types import Completion, SamplingParams, Version

_END_S = 1.0
"""A connection may be lost this much before the process that had it counts as ended."""
_POLL_S = 0.05


class Served(Around):
    """An engine (asyncrl.engines.base.Engine) on a server.

    check raises EngineError with the cause when the server has ended. prove: the start-up probe, where it has to wait
    for the first load, because the server was left in the middle of an update or its weights tell nothing; None when it
    was passed already.
    """

    def __init__(
        self, engine: Engine, check: Callable[[], None], prove: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        super().__init__(engine)
        self._check, self._prove = check, prove

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        n: int,
        sampling: SamplingParams,
        limit_s: float | None = None,
        cut: asyncio.Event | None = None,
        turn: Turn | None = None,
    ) -> list[Completion]:
        """As the engine. When the server ended meanwhile, EngineError says so and not that a connection was lost."""
        try:
            return await super().generate(prompt_ids, n, sampling, limit_s, cut, turn)
        except Unreachable:
            deadline = time.monotonic() + _END_S
            while time.monotonic() < deadline:
                self._check()
                await asyncio.sleep(_POLL_S)
            raise

    async def load(self, version: Version, source: Source) -> None:
        """As the engine; the first time EngineError when the engine then fails the start-up probe."""
        await super().load(version, source)
        if self._prove is not None:
            await self._prove()
            self._prove = None
