"""Requests as the engine makes them, one at a time, with nothing but its modules around them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.base import Source, Turn
from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.answers import Aborted, Asked, completion_of
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.routes import RouteDecoder
from asyncrl.engines.sglang_engine import START
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.types import Completion, ModelInfo, SamplingParams, Version


class Asker:
    """Samples of one server; enough of engines.base.Engine for the start-up probe."""

    def __init__(self, client: Client, info: ModelInfo, decoder: RouteDecoder | None, label: str) -> None:
        self.client, self.info, self.decoder = client, info, decoder
        self.labels = {label: START}
        """Versions by label, all that the server may have."""

    @property
    def version(self) -> Version:
        """What its weights are called here."""
        return START

    def describe(self) -> ModelInfo:
        """What model it should be."""
        return self.info

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        n: int,
        sampling: SamplingParams,
        limit_s: float | None = None,
        cut: asyncio.Event | None = None,
        turn: Turn | None = None,
    ) -> list[Completion]:
        """n samples of one prompt, one after the other, whose common beginnings may come from the cache."""
        if turn is not None:
            raise EngineError("turns are checked by themselves")
        key = f"contract-{uuid.uuid5(uuid.NAMESPACE_OID, str(id(self)))}"
        return [await self.sample(np.asarray(prompt_ids).tolist(), sampling, key) for _ in range(n)]

    def forget(self, conversation: str) -> None:
        """Nothing is kept."""

    async def load(self, version: Version, source: Source) -> NoReturn:
        """Nothing: updates are checked by themselves."""
        raise WeightSyncError("not here")

    def stats(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def close(self) -> None:
        """The client is the caller's."""

    async def sample(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        key: str | None = None,
        rid: str | None = None,
        version: Version = START,
    ) -> Completion:
        """One sample; EngineError when the server aborted it. key: of the cache, default one of its own."""
        done = await self.answer(prompt, sampling, key, rid, version)
        if isinstance(done, Aborted):
            raise EngineError(f"the server aborted a request after {done.num_tokens} tokens: {done.message}")
        return done

    async def answer(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        key: str | None = None,
        rid: str | None = None,
        version: Version = START,
    ) -> Completion | Aborted:
        """As `sample`, for a request that may be aborted."""
        rid = rid or new_name()
        reply = await self.raw(prompt, sampling, key or rid, rid)
        return completion_of(reply, Asked(rid, len(prompt), sampling, version), self.labels, self.decoder)

    async def raw(
        self, prompt: Sequence[int], sampling: SamplingParams, key: str, rid: str, routes_from: int = 0
    ) -> dict[str, Any]:
        """The reply as it came. Waits for it at most as long as the client's calls do, ten times."""
        body = bodies.generate(
            prompt, rid, sampling, routes=self.decoder is not None, cache_key=key, routes_from=routes_from
        )
        reply = await self.client.post(bodies.GENERATE, body, 10 * self.client.answer_s)
        if not isinstance(reply, dict):
            raise EngineError(f"/generate answered {type(reply).__name__} to one request, not an object")
        return reply


def new_name() -> str:
    """Of a request, or of a cache that nobody else uses."""
    return f"contract-{uuid.uuid4().hex}"
