"""The learner's last record, and how fast its records come. Kept in memory: the next record brings it again."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from asyncrl import wire

PACE_RECORDS = 32
"""Records over which the pace is taken."""


class Reports:
    """What the learner told of its updates. `now` is a monotonic clock in seconds."""

    def __init__(self) -> None:
        self._last: wire.Report | None = None
        self._time = 0.0
        self._seen: deque[tuple[float, int]] = deque(maxlen=PACE_RECORDS)

    def put(self, report: wire.Report, now: float) -> None:
        """The newest record. One of an earlier update or another epoch is of a learner that went back."""
        last = self._last
        if last is not None and (report.epoch != last.epoch or report.update < last.update):
            self._seen.clear()
        if not self._seen or self._seen[-1][1] != report.update:
            self._seen.append((now, report.update))
        self._last, self._time = report, time.time()

    def state(self) -> dict[str, Any] | None:
        """The last record with its alarms, and when it came (seconds since 1970); None before the first."""
        if self._last is None:
            return None
        alarms = [{"name": a.name, "since": a.since, "text": a.text, "remedy": a.remedy} for a in self._last.alarms]
        r = self._last
        return {"update": r.update, "epoch": r.epoch, "values": r.values, "alarms": alarms, "time": self._time}

    def update_s(self) -> float | None:
        """Mean seconds per update over the last records, None before the second."""
        if len(self._seen) < 2:
            return None
        (first, a), (last, b) = self._seen[0], self._seen[-1]
        return (last - first) / (b - a)
