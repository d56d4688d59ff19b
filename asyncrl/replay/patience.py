"""How long a take waits for groups that no later take could use (staleness.stale: wait).

Pure: `now` is passed in, in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median

from asyncrl.replay.ledger import Ledger, State
from asyncrl.replay.limits import Limits
from asyncrl.replay.takes import Candidate, select
from asyncrl.replay.tally import Tally

KEPT = 256
"""Group times of which the median is taken."""


class Patience:
    """At most `patience` times the median group time for each take, counted from when it could be made."""

    def __init__(self, limits: Limits, ledger: Ledger, tally: Tally) -> None:
        self._limits, self._ledger, self._tally = limits, ledger, tally
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._take_id, self._since, self._counted = -1, 0.0, 0.0
        self._due_at, self._num_due = (-1, 0, 0), 0

    def reset(self) -> None:
        """Take ids begin anew."""
        self._take_id = -1

    def forget(self) -> None:
        """The limits are others now: count anew what a take would wait for."""
        self._due_at = (-1, 0, 0)

    def note(self, seconds: float) -> None:
        """A group took so long to sample and score; what is no time is left out."""
        if math.isfinite(seconds) and seconds >= 0:
            self._seconds.append(seconds)

    @property
    def bound_s(self) -> float:
        """Longest wait now. Before any group is finished: as long as a lease may last."""
        m = self._limits
        if not self._seconds:
            return m.lease_timeout_s if m.patience > 0 else 0.0
        return min(m.patience * median(self._seconds), m.lease_timeout_s)

    def waits(self, take_id: int, update: int, num_batches: int, now: float) -> str:
        """What a take that could be made still waits for, or "". Its first call starts its wait."""
        due = self._due(update, num_batches) if self._limits.stale == "wait" else 0
        if self._take_id != take_id and due and self.bound_s > 0:
            self._take_id, self._since, self._counted = take_id, now, 0.0
            self._tally.waits += 1
        if self._take_id != take_id:
            return ""
        waited = min(now - self._since, self.bound_s)
        self._tally.wait_s += max(0.0, waited - self._counted)
        self._counted = max(self._counted, waited)
        if not due or now - self._since >= self.bound_s:
            return ""
        return f"{due} unfinished groups that no update after this take could use"

    def _due(self, update: int, num_batches: int) -> int:
        """Unfinished groups that this take would choose if they came now, and that are too old for the next."""
        at = (self._ledger.moves, update, num_batches)
        if at != self._due_at:
            self._due_at, self._num_due = at, self._count_due(update, num_batches)
        return self._num_due

    def _count_due(self, update: int, num_batches: int) -> int:
        m = self._limits
        oldest = [e.lease.version for e in self._ledger.of_state(State.LEASED) if e.lease is not None]
        oldest += [e.digest.oldest for e in self._ledger.of_state(State.KEPT) if e.digest is not None]
        due = Counter(v for v in oldest if update <= v.update + m.max_lag < update + num_batches)
        if not due:
            return 0
        queued = [(e, e.digest) for e in self._ledger.by_age(State.QUEUED) if e.digest is not None]
        count = 0
        for v, number in due.items():
            # Of equal age the first to arrive goes first. One that would not be chosen is not worth a wait.
            ahead = [Candidate(e.group_id, d.last_update(m.stale, m.max_lag)) for e, d in queued if d.oldest <= v]
            late = Candidate("", v.update + m.max_lag)
            if late in select([*ahead, late], update, num_batches, m.groups_per_update)[0]:
                count += number
        return count
