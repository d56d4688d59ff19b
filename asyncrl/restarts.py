"""What becomes of a run when one of its roles ends: events in, verdicts out.

The one policy of `asyncrl run` and of a fleet on several hosts. Pure: it knows no process, no host and no clock;
times are seconds of a monotonic clock that the caller reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from asyncrl.sections.fleet import RunSection

REPLAY, LEARNER = "replay", "learner"

GRACE_S = 20.0
"""How long the learner may outlive a replay or a fleet that left in order."""
STEADY_S = 30.0
"""A role that lived this long is started again at once; one that did not after 0, 1, 2, 4, ... seconds."""
MAX_DELAY_S = 30.0

REFUSED = 2
"""Exit status of a role whose config is refused: started again, it would be again."""
LOST = 75
"""Exit status of a role on another host whose connection to here broke (EX_TEMPFAIL)."""


class Verdict(Enum):
    """What becomes of a role that ended, or of the run."""

    AGAIN = "again"
    """`due` says when to start it."""
    ASIDE = "aside"
    """It stays down and the run goes on without it."""
    LEFT = "left"
    """It left in order."""
    FINISHED = "finished"
    """The learner made its last update: the run is over."""
    FAILED = "failed"
    """The run cannot go on; this role has the cause."""


class RestartPolicy:
    """The roles of one run by name: `replay`, `learner` and the generators.

    Every role has its own number of restarts over the whole run, so that a generator on a bad host does not use up
    those of the others.
    """

    def __init__(self, run: RunSection, generators: Iterable[str]) -> None:
        self._generators = tuple(generators)
        self._left = dict.fromkeys(self._generators, run.max_generator_restarts)
        self._left |= {REPLAY: run.max_replay_restarts, LEARNER: run.max_learner_restarts}
        self._delay_s: dict[str, float] = {}
        self._orderly: dict[str, float] = {}
        self._aside: list[str] = []
        self.due: dict[str, float] = {}
        """When to start a role again."""

    def starts(self, now: float) -> list[str]:
        """The roles to start now; each is named once."""
        names = [name for name, at in self.due.items() if at <= now]
        for name in names:
            del self.due[name]
        return names

    def judged(self, name: str) -> bool:
        """True when the last end of this role has its verdict already."""
        return name in self.due or name in self._orderly or name in self._aside

    def ended(self, name: str, status: int, erred: bool, lived_s: float, now: float) -> Verdict:
        """The verdict on a role that ended, asked once for every end.

        status: negative or above 128 for a signal. erred: its log holds an error that it raised on purpose.
        """
        if status == 0:
            if name == LEARNER:
                return Verdict.FINISHED
            self._orderly[name] = now
            return Verdict.LEFT
        if self._may_go_on(name, status, erred) and self._left[name] > 0:
            self._left[name] -= 1
            self.due[name] = now + self._delay(name, lived_s)
            return Verdict.AGAIN
        if name in self._generators:
            self._aside.append(name)
            return Verdict.ASIDE
        return Verdict.FAILED

    def _may_go_on(self, name: str, status: int, erred: bool) -> bool:
        """True when it would not come to the same end again."""
        if status == REFUSED:
            return False
        if name in self._generators:
            return True
        # Of a learner that raised an error torchrun kills the ranks that hang: its status may be that of a kill.
        return not erred and (name == REPLAY or was_killed(status) or status == LOST)

    def _delay(self, name: str, lived_s: float) -> float:
        known = self._delay_s.get(name) if lived_s < STEADY_S else None
        self._delay_s[name] = 0.0 if known is None else min(max(1.0, 2 * known), MAX_DELAY_S)
        return self._delay_s[name]

    def missing(self, now: float) -> str | None:
        """The role whose end is that of the run: replay, or a generator once none is left. None: the run goes on.

        What left in order is given GRACE_S: the run is over, and the learner may take a little longer to end.
        """
        if REPLAY in self._orderly and now - self._orderly[REPLAY] > GRACE_S:
            return REPLAY
        left = [name for name in self._generators if name in self._orderly]
        if not self._generators or len(left) + len(self._aside) < len(self._generators):
            return None
        # One that left in order was told to: the run is over, whatever became of the others before.
        over = left and now - max(self._orderly[name] for name in left) <= GRACE_S
        return None if over else (self._aside or left)[0]


def was_killed(status: int) -> bool:
    """True for an end by a signal: negative, or 128 + n of a process that reports its child's."""
    return status < 0 or status > 128
