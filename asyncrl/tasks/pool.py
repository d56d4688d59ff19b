"""Rewards in worker processes: deadlines that hold, and no failure that looks like a reward of 0.

Workers are fresh interpreters (no fork, no torch), each on its own socket pair, and score on their
main thread. One that overruns or dies is killed and replaced; the other items of its batch go on.
Knows nothing of tokens or groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncrl.errors import TaskError
from asyncrl.tasks.processes import Child
from asyncrl.tasks.rewards import USER

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.types import Prompt

MAX_PENDING_CHARS = 2**27
"""Characters of all responses that are being scored; further calls wait for room."""
CHUNK_CHARS = 2**22
"""Characters of responses that are sent to a worker at once, unless one response is longer."""


class Request(NamedTuple):
    """One response to score. source: name of the verifier, or `user`. extra: JSON of what else a reward reads."""

    source: str
    text: str | None
    answer: str
    extra: str = ""
    data_source: str = ""
    prompt: str = ""


def request_of(config: Config, prompt: Prompt, text: str) -> Request:
    """A response to a prompt, to be scored as the run is configured: by task.reward, else by the prompt's verifier."""
    source = prompt.source if config.task.reward is None else USER
    return Request(source, text, prompt.answer, prompt.extra, prompt.data_source, prompt.text)


class Score(NamedTuple):
    """Outcome of one item: a reward (in [0, 1] but for users' own), or None and the reason why there is none.

    timed_out: the verifier gave no answer within its deadline. parts: named parts of the reward. extracted: the answer
    that the response gives, as two equal ones are written alike, or "".
    """

    reward: float | None
    error: str = ""
    timed_out: bool = False
    parts: Mapping[str, float] = {}
    extracted: str = ""


