"""Keeps new weights and running responses apart, for weights.on_load abort and drain. Knows any engine.

The gate closes before weights change: requests that come then wait at it. Those that run are waited for (drain), or
stopped, and sampled again behind the gate what was not finished (abort). So no response carries two versions; an
episode may, from one turn to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.around import Around
from asyncrl.engines.base import Broadcast, Engine, Source, Turn
from asyncrl.engines.worker import in_thread
from asyncrl.types import Completion, SamplingParams, Version

Mode = Literal["abort", "drain"]


@dataclass(slots=True, eq=False)
class _Running:
    """A request that the engine has. aborted: new weights stopped it."""

    cut: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


class Gate(Around):
    """An engine (asyncrl.engines.base.Engine) whose responses have one version each. Use it from one event loop."""

    def __init__(self, engine: Engine, mode: Mode) -> None:
        super().__init__(engine)
        self._mode = mode
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._loads = asyncio.Lock()
        self._running: set[_Running] = set()
        self._waits = self._resampled = 0

    @property
    def is_open(self) -> bool:
        """False while requests wait for new weights."""
        return self._open.is_set()

    def stats(self) -> dict[str, float]:
        """As the engine; also `waits`, requests that waited at the gate, and in `resampled` what weights stopped."""
        stats = self._engine.stats()
        return stats | {"waits": float(self._waits), "resampled": self._resampled + stats.get("resampled", 0.0)}

    # --- requests -------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        n: int,
        sampling: SamplingParams,
        limit_s: float | None = None,
        cut: asyncio.Event | None = None,
        turn: Turn | None = None,
    ) -> list[Completion]:
        """As the engine. limit_s includes the time at the gate; samples of one request may differ in their version."""
        loop = asyncio.get_running_loop()
        until = None if limit_s is None else loop.time() + limit_s
        finished: list[Completion] = []
        running: _Running | None = None
        while await self._opened(until, cut):
            if running is not None:
                self._resampled += n - len(finished)
                if sampling.seed is not None:
                    # The samples that are there used the numbers from seed on.
                    sampling = replace(sampling, seed=sampling.seed + n)
            running = _Running()
            left_s = None if until is None else max(0.0, until - loop.time())
            finished += await self._run(running, prompt_ids, n - len(finished), sampling, left_s, cut, turn)
            if len(finished) >= n or not running.aborted:
                break
        return finished

    async def _opened(self, until: float | None, cut: asyncio.Event | None) -> bool:
        """Wait for the open gate. False when the time is up, or cut is set, before."""
        self._waits += not self._open.is_set()
        while not self._open.is_set():
            left_s = None if until is None else until - asyncio.get_running_loop().time()
            if (left_s is not None and left_s <= 0) or (cut is not None and cut.is_set()):
                return False
            await _first([self._open, *([cut] if cut is not None else [])], left_s)
        return True

    async def _run(
        self, running: _Running, prompt_ids: NDArray[np.int32], n: int, sampling: SamplingParams,
        limit_s: float | None, cut: asyncio.Event | None, turn: Turn | None,
    ) -> list[Completion]:  # fmt: skip
        """One request to the engine. Nothing is awaited between the open gate and the entry here."""
        self._running.add(running)
        self._idle.clear()
        passed_on = None if cut is None else asyncio.create_task(_pass_on(cut, running.cut))
        try:
            return await self._engine.generate(prompt_ids, n, sampling, limit_s, running.cut, turn)
        finally:
            if passed_on is not None:
                passed_on.cancel()
            self._running.discard(running)
            if not self._running:
                self._idle.set()

    # --- weights --------------------------------------------------------------------------------

    async def load(self, version: Version, source: Source, timeout_s: float | None = None) -> None:
        """Load when no response runs, and open the gate again, also when that fails; errors of the engine.

        Nothing running is touched before the source has shown that it has the version. The wait for running responses
        ends with their own limits. timeout_s: longest time of what precedes that wait, and of the load that follows
        it; TimeoutError after.
        """
        async with self._loads, _Held(source) as held:
            async with asyncio.timeout(timeout_s):
                await held.take()
            self._open.clear()
            try:
                await self._settle()
                async with asyncio.timeout(timeout_s):
                    await self._engine.load(version, held)
            finally:
                self._open.set()

    async def _settle(self) -> None:
        """Until nothing runs."""
        if self._engine.stats().get("torn"):
            # It samples nothing before a load succeeds, and what waits in it has no token yet.
            return
        if self._mode == "abort":
            for running in self._running:
                running.aborted = True
                running.cut.set()
        await self._idle.wait()


class _Held:
    """A source that has shown what it has: tensors are read, a folder is held (engines.base.Source)."""

    def __init__(self, source: Source) -> None:
        self._source, self.kind = source, source.kind
        self._tensors: Mapping[str, Tensor] | None = None
        self._path: Path | None = None
        self._hold, self._change, self._over = contextlib.ExitStack(), threading.Lock(), False

    async def __aenter__(self) -> _Held:
        return self

    async def __aexit__(self, *exc: object) -> None:
        with self._change:
            self._over = True
        self._hold.close()

    async def take(self) -> None:
        """WeightSyncError when the version cannot be had."""
        await in_thread(self._take)

    def _take(self) -> None:
        if self.kind == "tensors":
            self._tensors = self._source.tensors()
        elif self.kind == "folder":
            with contextlib.ExitStack() as hold:
                self._path = hold.enter_context(self._source.folder())
                with self._change:
                    # Nobody waits for this thread any more: then it lets go itself.
                    if not self._over:
                        self._hold = hold.pop_all()
        else:
            # Asks for nothing, but of this version.
            self._source.checksums((), 1)

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name."""
        tensors, self._tensors = self._tensors, None
        return tensors if tensors is not None else self._source.tensors()

    def folder(self) -> AbstractContextManager[Path]:
        """The folder; it stays until the load is over."""
        return contextlib.nullcontext(self._path) if self._path is not None else self._source.folder()

    def broadcast(self, engine: str, ranks: int) -> Broadcast:
        """As the source."""
        return self._source.broadcast(engine, ranks)

    def leave(self, engine: str) -> None:
        """As the source."""
        self._source.leave(engine)

    def checksums(self, names: Sequence[str], ranks: int) -> dict[str, frozenset[str]]:
        """As the source."""
        return self._source.checksums(names, ranks)


async def _first(events: Sequence[asyncio.Event], timeout_s: float | None) -> None:
    """Wait until one of the events is set, at most timeout_s."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _pass_on(cut: asyncio.Event, to: asyncio.Event) -> None:
    await cut.wait()
    to.set()
