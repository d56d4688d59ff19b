"""The learner's clock and the order of versions: what is published, what is lost, how old a token is."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.types import Version


class ClockState(NamedTuple):
    """A clock on disk: last and fork are the last and the first update of every epoch, reached the highest ever."""

    update: int
    newest: Version | None
    last: dict[int, int]
    fork: dict[int, int]
    reached: int = 0


class Clock:
    """update is the learner's next optimizer step. A resume starts an epoch at its fork update."""

    def __init__(self) -> None:
        self.update = 0
        self.newest: Version | None = None
        self.reached = 0
        """The highest update ever, in any epoch."""
        self._last: dict[int, int] = {}
        self._fork: dict[int, int] = {}

    @property
    def epoch(self) -> int:
        """Run epoch of the newest version."""
        return self.newest.epoch if self.newest is not None else 0

    def publish(self, version: Version) -> bool:
        """Record a published version. False: it is not newer than what is known, nothing changed.

        A higher epoch is a resume: its first version marks the fork, and the clock goes back there.
        """
        if self.newest is not None and version <= self.newest:
            return False
        if version.epoch not in self._fork:
            self._fork[version.epoch] = version.update
            self.update = version.update
        self._last[version.epoch] = version.update
        self.newest = version
        self.advance(version.update)
        return True

    def advance(self, update: int) -> None:
        """The learner's clock is at least `update` now."""
        self.update = max(self.update, update)
        self.reached = max(self.reached, self.update)

    def save(self) -> ClockState:
        """All of it."""
        return ClockState(self.update, self.newest, dict(self._last), dict(self._fork), self.reached)

    def load(self, state: ClockState) -> None:
        """Go on from there."""
        self.update, self.newest = state.update, state.newest
        self._last, self._fork = dict(state.last), dict(state.fork)
        self.reached = max(state.reached, state.update)

    def unknown(self, version: Version) -> bool:
        """True for a version newer than anything published (in its epoch, or at all)."""
        if self.newest is None or version > self.newest:
            return True
        return version.update > self._last.get(version.epoch, version.update)

    def lost(self, version: Version) -> bool:
        """True when a later epoch forked before this version: its weights are no ancestor of ours."""
        return any(epoch > version.epoch and version.update > fork for epoch, fork in self._fork.items())