class RewardPool:
    """Worker processes that run verifiers. One event loop and one thread use a pool.

    workers: processes, started at once. timeout_s: longest time of ONE call of a verifier, counted from when a worker
    turns to it. scorer: `module:function` of (source, text, answer) -> reward or Verdict. reward: task.reward, for
    items of source `user`; one that takes groups is called once for all items of a call. memory_bytes: address space
    of a worker, 0 for no limit. The workers die with the thread that made them, so a pool belongs to a thread that
    lives as long as it.

    `counters`: scored, errors (the verifier raised, ran out of memory or returned what is no reward), timeouts,
    crashes, restarts.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        scorer: str = "asyncrl.tasks.rewards:judge",
        start_timeout_s: float = 60.0,
        *,
        reward: str | None = None,
        memory_bytes: int = 0,
    ) -> None:
        """Start the processes. Raises TaskError for workers < 1 or timeout_s <= 0, or when none can be started."""
        if workers < 1 or timeout_s <= 0:
            raise TaskError(f"a reward pool needs workers >= 1 and timeout_s > 0, got {workers} and {timeout_s}")
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._arguments = (scorer, str(memory_bytes), reward or "")
        self._closed = False
        self._pending, self._freed = 0, asyncio.Event()
        self.counters: Counter[str] = Counter(scored=0, errors=0, timeouts=0, crashes=0, restarts=0)
        self._workers = [_Worker(*self._arguments) for _ in range(workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def start(self) -> None:
        """Wait for one worker, at most start_timeout_s. Raises TaskError with the reason when it does not start."""
        if self._closed:
            raise TaskError("the reward pool is closed")
        await self._lane(await self._idle.get(), _Batch([], 1))

    async def score(self, source: str, text: str | None, answer: str) -> float:
        """Reward of one response. Raises TaskError on a timeout, a crash or an error of the verifier."""
        (outcome,) = await self.score_many([Request(source, text, answer)])
        if outcome.reward is None:
            raise TaskError(f"no reward for a response of source {source!r}: {outcome.error}")
        return outcome.reward

    async def score_many(self, items: Sequence[Request | tuple[str, str | None, str]]) -> list[Score]:
        """Outcomes of several responses, in order, spread over the workers that are free.

        Waits for a free worker; each worker is freed by its replies or by the deadline of its item.
        Raises TaskError when the pool is closed or a worker cannot be started.
        """
        if self._closed:
            raise TaskError("the reward pool is closed")
        batch = _Batch([Request(*item) for item in items], len(self._workers))
        if not batch.requests:
            return []
        async with self._admitted(sum(len(r.text or "") for r in batch.requests)):
            try:
                await self._lane(await self._idle.get(), batch)
                for lane in batch.others:  # one may call in another
                    await lane
            finally:
                for lane in batch.others:
                    lane.cancel()
                await asyncio.gather(*batch.others, return_exceptions=True)
        return [batch.results[i] for i in range(len(batch.requests))]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        return [worker.process.pid for worker in self._workers if worker.alive]

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

    @contextlib.asynccontextmanager
    async def _admitted(self, size: int) -> AsyncIterator[None]:
        """Waits until the texts of the calls before leave room for these; a call alone always has it."""
        while self._pending and self._pending + size > MAX_PENDING_CHARS:
            self._freed.clear()
            await self._freed.wait()
        self._pending += size
        try:
            yield
        finally:
            self._pending -= size
            self._freed.set()

    async def _lane(self, worker: _Worker, batch: _Batch) -> None:
        """One worker takes chunks of the batch until none is left; free workers are called in to help."""
        clean = False
        try:
            while True:
                worker = self._living(worker)
                await self._wait_ready(worker)
                chunk = batch.take(worker.takes_groups)
                for _ in range(min(len(batch.todo), self._idle.qsize())):
                    batch.others.append(asyncio.create_task(self._help(batch)))
                if chunk:
                    await self._work(worker, batch, chunk)
                if not batch.todo:
                    break
            clean = True
        finally:
            if not clean or self._closed:
                worker.discard()  # cancelled: its late replies must not answer the next call
            self._put_back(worker)

    async def _help(self, batch: _Batch) -> None:
        """Another lane, if a worker is still free."""
        # Taken here and not by the caller: a task that is cancelled before it begins would never give it back.
        if batch.todo and not self._idle.empty():
            await self._lane(self._idle.get_nowait(), batch)

    def _put_back(self, worker: _Worker) -> None:
        """For the next call; a dead one is replaced now, so that nobody waits for its start."""
        with contextlib.suppress(TaskError):  # closed, or no process can be started now: the next call says so
            worker = self._living(worker)
        self._idle.put_nowait(worker)

    def _living(self, worker: _Worker) -> _Worker:
        """This worker, or its replacement if it is dead."""
        if self._closed:
            raise TaskError("the reward pool was closed")
        if not worker.discarded and worker.alive:
            return worker
        worker.discard()
        self._workers[self._workers.index(worker)] = fresh = _Worker(*self._arguments)
        self.counters["restarts"] += 1
        return fresh

    async def _wait_ready(self, worker: _Worker) -> None:
        """Wait for the first frame of a new worker, at most start_timeout_s."""
        if worker.ready:
            return
        reason = "what it printed is in the log of this process"
        try:
            async with asyncio.timeout(self._start_timeout_s):
                first = await worker.channel.receive()
        except OSError as exc:  # a timeout is one, too
            first = {}
            worker.discard()
            if self._closed:
                raise TaskError("the reward pool was closed") from exc
        if "failed" in first:
            worker.discard()
            reason = first["failed"]
        if "ready" not in first:
            raise TaskError(
                f"a reward worker did not start within {self._start_timeout_s} s (exit status "
                f"{worker.process.returncode}): {reason}"
            )
        worker.ready, worker.takes_groups = True, bool(first.get("groups"))

    async def _prepare(self, worker: _Worker, source: str) -> None:
        """Have the worker load what a verifier needs, which takes none of the time of an item."""
        if source in worker.prepared:
            return
        async with asyncio.timeout(self._start_timeout_s):
            await worker.channel.send(["prepare", source])
            await worker.channel.receive()
        worker.prepared.add(source)

    async def _work(self, worker: _Worker, batch: _Batch, chunk: Sequence[int]) -> None:
        """Outcomes of a chunk. After a timeout or a crash the worker is dead, and what it had not begun goes back."""
        requests = [batch.requests[i] for i in chunk]
        as_group = batch.as_group
        left = deque(chunk)
        try:
            for source in {r.source for r in requests}:
                await self._prepare(worker, source)
            async with asyncio.timeout(self._timeout_s):
                await worker.channel.send(["group" if as_group else "score", [list(r) for r in requests]])
            while left:
                async with asyncio.timeout(self._timeout_s):
                    reply = await worker.channel.receive()
                batch.results[left.popleft()] = self._outcome(reply, requests[-1].source)
                if reply.get("leave"):
                    worker.discard()
                    break
        except TimeoutError:
            worker.discard()
            lost = Score(None, f"timeout: no answer within {self._timeout_s} s", timed_out=True)
            self._lose(batch, left, lost, "timeouts")
        except ConnectionError as exc:
            worker.discard()
            if self._closed:
                raise TaskError("the reward pool was closed") from exc
            lost = Score(None, f"crash: the worker died (exit status {worker.process.returncode})")
            self._lose(batch, left, lost, "crashes")
        batch.todo.extendleft(reversed(left))

    def _lose(self, batch: _Batch, left: deque[int], lost: Score, counter: str) -> None:
        """The item that the worker was at has no reward; of a group in one call, none that is left has."""
        for _ in range(len(left) if batch.as_group else 1):
            batch.results[left.popleft()] = lost
            self.counters[counter] += 1

    def _outcome(self, reply: dict[str, Any], source: str) -> Score:
        reward, error, timed_out = reply.get("reward"), reply.get("error", ""), bool(reply.get("timed_out"))
        if reward is not None and math.isfinite(reward) and (source == USER or 0.0 <= reward <= 1.0):
            self.counters["scored"] += 1
            return Score(reward, parts=reply.get("parts", {}), extracted=reply.get("extracted", ""))
        self.counters["timeouts" if timed_out else "errors"] += 1
        error = error or f"the verifier returned {reward}, rewards lie in [0, 1]"
        return Score(None, ("timeout: " if timed_out else "error: ") + error, timed_out)


def pool_of(config: Config) -> RewardPool:
    """The pool that scores responses as a run is configured, started. The pool belongs to the calling thread."""
    g = config.generator
    return RewardPool(
        g.reward_workers, g.reward_timeout_s, reward=config.task.reward, memory_bytes=g.reward_memory_bytes
    )


@dataclass(slots=True)
class _Batch:
    """The items of one call, those that nobody has begun, and the lanes that help with them."""

    requests: list[Request]
    workers: int
    as_group: bool = False
    todo: deque[int] = field(init=False)
    results: dict[int, Score] = field(default_factory=dict)
    others: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.todo = deque(range(len(self.requests)))

    def take(self, takes_groups: bool) -> list[int]:
        """The next chunk: all items of a reward that judges groups, else a share that leaves some for others."""
        if takes_groups and self.todo and self.requests[0].source == USER:
            self.as_group = True
            chunk, self.todo = list(self.todo), deque()
            return chunk
        most = len(self.todo) if self.workers == 1 else math.ceil(len(self.todo) / (2 * self.workers))
        chunk, chars = list[int](), 0
        while self.todo and len(chunk) < most:
            chars += len(self.requests[self.todo[0]].text or "")
            if chunk and chars > CHUNK_CHARS:
                break
            chunk.append(self.todo.popleft())
        return chunk


class _Worker(Child):
    """One process, what it said of itself, and what it has loaded."""

    def __init__(self, scorer: str, memory_bytes: str, reward: str) -> None:
        super().__init__("asyncrl.tasks.worker", scorer, memory_bytes, reward)
        self.ready = self.discarded = self.takes_groups = False
        self.prepared: set[str] = set()

    def discard(self) -> None:
        """Kill and close the socket. Nobody may be waiting on it."""
        self.close()
        self.discarded = True
