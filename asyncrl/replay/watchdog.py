"""Ends a run in which nothing can progress, with its first cause; of a slow one it only warns. Pure.

Progress is a group that was admitted, a commit, a publication or an evaluation answer. Nothing can progress when the
learner waits for groups and no generator can deliver one: all are gone, none ever came, every lease
fails, none gets a lease, or leases expire again and again and nobody samples a token. `now` is passed in, in seconds
of any monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.replay.ledger import State
from asyncrl.replay.peers import Peers
from asyncrl.replay.queue import ReplayQueue

REPEAT_S = 10.0
"""A learner that waits repeats its request every two seconds; one that did not for this long is gone."""

EXPIRIES = 2
"""So often must leases expire without a token: once may be a fleet that was about to begin."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What can be seen of a run now.

    last_seen: when any generator was heard last, None when none ever joined. oldest_lease: when the oldest
    running lease was given out. num_expired: leases without a result in time, over the run. tokens: changes when
    a generator samples. waiting: what the learner waits for, "" when it waits for nothing.
    """

    published: bool
    last_seen: float | None
    num_alive: int
    num_leased: int
    oldest_lease: float
    num_expired: int
    tokens: int
    waiting: str


def look(queue: ReplayQueue, peers: Peers, learner_waits: bool) -> Sight:
    """What queue and peers show."""
    fleet = peers.generators.values()
    leases = [e.lease for e in queue.ledger.of_state(State.LEASED) if e.lease is not None]
    return Sight(
        published=queue.clock.newest is not None,
        last_seen=max((g.last_seen for g in fleet), default=None),
        num_alive=peers.num_alive,
        num_leased=len(leases),
        oldest_lease=min((x.expires for x in leases), default=math.inf) - queue.limits.lease_timeout_s,
        num_expired=queue.tally.counters["lease_expired"],
        tokens=peers.num_rises,
        waiting=(queue.waiting or "groups") if learner_waits else "",
    )


class Verdict(NamedTuple):
    """stop: why the run ends. warning: what a slow run waits for. Both "" as long as all is well."""

    stop: str = ""
    warning: str = ""


class Watchdog:
    """Watches one run from `now` on; limit_s is run.watchdog_s."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._progress = self._warned = self._asked = self._busy = self._unleased = now
        self._tokens = 0
        self._failures: tuple[float, float] | None = None
        self._num_expiries, self._num_expired = 0, 0
        self.cause = ""

    def progress(self, now: float) -> None:
        """Something was achieved: what went wrong before it is no cause any more."""
        self._progress = self._warned = now
        self._failures, self._num_expiries, self.cause = None, 0, ""

    def failed(self, reason: str, now: float) -> None:
        """A lease, a load or a generator failed. The first reason since the last progress is the cause."""
        self.cause = self.cause or reason
        self._failures = (self._failures[0] if self._failures else now, now)

    def asked(self, now: float) -> None:
        """The learner asked for groups."""
        self._asked = now

    def check(self, sight: Sight, now: float) -> Verdict:
        """What is to be done now. A warning is given once in limit_s."""
        if sight.tokens != self._tokens:
            self._tokens, self._busy = sight.tokens, now
        if sight.num_leased:
            self._unleased = now
        # A lease without a result in time: whoever holds it is slow or stuck, but did not fail.
        self._num_expiries += sight.num_expired > self._num_expired
        self._num_expired = sight.num_expired
        if now - self._progress < self._limit_s:
            return Verdict()
        if sight.published and sight.waiting and now - self._asked <= REPEAT_S:
            stuck = self._stuck(sight, now)
            if stuck:
                first = f"; first cause: {self.cause}" if self.cause else ""
                return Verdict(stop=f"nothing can progress: {stuck}{first}")
        if now - self._warned < self._limit_s:
            return Verdict()
        self._warned = now
        return Verdict(warning=f"nothing was achieved for {now - self._progress:.0f} s: {self._slow(sight, now)}")

    def _stuck(self, sight: Sight, now: float) -> str:
        """Why no group can come, or ""."""
        limit = self._limit_s
        if sight.last_seen is None:
            return f"no generator joined within {limit:g} s (run.watchdog_s)"
        if now - sight.last_seen >= limit:
            return f"every generator is gone, the last one was heard {now - sight.last_seen:.0f} s ago"
        if self._all_fail(sight, now):
            return f"no group was finished for {now - self._progress:.0f} s, every lease or generator fails"
        if self._num_expiries >= EXPIRIES and now - self._busy >= limit:
            return f"leases expire again and again, and no token was sampled for {now - self._busy:.0f} s"
        if min(now - self._unleased, now - self._busy) >= limit:
            return f"no generator had a lease for {limit:g} s (run.watchdog_s), {sight.num_alive} alive"
        return ""

    def _all_fail(self, sight: Sight, now: float) -> bool:
        """Failures over half the limit, and no lease that only takes long."""
        if self._failures is None or self._num_expiries:
            return False
        first, last = self._failures
        age = now - sight.oldest_lease if sight.num_leased else -math.inf
        return last - first >= self._limit_s / 2 and now - last < self._limit_s / 2 and age < self._limit_s / 2

    def _slow(self, sight: Sight, now: float) -> str:
        """What a run that goes on waits for."""
        if not sight.published:
            return "the learner has published no version yet"
        fleet = f"{sight.num_alive} generators alive, {sight.num_leased} leases running"
        if now - self._busy < self._limit_s:
            fleet += ", tokens are being sampled"
        if not sight.waiting or now - self._asked > REPEAT_S:
            quiet = now - self._asked
            why = "a long step, weights.paused, or it is gone"
            return f"the learner has not asked for groups for {quiet:.0f} s ({why}); {fleet}"
        first = f"; first failure: {self.cause}" if self.cause else ""
        return f"{sight.waiting}; {fleet}{first}"
