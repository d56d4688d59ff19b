"""SIGTERM ends the learner in order: at once, or behind work that must not be left in the middle."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Makes SIGTERM raise SystemExit(143) in the main thread, for as long as the process lives."""

    def __init__(self) -> None:
        self._held = False
        self._number = 0
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._number = number
        if not self._held:
            sys.exit(128 + number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What comes meanwhile ends the process behind this block. Libraries inside may turn SystemExit into theirs."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._number:
            sys.exit(128 + self._number)
