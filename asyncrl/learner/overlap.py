"""How much of the learner's step time generators were generating in. Wall-clock intervals only."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

Interval = tuple[float, float]

SETTLE_S = 3.0
"""Busy intervals arrive with heartbeats; a step is judged when they must have come."""


class Overlap:
    """Share of the finished steps during which at least one generator was busy."""

    def __init__(self) -> None:
        self._steps: list[Interval] = []
        self._busy: list[Interval] = []
        self._step_s = 0.0
        self._overlap_s = 0.0

    def step(self, start: float, end: float) -> None:
        """Record one learner step by wall-clock seconds."""
        self._steps.append((start, end))

    def busy(self, intervals: Iterable[Interval]) -> None:
        """Merge reported busy intervals; repeats are harmless."""
        self._busy = merge([*self._busy, *intervals])

    def fraction(self, now: float | None = None) -> float:
        """Overlapped share of all settled steps, NaN before the first."""
        horizon = (time.time() if now is None else now) - SETTLE_S
        while self._steps and self._steps[0][1] <= horizon:
            start, end = self._steps.pop(0)
            self._step_s += end - start
            self._overlap_s += sum(max(0.0, min(end, b) - max(start, a)) for a, b in self._busy)
        if self._steps:
            self._busy = [(a, b) for a, b in self._busy if b >= self._steps[0][0]]
        return self._overlap_s / self._step_s if self._step_s else math.nan


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals, sorted."""
    out: list[Interval] = []
    for a, b in sorted(intervals):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out
