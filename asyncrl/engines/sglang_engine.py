"""An SGLang server as an engine, in token ids and log-probs. Knows no queue, no task and no weight carrier.

All HTTP runs in a thread of its own, so any loop or thread may call. Weights come through an Updater, between two
decode steps of the server.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.base import Source, Turn, check_request, check_turn
from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.loop_thread import LoopThread
from asyncrl.engines.sglang.requests import Group, Requests
from asyncrl.engines.sglang.routes import RouteDecoder
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.types import Completion, ModelInfo, SamplingParams, Version

START = Version(0, -1)
"""What the weights that a server started with are called."""
_CLOSE_S = 2.0
"""How long close waits for the last aborts. With generator.leave.LEAVE_S and the server's end this may exceed the
default run.shutdown_s; what is left is killed then."""
_WATCH_S = 10.0
"""Longest time between two looks at a server that has requests."""


class Updater(Protocol):
    """Brings weights into the server; asyncrl.engines.sglang.update has it."""

    torn: bool
    """True while the server's weights are unknown; it is paused then."""

    async def update(self, label: str, source: Source) -> None:
        """Load a version and call it label. WeightSyncError, with torn as it then is."""
        ...

    async def reset(self) -> None:
        """Begin with a server of unknown state. WeightSyncError."""
        ...


