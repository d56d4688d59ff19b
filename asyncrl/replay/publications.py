"""What a published version changes: the queue, evaluations and waiting ranks, and the journal when a learner went back.

Knows no socket. The caller saves before anybody hears of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncrl.replay.desk import Desk
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.journal import Journal, Rollback
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.saved import Committed
from asyncrl.types import Version

log = logging.getLogger(__name__)


class Publications:
    """source: where the newest version is, "" before there is one."""

    def __init__(self, queue: ReplayQueue, evaluations: Evaluations, desk: Desk, journal: Journal | None) -> None:
        self._queue, self._evaluations, self._desk, self._journal = queue, evaluations, desk, journal
        self.source = ""

    def announce(self, version: Version, source: str, batches: int) -> bool:
        """The learner published a version that `batches` batches made. False when it is not newer (announced twice).

        The first one of a later epoch comes from a learner that went back: what it threw away is written to the
        journal and undone. ValueError for what no learner may say.
        """
        clock = self._queue.clock
        if min(*version, batches) < 0:
            raise ValueError(f"version {version} of {batches} batches is negative")
        if clock.newest is not None and version <= clock.newest:
            # It may come from another place now.
            self.source = source if version == clock.newest else self.source
            return False
        if self._queue.closed:
            raise ValueError(f"version {version} comes after the end of the run")
        undone: Sequence[Committed] = ()
        if version.epoch > clock.epoch and self._journal is not None:
            undone = self._journal.roll_back(batches, version, source).groups
        self._apply(version, source, undone)
        return True

    def repeat(self, offset: int) -> None:
        """Commits and rollbacks that an earlier process wrote behind `offset`, after its last save."""
        for line in self._journal.since(offset) if self._journal is not None else ():
            if isinstance(line, Rollback):
                self._apply(Version(line.epoch, line.update), line.source, line.groups)
            else:
                self._queue.repeat([line])

    def _apply(self, version: Version, source: str, undone: Sequence[Committed]) -> None:
        epoch, update = self._queue.clock.epoch, self._queue.clock.update
        self._queue.publish(version, undone)
        if version.epoch > epoch:
            log.warning(
                "the learner goes on at update %d (replay was at %d) as run epoch %d; %d groups that it had used up "
                "are leased again", version.update, update, version.epoch, len(undone),
            )  # fmt: skip
            self._desk.clear()
            self._evaluations.roll_back(self._queue.clock.lost)
        self._evaluations.publish(version)
        self.source = source
