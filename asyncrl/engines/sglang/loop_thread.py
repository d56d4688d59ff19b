"""An event loop in a thread of its own, for callers of any other loop or thread. Knows no engine.

The replies of a server are large, and so is the time that parsing them takes: a generator's own loop must not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelled
from typing import Any, TypeVar

from asyncrl.errors import EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")

_START_S = 10.0


class LoopThread:
    """Runs coroutines until it is closed; then every one that still runs, or comes later, fails with EngineError."""

    def __init__(self, name: str) -> None:
        self._guard = threading.Lock()
        self._closed = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=name, daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise EngineError(f"the thread {name} did not start within {_START_S:g} s")

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        # No deadline: it is what the thread lives for.
        await self._stop.wait()

    async def run(self, job: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine that job makes returns or raises; cancelling this cancels it. Waits as long as it runs."""
        with self._guard:
            if self._closed:
                raise EngineError("the engine is closed")
            future = asyncio.run_coroutine_threadsafe(job(), self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise EngineError("the engine was closed") from None
            raise

    def call(self, job: Callable[[], object]) -> None:
        """Run job in the loop soon; nothing happens when it has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(job)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Run a last coroutine, then end the loop and the thread. Waits for all of it, at most timeout_s twice."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            future = asyncio.run_coroutine_threadsafe(last(), self._loop)
        with contextlib.suppress(TimeoutError, FutureCancelled):
            future.result(timeout_s)
        self.call(self._stop.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s still runs after %g s; it ends with the process", self._thread.name, timeout_s)