class SglangEngine:
    """Samples on one server; see `asyncrl.engines.base.Engine`. Made by `open`."""

    def __init__(
        self,
        client: Client,
        info: ModelInfo,
        requests: Requests,
        updater: Updater,
        max_length: int,
        answer_s: float,
        thread: LoopThread,
    ) -> None:
        self._client, self._info, self._requests, self._updater = client, info, requests, updater
        self._max_length, self._answer_s, self._thread = max_length, answer_s, thread
        self._lock = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        client: Client,
        info: ModelInfo,
        *,
        num_hidden_layers: int,
        label: str,
        max_length: int,
        name: str,
        updater: Updater,
        answer_s: float = 60.0,
        routes: bool = True,
        overlap: bool = True,
    ) -> SglangEngine:
        """An engine on a server that flags.check accepted. EngineError when the server cannot be made ready.

        num_hidden_layers and info are of the model, label is the server's weight_version, max_length bounds P +
        max_new_tokens. name is unique in the run. answer_s: longest silence while it samples, and longest wait for an
        answer that needs no sampling. routes: whether a MoE model's are asked for. overlap: false for a server with
        --disable-overlap-schedule; with others, one token of a response is left out of the loss at every load. The
        engine uses client and updater in a loop of its own, and closes the connections that they make there.
        """
        decoder = RouteDecoder(info, num_hidden_layers) if routes and info.is_moe else None
        requests = Requests(client, decoder, name, label, START, answer_s, overlap)
        engine = cls(client, info, requests, updater, max_length, answer_s, LoopThread(f"sglang-{name}"))
        try:
            await engine._thread.run(engine._begin)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def version(self) -> Version:
        """Version of the weights in use; (0, -1) are those that the server started with."""
        return self._requests.version

    @property
    def torn(self) -> bool:
        """True while the server's weights are unknown: it samples nothing until a load succeeds."""
        return self._updater.torn

    def describe(self) -> ModelInfo:
        """MoE layers, experts, top-k, vocabulary and fingerprint."""
        return self._info

    def stats(self) -> dict[str, float]:
        """Counters since start; gauges `running` requests, those `waiting` for a load, `torn`. busy_s without loads."""
        return self._requests.tally.stats() | {"torn": float(self.torn)}

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        n: int,
        sampling: SamplingParams,
        limit_s: float | None = None,
        cut: asyncio.Event | None = None,
        turn: Turn | None = None,
    ) -> list[Completion]:
        """n samples of one prompt. Cancelling the task aborts them.

        Waits as long as the server shows signs of life. After limit_s, or when cut is set, it gives those that are
        finished, in order; the others are aborted, which may take answer_s more. EngineError when refused, unreachable
        or hung, or a reply makes no sense; RouteError or TrajectoryError for a sample that cannot be used.
        turn: the whole prompt is sent, and the server finds what it has of it in its cache of prefixes, where nothing
        of older weights counts; only routes from turn.rows on are asked for.
        """
        check_request(prompt_ids, n, sampling, self._info.vocab_size, self._max_length)
        check_turn(prompt_ids, n, turn)
        if sampling.seed is not None:
            raise EngineError("SGLang takes a seed for the server (--random-seed), not for a request; leave it out")
        group = Group(np.asarray(prompt_ids).tolist(), n, sampling, 0 if turn is None else turn.rows)
        watcher = None if cut is None else asyncio.ensure_future(self._pass_on(cut, group))
        try:
            return await self._thread.run(lambda: self._requests.sample(group, limit_s))
        finally:
            if watcher is not None:
                watcher.cancel()

    def forget(self, conversation: str) -> None:
        """Nothing is kept here: the server has its own cache of prefixes."""

    async def load(self, version: Version, source: Source) -> None:
        """Load weights; requests that come meanwhile wait. WeightSyncError leaves the label as it was.

        Afterwards the server is as it was, or `torn`. How long it may take is the updater's.
        """
        await self._thread.run(lambda: self._load(version, source))

    def fail(self, reason: str) -> None:
        """What waits, and all that comes later, fails with EngineError(reason): its server's process has ended."""
        self._thread.call(lambda: self._requests.fail(reason))

    def close(self) -> None:
        """Abort what runs; what waits fails with EngineError. Waits for the server at most 2 s, twice."""
        self._thread.close(self._end, _CLOSE_S)

    async def _pass_on(self, cut: asyncio.Event, group: Group) -> None:
        """In the caller's loop. Waits for cut, until its generate ends."""
        await cut.wait()
        self._thread.call(group.cut.set)

    # --- in the thread ----------------------------------------------------------------------------

    async def _begin(self) -> None:
        try:
            await self._updater.reset()
        except WeightSyncError as exc:
            raise EngineError(f"{self._client.url} cannot be used: {exc}") from exc
        if not self.torn:
            self._requests.open()
        self._requests.spawn(self._watch())

    async def _end(self) -> None:
        requests = self._requests
        requests.fail(f"the engine on {self._client.url} is closed")
        try:
            await requests.abort(list(requests.live), _CLOSE_S)
        finally:
            await self._client.close()

    async def _load(self, version: Version, source: Source) -> None:
        async with self._lock:
            requests, started = self._requests, time.perf_counter()
            requests.check()
            if version < requests.version:
                raise WeightSyncError(f"version {version} is older than {requests.version}, which is held")
            # A name of this engine's own: another run on the same server has versions of the same number.
            label, known = f"{version}+{requests.life}", requests.versions
            if label in known:
                # A re-sync: what was cached under the version's first label may be of other weights.
                label = f"{label}.{len(known)}"
            # Running requests go on under the new label before the updater says that it is through.
            requests.versions = known | {label: version}
            requests.shut()
            try:
                await self._updater.update(label, source)
                requests.version, requests.label = version, label
                requests.tally.add("loads")
            except BaseException:
                if not self.torn:
                    requests.versions = known
                raise
            finally:
                requests.tally.add("load_s", time.perf_counter() - started)
                if not self.torn:
                    requests.open()

    async def _watch(self) -> None:
        """While requests run, ask whether the server still samples; answer_s without a sign of life fail them all.

        A server that is paused samples nothing, and says so: it is not asked. Each answer is waited for answer_s.
        """
        requests = self._requests
        while True:
            await asyncio.sleep(min(_WATCH_S, self._answer_s / 4))
            if not requests.live or not requests.is_open:
                requests.heard = time.monotonic()
                continue
            asked = time.monotonic()
            try:
                await self._client.get(bodies.HEALTH, self._answer_s)
                requests.heard = max(requests.heard, asked)
            except EngineError as exc:
                silence = time.monotonic() - requests.heard
                if requests.live and requests.is_open and silence >= self._answer_s:
                    url = self._client.url
                    requests.fail(f"{url} hangs: no sign of life for {silence:.0f} s; {exc} (somebody else paused it?)")
                    return
