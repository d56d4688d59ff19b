"""When the engine was busy, as wall-clock intervals, from its cumulative busy seconds."""

from __future__ import annotations

Interval = tuple[float, float]

GAP_S = 0.02
"""Intervals closer than this are one."""


class BusyLog:
    """Samples a cumulative counter; each sample places its increase at the end of the tick."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._intervals: list[Interval] = []

    def sample(self, now: float, busy_s: float) -> None:
        """Record busy_s, the engine's total, at wall-clock second `now`."""
        if self._last is not None and busy_s > self._last[1]:
            start = now - min(busy_s - self._last[1], now - self._last[0])
            if self._intervals and start - self._intervals[-1][1] <= GAP_S:
                self._intervals[-1] = (self._intervals[-1][0], now)
            else:
                self._intervals.append((start, now))
        self._last = (now, busy_s)

    def drain(self) -> list[Interval]:
        """Intervals since the last call."""
        out, self._intervals = self._intervals, []
        return out
