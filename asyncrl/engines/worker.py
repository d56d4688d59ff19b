"""A thread that owns something and does jobs for others between its own steps. Knows no model and no request.

Callers are coroutines of any event loop: they hold a Reply, the thread settles it. When the thread dies or is
closed, every reply that still waits fails, and so does every later call: nobody hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from asyncrl.errors import EngineError

log = logging.getLogger(__name__)

_IDLE_S = 0.5
"""The thread looks up this often even if nobody wakes it."""
_CLOSE_S = 2.0
"""How long close waits for the running step. With generator.leave.LEAVE_S it fits into run.shutdown_s."""

Job = Callable[[], None]
T = TypeVar("T")


class Reply:
    """A future of the running event loop that another thread may settle; made by `Worker.reply`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def settle(self, result: Any, error: Exception | None) -> None:
        """Set error, or else result; nothing happens when the caller is gone."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._set, result, error)

    def _set(self, result: Any, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


async def in_thread(job: Callable[[], T]) -> T:
    """What job returns or raises. Unlike with asyncio.to_thread, the loop does not wait at its end for one left behind.

    The interpreter would; a role ends by process.end.
    """
    executor = ThreadPoolExecutor(1, "job")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, job)
    finally:
        executor.shutdown(wait=False)


class Worker:
    """Runs step() while busy() says so, and between steps the jobs it is sent."""

    def __init__(self, name: str, begin: Job, busy: Callable[[], bool], step: Job) -> None:
        self._begin, self._busy, self._step = begin, busy, step
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._replies: set[Reply] = set()
        self._failure: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def reply(self) -> Reply:
        """A reply that fails if this worker ends first."""
        reply = Reply()
        with self._wake:
            self._replies.add(reply)
        return reply

    def settle(self, reply: Reply, result: Any, error: Exception | None = None) -> None:
        """Answer: error, or else result."""
        with self._wake:
            self._replies.discard(reply)
        reply.settle(result, error)

    def send(self, job: Job) -> None:
        """Run job in the thread before its next step. EngineError when the thread has ended."""
        with self._wake:
            if self._failure is not None:
                raise EngineError(self._failure)
            self._inbox.append(job)
            self._wake.notify_all()

    def close(self) -> None:
        """End the thread; waits for its running step, at most 2 s. What still waits fails with EngineError."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("%s is still in a step after %.0f s; it ends with the process", self._thread.name, _CLOSE_S)
        self._fail("the engine is closed")

    def _main(self) -> None:
        try:
            self._begin()
            while (jobs := self._next()) is not None:
                while jobs:
                    # No name for a done job: it may hold the memory of a whole version of the weights.
                    jobs.pop(0)()
                if self._busy():
                    self._step()
        except BaseException as exc:
            self._fail(f"the thread {self._thread.name} died of {type(exc).__name__}: {exc}")
            raise

    def _next(self) -> list[Job] | None:
        """Jobs to do before the next step, None to stop. Waits for a job while there is no step to make."""
        with self._wake:
            while not (self._closed or self._inbox or self._busy()):
                self._wake.wait(_IDLE_S)
            jobs, self._inbox = self._inbox, []
            return None if self._closed else jobs

    def _fail(self, reason: str) -> None:
        with self._wake:
            self._failure = self._failure or reason
            self._inbox.clear()
            replies, self._replies = self._replies, set()
        for reply in replies:
            reply.settle(None, EngineError(self._failure))
