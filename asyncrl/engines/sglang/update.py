"""One weight update of one server: pause, send or load, verify, continue. Knows no request and no version arithmetic.

A server is `torn` from the first byte that may have changed until an update has succeeded: it stays paused, so nothing
is sampled from weights that nobody knows. The pause keeps running requests and their KV (`in_place`), and so does the
update: requests must carry the version as the key of their cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from asyncrl.engines.base import Broadcast, Source
from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client, Refused, Unreachable
from asyncrl.engines.sglang.expects import NAMED, Needs, check, stored_in
from asyncrl.engines.worker import in_thread
from asyncrl.errors import ConfigError, VersionGone, WeightSyncError
from asyncrl.models.names import some

log = logging.getLogger(__name__)

T = TypeVar("T")

UNKNOWN = "unknown"
"""What a server's weights are called while they change: whoever finds that label knows that they are no version."""
_SOURCE_S = 120.0
"""What a source may take beyond timeout_s: the learner may have to start a process that imports torch."""
_CLEAN_UP_S = 10.0
"""Longest call after a failure: the caller wants to hear of it."""


class Updater:
    """Loads versions into one server, one at a time.

    name: of the engine, unique in the run. ranks: processes of the server that hold weights. timeout_s: longest step.
    verify: compare the server's checksums before a version counts. expected: what the server's model is made of
    (expects.needs).
    """

    def __init__(self, client: Client, name: str, ranks: int, timeout_s: float, verify: bool, expected: Needs) -> None:
        self.torn = False
        """True while the server's weights are unknown; it is paused then."""
        self._client, self._name, self._ranks, self._timeout_s = client, name, ranks, timeout_s
        self._verify, self._expected = verify, expected
        self._group: str | None = None
        self._paused = self._is_open = False
        self._label = ""

    async def reset(self) -> None:
        """Begin with a server that was just started, or that another process had before.

        One that was left in the middle of an update is torn: it stays paused. Any other goes on. WeightSyncError when
        it does not answer.
        """
        self._group, self._is_open, self._label = None, False, ""
        await self._pause()
        with self._step("asking for its version"):
            info = await self._client.get(bodies.MODEL_INFO, self._timeout_s)
        with self._step("closing an earlier update"), contextlib.suppress(Refused):
            await self._post(bodies.END_UPDATE, bodies.end_update())
            info = {"weight_version": UNKNOWN}  # one was open
        self.torn = info.get("weight_version") == UNKNOWN
        if self.torn:
            log.warning("%s: an update was left half done; the server samples nothing until one succeeds", self._name)
        else:
            await self._continue()

    async def update(self, label: str, source: Source) -> None:
        """Load the version that is to be called label. WeightSyncError names the engine, the step and the reason.

        After a failure the server is as it was and goes on, or it is torn. Cancelling is a failure like others.
        """
        self._label, done = label, False
        held = contextlib.ExitStack()  # a folder stays until its checksums are compared
        try:
            match source.kind:
                case "broadcast":
                    await self._receive(source)
                case "folder":
                    await self._load(source, held)
                case _:
                    raise self._failure("SGLang needs weights.carrier=collective or disk")
            if self._verify:
                await self._compare(source)
            await self._continue()
            self.torn, done = False, True
        finally:
            held.close()
            if not done:
                await self._give_up(source)

    async def _receive(self, source: Source) -> None:
        sending = await self._begin(source)
        with self._step("comparing the tensors that are sent with the server's"):
            check((spec for bucket in sending.buckets for spec in bucket), self._expected)
        if sending.is_new:
            await self._join(sending)
        await self._pause()
        await self._open()
        await self._mark()
        for number, bucket in enumerate(sending.buckets, 1):
            # The label comes with the last one: requests note the change when all is there.
            label = self._label if number == len(sending.buckets) else None
            with self._step(f"bucket {number} of {len(sending.buckets)}"):
                await self._post(bodies.UPDATE_DISTRIBUTED, bodies.update_distributed(bucket, sending.group, label))
        await self._close()

    async def _begin(self, source: Source) -> Broadcast:
        """Have the learner send; anew, when it goes on with a group that this server is not in."""
        for _ in range(2):
            ask = await self._blocking("asking the learner to send", lambda: source.broadcast(self._name, self._ranks))
            if ask.is_new or ask.group == self._group:
                return ask
            await in_thread(lambda: source.leave(self._name))
        raise self._failure(f"the learner goes on with the group {ask.group}, which this server is not in")

    async def _join(self, sending: Broadcast) -> None:
        """Leave the group of before, whose sender may be dead, and join the new one."""
        old, self._group = self._group, None
        if old is not None:
            with self._step("leaving the group of before"), contextlib.suppress(Refused):
                await self._post(bodies.DESTROY_GROUP, bodies.destroy_group(old))
        body = bodies.init_group(*sending.address, sending.group, self._ranks, sending.backend)
        with self._step("joining the group"):
            await self._post(bodies.INIT_GROUP, body)
        self._group = sending.group

    async def _load(self, source: Source, held: contextlib.ExitStack) -> None:
        folder = await self._blocking("opening the folder", lambda: held.enter_context(source.folder()))
        with self._step("comparing the folder with the server's"):
            check(await in_thread(lambda: stored_in(folder)), self._expected)
        await self._pause()
        await self._close_earlier()
        # SGLang cannot go back: it would read the new folder again.
        self.torn = True
        await self._mark()
        with self._step(f"loading {folder}"):
            await self._post(bodies.UPDATE_DISK, bodies.update_disk(str(folder), self._label))

    async def _pause(self) -> None:
        self._paused = True
        with self._step("pausing"):
            await self._post(bodies.PAUSE, bodies.pause("in_place"))

    async def _continue(self) -> None:
        self._paused = False
        with self._step("continuing"):
            await self._post(bodies.CONTINUE, bodies.resume())

    async def _open(self) -> None:
        """Open the session of an update; weights that were packed for the kernels are unpacked here already."""
        await self._close_earlier()
        before, self.torn, self._is_open = self.torn, True, True
        with self._step("beginning"):
            try:
                await self._post(bodies.BEGIN_UPDATE, bodies.begin_update())
            except Refused:
                # It may have one open from before; the next update closes that first.
                self.torn = before
                raise

    async def _mark(self) -> None:
        with self._step("marking the weights as unknown"):
            await self._post(bodies.MARK_VERSION, bodies.mark_version(UNKNOWN))

    async def _close(self) -> None:
        with self._step("ending"):
            await self._post(bodies.END_UPDATE, bodies.end_update())
        self._is_open = False

    async def _close_earlier(self) -> None:
        """Close the session that a failed update may have left open: with one, the server begins no other."""
        if self._is_open:
            with self._step("closing an earlier update"), contextlib.suppress(Refused):  # there was none
                await self._post(bodies.END_UPDATE, bodies.end_update())
            self._is_open = False

    async def _compare(self, source: Source) -> None:
        """Compare the server's checksums with what they should be."""
        with self._step("asking for checksums"):
            found = _checksums(await self._post(bodies.CHECK, bodies.check_weights()), self._ranks)
        names = sorted(set[str].intersection(*(set(sums) for sums in found)))
        wanted = await self._blocking("computing checksums", lambda: source.checksums(names, self._ranks))
        with self._step("comparing checksums"):
            if not wanted:
                raise WeightSyncError(
                    "none of the server's tensors can be compared with what was sent; set weights.verify=off if this "
                    "server keeps them in a form of its own"
                )
            bad = sorted({name for sums in found for name, good in wanted.items() if sums.get(name) not in good})
            if bad:
                raise WeightSyncError(
                    f"{len(bad)} of {len(wanted)} compared tensors are not what was sent: {some(bad, NAMED)}; if they "
                    "are the same ones each time, the server keeps them in a form of its own: set weights.verify=off"
                )

    async def _give_up(self, source: Source) -> None:
        """After a failure: free the server from the broadcast, and let it go on if its weights are whole."""
        if source.kind == "broadcast":
            await in_thread(lambda: source.leave(self._name))
        calls = []
        if self.torn:
            # It may have gone on, or have the new label already, and nobody saw the answer.
            calls = [(bodies.PAUSE, bodies.pause("in_place")), (bodies.MARK_VERSION, bodies.mark_version(UNKNOWN))]
        elif self._paused:
            calls = [(bodies.CONTINUE, bodies.resume())]
        try:
            for path, body in calls:
                await self._client.post(path, body, _CLEAN_UP_S, admin=True)
            self._paused = self.torn
        except (Refused, Unreachable) as exc:
            self.torn = True
            log.warning("%s: its state is unknown after a failed update, it counts as paused: %s", self._name, exc)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._client.post(path, dict(body), self._timeout_s, admin=True)

    async def _blocking(self, what: str, job: Callable[[], T]) -> T:
        """The result of a source's method, which blocks."""
        with self._step(what):
            async with asyncio.timeout(self._timeout_s + _SOURCE_S):
                return await in_thread(job)

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[None]:
        """Errors of a step become WeightSyncErrors that say where it happened."""
        try:
            yield
        except VersionGone as exc:
            raise VersionGone(str(self._failure(f"{what}: {exc}"))) from exc
        except TimeoutError as exc:
            raise self._failure(f"{what}: not done after {self._timeout_s + _SOURCE_S:g} s") from exc
        except (Refused, Unreachable, ConfigError, WeightSyncError) as exc:
            raise self._failure(f"{what}: {exc}") from exc

    def _failure(self, what: str) -> WeightSyncError:
        return WeightSyncError(f"{self._name}: {f'version {self._label}: ' if self._label else ''}{what}")


def _checksums(reply: Any, ranks: int) -> list[Mapping[str, str]]:
    """The checksums of each rank in the answer of /weights_checker. WeightSyncError for another answer."""
    try:
        found: list[Mapping[str, str]] = [dict(rank["checksums"]) for rank in reply["ranks"]]
    except (KeyError, TypeError, ValueError) as exc:
        raise WeightSyncError(f"the server's checksums have an unknown form: {str(reply)[:200]}") from exc
    if len(found) != ranks:
        raise WeightSyncError(f"checksums of {len(found)} ranks came, the server should have {ranks}")
    return found
