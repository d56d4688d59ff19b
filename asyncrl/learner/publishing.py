"""Versions on their way to the generators, written while the learner goes on with its next update.

The copy to the host is a collective and made at once; rank 0 then writes it on a thread of its own, and the learner's
thread announces it when it is complete. All ranks hold the same state, so that they decide alike.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from asyncrl.errors import TrainingError, WeightSyncError
from asyncrl.learner.publish import Cast, host_copy
from asyncrl.learner.shard import Policy, World
from asyncrl.learner.table import all_max
from asyncrl.types import Version
from asyncrl.weights.publisher import Publisher

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest wait for a version that is being written when the learner ends."""

ANNOUNCE_S = 0.05
"""Longest wait for a version that is being written before a step begins: within a step it is announced between
micro-batches only, and generators sample from the old one until then."""

Tell = Callable[[Version, str, int], None]
"""Tells replay of a version, its source and how many batches made it."""


class Keeper(Protocol):
    """Sees every version on rank 0 that is about to be published, as it lies on the host."""

    def offer(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        """Take it, or not. Must not change the weights, and must not wait for a disk."""

    def withdraw(self, version: Version) -> None:
        """It could not be published."""


_SLICE_S = 1.0
_WRITTEN, _FAILED, _WRITING = 0.0, 1.0, 2.0


class Due(NamedTuple):
    """When versions are published: every `sync_every` updates. A token may be `max_lag` updates old when used."""

    sync_every: int
    max_lag: int

    def at(self, update: int, newest: int) -> bool:
        """True when a version of `update` should follow the newest one (-1: none yet)."""
        return update != newest and (newest < 0 or update // self.sync_every > newest // self.sync_every)

    def needed(self, update: int, published: int, num_batches: int) -> bool:
        """True when a take of num_batches at `update` cannot do with what is sampled from the published version."""
        return published < 0 or update + num_batches - 1 - published > self.max_lag


class Publishing:
    """One per rank."""

    def __init__(
        self, publisher: Publisher | None, world: World, due: Due, timeout_s: float, tell: Tell,
        dtype: Cast | None = None,
    ) -> None:  # fmt: skip
        """publisher: on rank 0, None elsewhere. timeout_s: longest time that one version may take to be written.

        tell: called once per version on rank 0, by the learner's thread, when it is complete. dtype: in which weights
        are published; None as they are held.
        """
        self._publisher, self._world, self._due, self._timeout_s = publisher, world, due, timeout_s
        self._tell, self._dtype = tell, dtype
        self.keeper: Keeper | None = None
        self.paused = False
        """Publish nothing but what is final (weights.paused). The same on all ranks."""
        self._job: _Job | None = None
        self._began = 0.0
        self.pending: Version | None = None
        """Being written, or written and not yet settled."""
        self.published = -1
        """Update of the newest version that came out, -1 before the first."""
        self.sync_s = 0.0
        """Seconds that the learner stood still for versions; whoever records it sets it to 0."""
        self.write_s = 0.0
        """Seconds that the last version took to write."""

    @property
    def unannounced(self) -> bool:
        """True while a version is on its way that replay does not know of. Always False off rank 0."""
        return self._job is not None and not self._job.announced

    def follow(self, due: Due, paused: bool) -> None:
        """Publish by other settings from now on."""
        self._due, self.paused = due, paused

    def held(self, update: int, num_batches: int) -> bool:
        """True when only the pause keeps back a version without which a take of num_batches could not be had."""
        needed = self._due.needed(update, self.published, num_batches) and self._due.at(update, self.published)
        return self.paused and self.pending is None and needed

    def publish_if_due(
        self, policy: Policy, version: Version, batches: int, num_batches: int, final: bool = False
    ) -> None:
        """Begin to publish at update 0, every sync_every updates and at the end; begin again what failed. A collective.

        batches: that made this version. num_batches: of the next take. The learner goes on meanwhile, but waits for a
        version without which that take could not be had, for the first one and for the final one.
        """
        started = time.monotonic()
        try:
            self._publish_if_due(policy, version, batches, num_batches, final)
        finally:
            self.sync_s += time.monotonic() - started

    def _publish_if_due(self, policy: Policy, version: Version, batches: int, num_batches: int, final: bool) -> None:
        u = version.update

        def needed() -> bool:
            return self._due.needed(u, self.published, num_batches)

        self._settle(needed() or final)
        if self.paused and not final:
            return
        if self.pending is not None or not (self._due.at(u, self.published) or (final and u != self.published)):
            return
        self._begin(policy, version, batches)
        self._settle(needed() or final)
        if self.pending is None and needed():
            raise TrainingError(f"no version could be published since update {self.published}; see the error above")

    def _begin(self, policy: Policy, version: Version, batches: int) -> None:
        """Copy the weights to the host and start writing them. A collective; nothing may be pending."""
        assert self.pending is None, f"{self.pending} is still being written"
        weights = host_copy(policy, self._world, self._dtype)
        self.pending, self._began = version, time.monotonic()
        if self.keeper is not None:
            self.keeper.offer(version, weights)
        if self._publisher is not None:
            self._job = _Job(self._publisher, version, weights, batches)

    def announce_soon(self) -> None:
        """Tell replay of a version that is complete or nearly so. No collective."""
        started = time.monotonic()
        self.announce(ANNOUNCE_S)
        self.sync_s += time.monotonic() - started

    def announce(self, wait_s: float = 0.0) -> bool:
        """Tell replay of a version that is complete; waits for it at most wait_s. True when it did. No collective."""
        job = self._job
        if job is None or job.announced or not job.wait(wait_s) or job.source is None:
            return False
        job.announced = True
        self._tell(job.version, job.source, job.batches)
        return True

    def _settle(self, wait: bool) -> None:
        """Note on every rank whether the pending version came out. A collective.

        wait: until the pending version is complete or failed. TrainingError when that takes more than timeout_s.
        """
        if self.pending is None:
            return
        while True:
            self.announce(_SLICE_S if wait else 0.0)
            state = all_max([self._job.state if self._job is not None else _WRITTEN], self._world)[0]
            if state != _WRITING:
                break
            if not wait:
                return
            # In slices, so that no rank waits longer in a collective than the process group allows.
            late = all_max([time.monotonic() - self._began], self._world)[0]
            if late > self._timeout_s:
                raise TrainingError(
                    f"version {self.pending} was not written within {self._timeout_s:g} s "
                    "(learner.collective_timeout_s)"
                )
        # It may have become complete between the two questions above.
        self.announce()
        if state != _FAILED:
            self.published = self.pending.update
        elif self.keeper is not None:
            self.keeper.withdraw(self.pending)
        self.pending = None
        if self._job is not None:
            self.write_s = self._job.seconds
            self._job = None

    def scalars(self) -> dict[str, float]:
        """Metrics of rank 0."""
        counters = self._publisher.counters if self._publisher is not None else {}
        return {"weights/write_s": self.write_s} | {f"weights/{k}": float(v) for k, v in list(counters.items())}

    def close(self) -> None:
        """Stop publishing; a version that is being written is waited for at most CLOSE_S."""
        if self._job is not None and not self._job.wait(CLOSE_S):
            log.warning("version %s is still being written; nobody will see it", self._job.version)
        if self._publisher is not None:
            self._publisher.close()


class _Job:
    """One version being written by a thread. source: set when it is complete, None while or if not."""

    def __init__(self, publisher: Publisher, version: Version, weights: dict[str, Tensor], batches: int) -> None:
        self.version, self.batches, self.announced, self.seconds = version, batches, False, 0.0
        self.source: str | None = None
        self._done = threading.Event()
        # A daemon: a disk that hangs must not keep the process.
        threading.Thread(target=self._write, args=(publisher, weights), name="publish", daemon=True).start()

    def _write(self, publisher: Publisher, weights: dict[str, Tensor]) -> None:
        started = time.monotonic()
        try:
            self.source = publisher.publish(self.version, iter(weights.items()))
        except WeightSyncError as exc:
            # Retried by the loop; the run ends when generators would fall behind max_lag.
            log.error("version %s was not published: %s", self.version, exc)
        finally:
            self.seconds = time.monotonic() - started
            self._done.set()

    @property
    def state(self) -> float:
        if not self._done.is_set():
            return _WRITING
        return _FAILED if self.source is None else _WRITTEN

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)
