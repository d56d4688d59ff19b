"""The last records of a run as alarms look at them. Pure: knows no alarm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

KEPT = 400
"""Records that are remembered."""
SPAN_S = 2.0
"""Time in which every generator was heard at least once: they count, and say so once a second."""

_READ = (
    "policy/", "optim/", "mismatch/ess", "mismatch/f_2", "mismatch/kl_", "mismatch/weight_zero", "drift/mean",
    "staleness/lag_", "staleness/masked_", "staleness/left_out/count", "staleness/trained/count", "throughput/",
    "experts/unused", "generator/alive", "verifier/",
)  # fmt: skip
_OF_GENERATORS = ("/alive", "/reward_errors")


class Point(NamedTuple):
    """One record: what alarms read of it, and the names of all its values that are not finite."""

    update: int
    values: dict[str, float]
    broken: tuple[str, ...]


class History:
    """Records in their order. A value that is not finite is no value."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=KEPT)
        self._lived: dict[str, int] = {}
        self._num = 0
        self._ends: deque[int] = deque(maxlen=2)
        self._covered = 0.0

    def add(self, update: int, record: Mapping[str, float]) -> None:
        """Append a record."""
        broken = tuple(sorted(k for k, v in record.items() if not math.isfinite(v)))
        read = {k: v for k, v in record.items() if k.startswith(_READ) or k.endswith(_OF_GENERATORS)}
        values = {k: v for k, v in read.items() if math.isfinite(v)}
        if self.points:
            self._note_living()
        self.points.append(Point(update, values, broken))
        self._num += 1
        self._covered += values.get("throughput/update_s", SPAN_S)
        if not self._ends or self._covered >= SPAN_S or self._num - self._ends[-1] >= KEPT - 1:
            self._ends.append(self._num)
            self._covered = 0.0

    def _note_living(self) -> None:
        """Which generators lived in the newest record; what no kept record has is forgotten."""
        self._lived |= dict.fromkeys((n for n, lives in self.generators().items() if lives), self._num)
        if len(self._lived) > 2 * KEPT:
            self._lived = {n: number for n, number in self._lived.items() if number > self._num - KEPT}

    def lived(self, name: str) -> bool:
        """True when this generator was alive in a record before the newest."""
        return self._lived.get(name, -KEPT) > self._num - KEPT

    def get(self, name: str) -> float | None:
        """The value in the newest record."""
        return self.points[-1].values.get(name)

    def series(self, name: str) -> list[float]:
        """The values of all records that have it."""
        return [p.values[name] for p in self.points if name in p.values]

    def means(self, name: str, length: int) -> list[float]:
        """Running means over `length` values, the newest last; empty when there are fewer."""
        values = self.series(name)
        return [sum(values[i : i + length]) / length for i in range(len(values) - length + 1)]

    def growth(self, name: str) -> float | None:
        """How much a counter grew since the record before. None without two; one that fell was started again."""
        seen = [p.values[name] for p in list(self.points)[-2:] if name in p.values]
        if len(seen) < 2:
            return None
        return seen[1] - seen[0] if seen[1] >= seen[0] else seen[1]

    def growths(self, prefix: str, suffix: str = "") -> dict[str, float]:
        """The same of all counters with this beginning and end that grew; one that is new grew from 0."""
        return growths(list(self.points)[-2:], prefix, suffix)

    def span(self) -> list[Point] | None:
        """The record before and the records of a span of at least SPAN_S that the newest record ends; else None.

        Spans do not overlap. Counters of generators compare with what was trained over a span, not over one record.
        """
        if len(self._ends) < 2 or self._ends[-1] != self._num:
            return None
        return list(self.points)[-(self._ends[-1] - self._ends[-2] + 1) :]

    def over(self, seconds: float) -> Iterator[Point]:
        """The newest records, the newest first, until they cover so many seconds; all when they do not."""
        covered = 0.0
        for point in reversed(self.points):
            yield point
            covered += point.values.get("throughput/update_s", 0.0)
            if covered >= seconds:
                return

    def busy(self, name: str, seconds: float) -> tuple[float, float] | None:
        """Mean of a share by time over the newest records of at least so many seconds, and how many. None: too few.

        A record most of whose time went to publishing is left out: nobody starves in a pause (weights.paused).
        """
        total = span = 0.0
        for point in self.over(seconds):
            took = point.values.get("throughput/update_s", 0.0)
            held = point.values.get("throughput/learner_idle/publishing", 0.0) > 0.5
            if name in point.values and not held:
                total, span = total + took * point.values[name], span + took
        return (total / span, span) if span and span >= seconds else None

    def generators(self) -> dict[str, bool]:
        """Generators of the newest record by name, and whether each is alive."""
        parts = ((name.split("/"), value) for name, value in self.points[-1].values.items())
        return {at[1]: value > 0 for at, value in parts if len(at) == 3 and (at[0], at[2]) == ("generator", "alive")}


def growths(points: Sequence[Point], prefix: str, suffix: str = "") -> dict[str, float]:
    """How much the counters with this beginning and end grew from the first to the last of these records."""
    out: dict[str, float] = {}
    for before, now in pairwise(points):
        for name, value in now.values.items():
            if name.startswith(prefix) and name.endswith(suffix):
                old = before.values.get(name, 0.0)
                out[name] = out.get(name, 0.0) + (value - old if value >= old else value)
    return {name: grown for name, grown in out.items() if grown > 0}
