"""Episodes in worker processes: deadlines that hold, and no failure that looks like a reward of 0.

An episode stays with the worker that opened it. A call that overruns its deadline, and a worker that dies, fail the
episodes of that worker and no others; the next episode there gets a new process. Knows nothing of tokens or engines.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.environments.step import Step
from asyncrl.tasks.processes import Child

START_S = 60.0
"""Longest start of a worker; importing what an environment needs may take seconds."""


class EnvironmentFailed(Exception):
    """An episode cannot go on: its environment raised, overran its deadline, or lost its process."""

    def __init__(self, reason: str, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class EnvironmentPool:
    """Worker processes that run the environment `module:Class`. One event loop and one thread use a pool.

    workers: processes, started at once. timeout_s: longest time of ONE call, counted from when a worker turns to it.
    memory_bytes: address space of a worker. The workers die with the thread that made them, so a pool belongs to a
    thread that lives as long as it.

    `counters`: episodes, steps, errors (the environment raised or returned what is no step), timeouts, crashes,
    restarts.
    """

    def __init__(
        self, environment: str, workers: int, timeout_s: float, memory_bytes: int, start_timeout_s: float = START_S
    ) -> None:
        """Start the processes. Raises TaskError for workers < 1 or timeout_s <= 0, or when none can be started."""
        if workers < 1 or timeout_s <= 0:
            raise TaskError(f"environments need workers >= 1 and timeout_s > 0, got {workers} and {timeout_s}")
        self.environment, self.timeout_s, self.start_timeout_s = environment, timeout_s, start_timeout_s
        self._memory_bytes = memory_bytes
        self._closed = False
        self._opened = 0
        self.counters: Counter[str] = Counter(episodes=0, steps=0, errors=0, timeouts=0, crashes=0, restarts=0)
        self._workers = [self._start() for _ in range(workers)]

    def episode(self, prompt: str, answer: str, extra: str = "") -> Episode:
        """A new episode on the worker with the fewest. extra: a JSON object, or "". Close it in every way out.

        Its environment is made by the first step. Raises TaskError when the pool is closed or no process starts.
        """
        if self._closed:
            raise TaskError("the pool of environments is closed")
        at = min(range(len(self._workers)), key=lambda i: len(self._workers[i].episodes))
        if self._workers[at].lost:
            self._workers[at] = self._start()
            self.counters["restarts"] += 1
        self._opened += 1
        self.counters["episodes"] += 1
        return Episode(self, self._workers[at], self._opened, {"prompt": prompt, "answer": answer, "extra": extra})

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        return [worker.child.process.pid for worker in self._workers if worker.child.alive]

    def close(self) -> None:
        """Kill and reap every worker; calls that wait fail. May be called again."""
        self._closed = True
        for worker in self._workers:
            worker.end("the pool of environments was closed")

    def __enter__(self) -> EnvironmentPool:
        """The pool itself; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close the pool."""
        self.close()

    def _start(self) -> _Worker:
        return _Worker(self, Child("asyncrl.tasks.environments.worker", self.environment, str(self._memory_bytes)))


class Episode:
    """One episode of an environment; use it from one task."""

    def __init__(self, pool: EnvironmentPool, worker: _Worker, number: int, start: dict[str, str]) -> None:
        self._pool, self._worker, self._number = pool, worker, number
        self._start, self._is_open, self._is_closed = start, False, False
        worker.episodes.add(number)

    async def step(self, text: str) -> Step:
        """The environment's answer to one response. Waits for the worker and its deadline.

        Raises EnvironmentFailed, after which no further step works, and TaskError when the worker does not start.
        """
        if not self._is_open:
            self._is_open = True
            await self._call("open", **self._start)
        reply = await self._call("step", text=text)
        self._pool.counters["steps"] += 1
        observation, done, reward, parts = reply["step"]
        return Step(observation, done, reward, parts)

    def close(self) -> None:
        """Give the place on the worker back; the environment's own close() runs there. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._is_open or self._worker.lost:
            self._worker.episodes.discard(self._number)
            return
        # Nobody waits for it, and a close() that hangs ends the worker by its deadline.
        self._worker.ask({"call": "close", "episode": self._number}).add_done_callback(
            lambda _: self._worker.episodes.discard(self._number)
        )

    async def _call(self, call: str, **fields: str) -> dict[str, Any]:
        # A call goes on when its episode is cancelled: the worker is busy with it until it ends.
        reply: dict[str, Any] = await asyncio.shield(
            self._worker.ask({"call": call, "episode": self._number, **fields})
        )
        if "error" in reply:
            self._pool.counters["errors"] += 1
            raise EnvironmentFailed(f"error: {reply['error']}")
        return reply


