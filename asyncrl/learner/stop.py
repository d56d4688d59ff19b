"""SIGTERM ends the learner in order: at once, or behind work that must not be left in the middle."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 0.5
"""An exit that has not arrived after this long was lost on its way, and is raised again."""


class StopSignal:
    """Makes SIGTERM raise SystemExit(143) in the main thread, until `closing`.

    Python drops an exception that is raised inside a finalizer or a callback of a library: it is raised again then.
    Uses SIGALRM for that.
    """

    def __init__(self) -> None:
        self._held = self._closing = False
        self._number = 0
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._number = number
        if not (self._held or self._closing):
            self._exit()

    def _exit(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        sys.exit(128 + self._number)

    def closing(self) -> None:
        """The process ends now: no further signal may interrupt how it does."""
        self._closing = True
        signal.setitimer(signal.ITIMER_REAL, 0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What comes meanwhile ends the process behind this block. Libraries inside may turn SystemExit into theirs."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._number and not self._closing:
            self._exit()
