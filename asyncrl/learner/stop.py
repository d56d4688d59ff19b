"""SIGTERM and SIGINT end a rank of the learner: at once, or between two updates with a last checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 0.5
"""An exit that has not arrived after this long was lost on its way, and is raised again."""

CLOSING_S = 2.0
"""Of run.shutdown_s the time for closing files and sockets, at most half of it."""


class Stopped(Exception):
    """Whoever waited was told to stop; in an orderly stop every rank raises it at the same place."""


def time_to_leave(shutdown_s: float) -> float:
    """Seconds of run.shutdown_s in which the running update may end and be saved."""
    return max(shutdown_s - CLOSING_S, shutdown_s / 2)


class StopSignal:
    """Makes SIGTERM and SIGINT raise SystemExit(128 + n) in the main thread, until `closing`.

    Within `orderly` they are only noted (`asked`), and SystemExit is raised when the time is over. Python drops an
    exception that is raised inside a finalizer or a callback of a library: it is raised again then. Uses SIGALRM.
    hard: end the process without clean-up instead, for ranks that have nothing to close.
    """

    def __init__(self, hard: bool = False) -> None:
        self._hard, self._closing = hard, False
        self._limit_s: float | None = None
        self.number = 0
        """The signal that came first, 0 before."""
        self.gave_up = False
        """True when an orderly stop took too long."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._on_signal)

    @property
    def asked(self) -> bool:
        """True when this rank was told to stop."""
        return self.number > 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._closing:
            return
        if self._limit_s is None:
            self.number = self.number or (number if number != signal.SIGALRM else 0)
            self._exit()
        elif number == signal.SIGALRM:
            self.gave_up = True
            self._exit()
        elif not self.number:
            # torchrun passes on what a terminal sent to all: the same signal may come twice.
            self.number = number
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def _exit(self) -> None:
        if self._hard:
            os._exit(128 + self.number)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        sys.exit(128 + self.number)

    def closing(self) -> None:
        """The process ends now: no further signal may interrupt how it does."""
        self._closing = True
        signal.setitimer(signal.ITIMER_REAL, 0)

    @contextmanager
    def orderly(self, limit_s: float) -> Iterator[None]:
        """A block that looks at `asked` between its steps. What it did not end by itself within limit_s is cut off."""
        self._limit_s = limit_s
        try:
            yield
        finally:
            self._limit_s = None
        if self.asked and not self._closing:
            self._exit()