class _Worker:
    """One process, the calls that wait for it, and why it is lost ("" while it is not)."""

    def __init__(self, pool: EnvironmentPool, child: Child) -> None:
        self._pool, self.child = pool, child
        self.lost = ""
        self.episodes: set[int] = set()
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._asynchronous: asyncio.Future[bool] | None = None
        self._turn, self._sending = asyncio.Lock(), asyncio.Lock()
        self._calls: set[asyncio.Task[dict[str, Any]]] = set()

    def ask(self, message: dict[str, Any]) -> asyncio.Task[dict[str, Any]]:
        """One call, as a task. It raises EnvironmentFailed, or TaskError when the worker does not start."""
        task = asyncio.create_task(self._ask(message))
        self._calls.add(task)
        task.add_done_callback(self._ended)
        return task

    def end(self, reason: str) -> None:
        """Kill the process; what waits for it fails with the reason."""
        self.lost = self.lost or reason
        self.child.kill()
        if self._reader is None:
            self.child.close()  # else the reader sees the end, and closes the socket

    def _ended(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # an episode that was cancelled does not fetch it

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._reader is None and not self.lost:
            self._asynchronous = asyncio.get_running_loop().create_future()
            self._reader = asyncio.create_task(self._read())
        if await self._started():
            return await self._exchange(message)
        # The time of a call begins when the worker turns to it.
        async with self._turn:
            return await self._exchange(message)

    async def _started(self) -> bool:
        """Whether its calls run at the same time. Waits at most start_timeout_s for the process."""
        if self.lost or self._asynchronous is None:
            raise EnvironmentFailed(f"crash: {self.lost}")
        try:
            async with asyncio.timeout(self._pool.start_timeout_s):
                return await asyncio.shield(self._asynchronous)
        except TimeoutError as exc:
            self.end(f"did not start within {self._pool.start_timeout_s:g} s")
            raise TaskError(f"a worker of environment {self._pool.environment!r} {self.lost}") from exc

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.lost:
            raise EnvironmentFailed(f"crash: {self.lost}")
        self._number += 1
        number = self._number
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._pool.timeout_s):
                async with self._sending:
                    await self.child.channel.send({"id": number, **message})
                reply: dict[str, Any] = await future
                return reply
        except TimeoutError as exc:
            self._pool.counters["timeouts"] += 1
            self.end("its process was ended, because another episode overran its deadline there")
            reason = f"timeout: {message['call']}() gave no answer within {self._pool.timeout_s:g} s"
            raise EnvironmentFailed(reason, timed_out=True) from exc
        except OSError as exc:  # the socket was closed meanwhile, by either side
            raise EnvironmentFailed(f"crash: {self.lost or 'the worker died'}") from exc
        finally:
            self._waiting.pop(number, None)

    async def _read(self) -> None:
        """Hands replies to those who wait, until the process ends. Waits for its frames."""
        assert self._asynchronous is not None
        try:
            first = await self.child.channel.receive()
            if "failed" in first:
                raise TaskError(f"task.environment={self._pool.environment}: {first['failed']}")
            self._asynchronous.set_result(bool(first["asynchronous"]))
            while True:
                reply = await self.child.channel.receive()
                future = self._waiting.pop(reply["id"], None)
                if future is not None and not future.done():
                    future.set_result(reply)
        except (ConnectionError, TaskError, ValueError) as exc:
            self._lose(exc)
        finally:
            self.child.close()

    def _lose(self, exc: Exception) -> None:
        self.child.kill()
        if not self.lost:
            self._pool.counters["crashes"] += 1
            self.lost = f"the worker died (exit status {self.child.process.returncode})"
        assert self._asynchronous is not None
        if not self._asynchronous.done():
            failure = exc if isinstance(exc, TaskError) else TaskError(f"a worker of environments ended: {self.lost}")
            self._asynchronous.set_exception(failure)
            self._asynchronous.exception()  # perhaps nobody waits for it
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError(self.lost))
