"""The requests of one server: n samples are n concurrent calls, aborted by id when nobody wants them any more.

Lives in one event loop. Knows no weights beyond the label that they have now.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.answers import Aborted, Asked, completion_of, has_stale_prefix
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.routes import RouteDecoder
from asyncrl.engines.sglang.tally import Tally
from asyncrl.errors import EngineError
from asyncrl.types import Completion, SamplingParams, Version

log = logging.getLogger(__name__)

_RESAMPLES = 2
"""How often a sample that the server aborted by itself is asked for again."""
_AGAIN_S = 1.0
"""An abort may overtake its request, which the server then does not know yet: it is sent again after this."""

Task = asyncio.Task["Completion | None"]


class Group:
    """The requests of one prompt. cut: whoever asked takes what is finished. live: ids at the server, by task.

    rows: route rows that whoever asked has of the tokens before; only those after are asked for.
    """

    def __init__(self, prompt_ids: list[int], n: int, sampling: SamplingParams, rows: int = 0) -> None:
        self.prompt_ids, self.n, self.sampling, self.rows = prompt_ids, n, sampling, rows
        self.cut = asyncio.Event()
        self.ending = False
        self.live: dict[asyncio.Task[Any], str] = {}


class Requests:
    """Samples groups while it is open. decoder: None when no routes are asked for. answer_s and overlap are as of
    SglangEngine.open.

    versions: by label, all that the server may have had; version and label are those of now.
    """

    def __init__(
        self,
        client: Client,
        decoder: RouteDecoder | None,
        name: str,
        label: str,
        version: Version,
        answer_s: float,
        overlap: bool,
    ) -> None:
        self.tally = Tally()
        self.label, self.version = label, version
        self.versions = {label: version}
        self.live: set[str] = set()
        self.heard = time.monotonic()
        """When the server last gave a sign of life."""
        self._client, self._decoder, self._name, self._answer_s = client, decoder, name, answer_s
        self._overlap = overlap
        self.life = uuid.uuid4().hex[:8]
        """Part of the names of weights and of cached prompts: a server may have had others of the same version."""
        self._open = asyncio.Event()
        self._failed, self._failure = asyncio.Event(), ""
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what the engine steers -------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True while the server samples: no load runs, and its weights are known."""
        return self._open.is_set()

    def open(self) -> None:
        """Let requests to the server."""
        self._open.set()
        self.heard = time.monotonic()
        self._count()

    def shut(self) -> None:
        """Keep new requests back; those at the server are paused with it."""
        self._open.clear()
        self._count()

    def fail(self, reason: str) -> None:
        """Every request that waits, and every later one, fails with EngineError(reason)."""
        if not self._failed.is_set():
            self._failure = reason
            self._failed.set()

    def check(self) -> None:
        """Raise EngineError when it has failed."""
        if self._failed.is_set():
            raise EngineError(self._failure)

    def spawn(self, job: Coroutine[Any, Any, None]) -> None:
        """Run job in the background, for as long as the loop runs."""
        task = asyncio.ensure_future(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abort(self, rids: Iterable[str], timeout_s: float) -> None:
        """Ask the server to end requests. Waits for its answers, at most timeout_s; a failure is only logged.

        Whoever needs them to end sees that they do not.
        """
        calls = [self._client.post(bodies.ABORT, bodies.abort(rid), timeout_s, admin=True) for rid in rids]
        failed = [exc for exc in await asyncio.gather(*calls, return_exceptions=True) if isinstance(exc, EngineError)]
        if failed and not self._failed.is_set():
            log.warning("%d of %d requests were not aborted: %s", len(failed), len(calls), failed[0])

    # --- one group ----------------------------------------------------------------------------------

    async def sample(self, group: Group, limit_s: float | None) -> list[Completion]:
        """Its samples in order; after limit_s or the group's cut those that are finished. Cancelling aborts them.

        EngineError, RouteError, TrajectoryError of any sample; the others are then aborted.
        """
        tasks = [asyncio.ensure_future(self._one(group)) for _ in range(group.n)]
        stops = [asyncio.ensure_future(event.wait()) for event in (group.cut, self._failed)]
        try:
            pending = await self._until(set(tasks), stops, limit_s)
            if pending:
                await self._cut_off(group, pending)
            finished = [task.result() for task in tasks if task.done() and not task.cancelled()]
            return [done for done in finished if done is not None]
        finally:
            if group.live:
                self.spawn(self.abort(list(group.live.values()), self._answer_s))
            for task in (*tasks, *stops):
                task.cancel()
            # Their errors are this one, or come of it.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until(self, pending: set[Task], stops: Sequence[asyncio.Task[Any]], limit_s: float | None) -> set[Task]:
        """Wait for tasks, at most limit_s and until one of stops. Returns those that are left; raises their errors."""
        ends = math.inf if limit_s is None else time.monotonic() + limit_s
        while pending and not any(stop.done() for stop in stops):
            left_s = None if math.isinf(ends) else max(0.0, ends - time.monotonic())
            waits: list[asyncio.Task[Any]] = [*pending, *stops]
            done, _ = await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            for task in pending & done:
                task.result()
            pending = pending - done
            if not done:
                break
        return pending

    async def _cut_off(self, group: Group, pending: set[Task]) -> None:
        """End what runs of a group. Waits for the server to end it, at most answer_s; EngineError after.

        A paused server ends nothing before it goes on: its requests are left to it, with an abort on the way.
        """
        group.ending = True
        ends = time.monotonic() + self._answer_s
        while pending and self.is_open:
            for task in pending - group.live.keys():
                task.cancel()
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise EngineError(
                    f"{self._client.url} hangs: {len(pending)} aborted requests, the first "
                    f"{next(iter(group.live.values()), 'unknown')}, did not end within {self._answer_s:g} s"
                )
            await self.abort(list(group.live.values()), left_s)
            done, pending = await asyncio.wait(pending, timeout=min(_AGAIN_S, self._answer_s))
            self.check()
            for task in done:
                if not task.cancelled():
                    task.result()

    async def _one(self, group: Group) -> Completion | None:
        """One sample; None when it was cut off."""
        aborts = 0
        while True:
            await self._until_open()
            rid = f"{self._name}-{uuid.uuid4().hex}"
            asked = Asked(rid, len(group.prompt_ids), group.sampling, self.version, group.rows)
            reply = await self._ask(group, asked)
            done = completion_of(reply, asked, self.versions, self._decoder, self._overlap)
            if isinstance(done, Aborted):
                self.tally.add("tokens", done.num_tokens)
                if group.ending:
                    return None
                aborts += 1
                if aborts > _RESAMPLES:
                    raise EngineError(f"{self._client.url} aborted {aborts} requests, the last {rid}: {done.message}")
                log.warning("%s was aborted by the server, and is sampled again: %s", rid, done.message)
                self.tally.add("resampled")
                continue
            self.tally.sample(asked.num_prompt, done)
            if not has_stale_prefix(done, asked):
                return done
            self.tally.add("stale_prefix")

    async def _until_open(self) -> None:
        """Wait until the server samples; the caller's limit ends that."""
        self.check()
        self.tally.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.tally.waiting -= 1

    async def _ask(self, group: Group, asked: Asked) -> Any:
        """The reply to one request. Waits as long as the connection holds: the caller's limit or `fail` ends it."""
        task = asyncio.current_task()
        assert task is not None
        body = bodies.generate(
            group.prompt_ids, asked.rid, group.sampling,
            routes=self._decoder is not None, cache_key=f"{self.life}/{self.label}", routes_from=group.rows,
        )  # fmt: skip
        group.live[task] = asked.rid
        self.live.add(asked.rid)
        self._count()
        try:
            reply = await self._client.post(bodies.GENERATE, body, math.inf)
        finally:
            self.live.discard(asked.rid)
            self._count()
        # Only now: a request whose reply never came has to be aborted.
        del group.live[task]
        self.heard = time.monotonic()
        return reply

    def _count(self) -> None:
        self.tally.running = len(self.live)
        self.tally.busy(bool(self.live) and self.is_open)
