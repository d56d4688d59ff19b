"""Rewards in worker processes: deadlines that hold, and no failure that looks like a reward of 0.

Workers are fresh interpreters (no fork, no torch), each on its own socket pair, and score on their
main thread. One that overruns or dies is killed and replaced; the other items of its batch go on.
Knows nothing of tokens or groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from asyncrl.errors import TaskError
from asyncrl.tasks.worker import LENGTH, encode

Request = tuple[str, str | None, str]
"""(source, response text, gold answer)."""


class Score(NamedTuple):
    """Outcome of one item: a reward in [0, 1], or None and the reason why there is none.

    timed_out: the verifier gave no answer within its deadline.
    """

    reward: float | None
    error: str = ""
    timed_out: bool = False


class RewardPool:
    """Worker processes that run verifiers. One event loop and one thread use a pool.

    workers: processes, started at once. timeout_s: longest time of ONE item, counted from when a
    worker turns to it. scorer: `module:function` of (source, text, answer) -> reward. The workers
    die with the thread that made them, so a pool belongs to a thread that lives as long as it.

    `counters`: scored, errors (the verifier raised or returned a value outside [0, 1]), timeouts,
    crashes, restarts.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        scorer: str = "asyncrl.tasks.rewards:score",
        start_timeout_s: float = 60.0,
    ) -> None:
        """Start the processes. Raises TaskError for workers < 1 or timeout_s <= 0."""
        if workers < 1 or timeout_s <= 0:
            raise TaskError(f"a reward pool needs workers >= 1 and timeout_s > 0, got {workers} and {timeout_s}")
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._scorer = scorer
        self._closed = False
        self.counters: Counter[str] = Counter(scored=0, errors=0, timeouts=0, crashes=0, restarts=0)
        self._workers = [_Worker(scorer) for _ in range(workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, source: str, text: str | None, answer: str) -> float:
        """Reward of one response. Raises TaskError on a timeout, a crash or an error of the verifier."""
        (outcome,) = await self.score_many([(source, text, answer)])
        if outcome.reward is None:
            raise TaskError(f"no reward for a response of source {source!r}: {outcome.error}")
        return outcome.reward

    async def score_many(self, items: Sequence[Request]) -> list[Score]:
        """Outcomes of several responses, in order, in one round trip to one worker.

        Waits for a free worker; each worker is freed by its replies or by the deadline of its item.
        Raises TaskError when the pool is closed or a worker cannot be started.
        """
        results: list[Score] = []
        if self._closed:
            raise TaskError("the reward pool is closed")
        worker = await self._idle.get()
        try:
            while len(results) < len(items):
                worker = self._living(worker)
                await self._wait_ready(worker)
                await self._work(worker, items[len(results) :], results)
        finally:
            if len(results) < len(items) or self._closed:
                worker.discard()  # cancelled: its late replies must not answer the next call
            self._idle.put_nowait(worker)
        return results

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        return [worker.process.pid for worker in self._workers if worker.process.poll() is None]

    def close(self) -> None:
        """Kill and reap every worker; calls that wait raise TaskError. May be called again."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        while not self._idle.empty():
            self._idle.get_nowait().discard()

    def __enter__(self) -> RewardPool:
        """The pool itself; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close the pool."""
        self.close()

    def _living(self, worker: _Worker) -> _Worker:
        """This worker, or its replacement if it is dead."""
        if self._closed:
            raise TaskError("the reward pool was closed")
        if not worker.discarded and worker.process.poll() is None:
            return worker
        worker.discard()
        self._workers[self._workers.index(worker)] = fresh = _Worker(self._scorer)
        self.counters["restarts"] += 1
        return fresh

    async def _wait_ready(self, worker: _Worker) -> None:
        """Wait for the first frame of a new worker, at most start_timeout_s."""
        if worker.ready:
            return
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await worker.receive()
        except OSError as exc:  # a timeout is one, too
            worker.discard()
            if self._closed:
                raise TaskError("the reward pool was closed") from exc
            raise TaskError(
                f"a reward worker did not start within {self._start_timeout_s} s (exit status "
                f"{worker.process.returncode}; what it printed is in the log of this process)"
            ) from exc
        worker.ready = True

    async def _work(self, worker: _Worker, items: Sequence[Request], results: list[Score]) -> None:
        """Append outcomes; after a timeout or a crash the worker is dead and one item has failed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await worker.send([list(item) for item in items])
            for _ in items:
                async with asyncio.timeout(self._timeout_s):
                    reply = await worker.receive()
                results.append(self._outcome(reply))
        except TimeoutError:
            worker.discard()
            self.counters["timeouts"] += 1
            results.append(Score(None, f"timeout: no answer within {self._timeout_s} s", timed_out=True))
        except ConnectionError as exc:
            worker.discard()
            if self._closed:
                raise TaskError("the reward pool was closed") from exc
            self.counters["crashes"] += 1
            results.append(Score(None, f"crash: the worker died (exit status {worker.process.returncode})"))

    def _outcome(self, reply: dict[str, Any]) -> Score:
        reward, error = reply.get("reward"), reply.get("error", "")
        if reward is not None and 0.0 <= reward <= 1.0:
            self.counters["scored"] += 1
            return Score(reward)
        self.counters["errors"] += 1
        return Score(None, "error: " + (error or f"the verifier returned {reward}, rewards lie in [0, 1]"))


class _Worker:
    """One process and our end of its socket pair."""

    def __init__(self, scorer: str) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        self._buffer = bytearray()
        self.ready = False
        self.discarded = False
        with theirs:
            fd = theirs.fileno()
            # The parent's import path, so that a checkout that is not installed works, too.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "asyncrl.tasks.worker", str(fd), str(os.getpid()), scorer],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )

    async def send(self, message: Any) -> None:
        """Send one frame. Waits for buffer space; the caller sets the timeout."""
        await asyncio.get_running_loop().sock_sendall(self._sock, encode(message))

    async def receive(self) -> Any:
        """Next frame. Waits for the worker; the caller sets the timeout. ConnectionError at its end."""
        loop = asyncio.get_running_loop()
        while True:
            if len(self._buffer) >= LENGTH.size:
                end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
                if len(self._buffer) >= end:
                    body = bytes(self._buffer[LENGTH.size : end])
                    del self._buffer[:end]
                    return json.loads(body)
            data = await loop.sock_recv(self._sock, 2**16)
            if not data:
                raise ConnectionResetError("the worker closed its socket")
            self._buffer += data

    def kill(self) -> None:
        """SIGKILL and reap; the socket stays, so that a call that waits on it sees its end."""
        if self.process.poll() is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5.0)  # unblocked by the kernel; longer only in disk wait

    def discard(self) -> None:
        """Kill and close the socket. Nobody may be waiting on it."""
        self.kill()
        self._sock.close()
        self.discarded = True
