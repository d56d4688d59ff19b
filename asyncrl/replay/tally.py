"""Counters: every group that is left out has a reason, and what it was like against what was trained."""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import NamedTuple

from asyncrl.replay.digest import GroupDigest

MAX_REASONS = 64
"""Reasons that come from other processes; later ones are counted together."""


class SumsState(NamedTuple):
    """Sums on disk."""

    responses: int
    length: int
    reward: float
    lag: int


class TallyState(NamedTuple):
    """A tally on disk."""

    counters: dict[str, int]
    idle: dict[str, int]
    left_out: SumsState
    trained: SumsState
    dropped: list[tuple[str, str]]
    waits: int
    wait_s: float
    peak_bytes: int


class Sums:
    """Totals over responses, so that means survive merging."""

    def __init__(self) -> None:
        self.count, self.length, self.reward, self.lag = 0, 0, 0.0, 0

    def add(self, length: int, reward: float, lag: int) -> None:
        """Add one response."""
        self.count += 1
        self.length += length
        self.reward += reward
        self.lag += lag

    def as_dict(self) -> dict[str, float]:
        """count, and the sums of length, reward and lag."""
        return {"count": self.count, "length": self.length, "reward": self.reward, "lag": self.lag}

    def save(self) -> SumsState:
        """All of it."""
        return SumsState(self.count, self.length, self.reward, self.lag)

    def load(self, state: SumsState) -> None:
        """Go on from there."""
        self.count, self.length, self.reward, self.lag = state


class Tally:
    """Counts of the run. idle: lease requests that got less than they asked for."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.idle: Counter[str] = Counter()
        self.left_out = Sums()
        self.trained = Sums()
        self.dropped: deque[tuple[str, str]] = deque(maxlen=100)
        """Last groups that were given up, as (group_id, reason)."""
        self.waits, self.wait_s = 0, 0.0
        """Takes that waited for groups about to become too old, and how long."""
        self.data: dict[str, int] = {}
        """Prompts that were left out while the data was read, by `<data source>/<reason>`."""
        self.peak_bytes = 0
        """Most payload that was ever held at once."""

    def count(self, reason: str, number: int = 1) -> None:
        """Count events whose reason is ours."""
        self.counters[reason] += number

    def count_foreign(self, prefix: str, text: str) -> None:
        """Count an event whose reason another process wrote: its first word, in a bounded number."""
        word = re.sub(r"[^a-z0-9]+", "_", text.partition(":")[0].lower()).strip("_")[:40] or "unknown"
        key = f"{prefix}_{word}"
        if key not in self.counters and sum(k.startswith(prefix) for k in self.counters) >= MAX_REASONS:
            key = f"{prefix}_other"
        self.counters[key] += 1

    def leave_out(self, group: GroupDigest, update: int) -> None:
        """A whole group goes untrained; its lag is the largest of its loss tokens."""
        for r in group.responses:
            self.left_out.add(r.length, r.reward, max(0, update - r.updates[0]) if r.updates else 0)

    def train(self, group: GroupDigest, update: int, max_lag: int) -> None:
        """A group trained in `update`. Responses of which no token was young enough are left out."""
        for r in group.responses:
            used = [u for u in r.updates if update - u <= max_lag]
            if used:
                self.trained.add(r.length, r.reward, update - used[0])
            elif r.updates:
                self.count("stale_response")
                self.left_out.add(r.length, r.reward, update - r.updates[0])

    def save(self) -> TallyState:
        """All of it."""
        sums = self.left_out.save(), self.trained.save()
        return TallyState(
            dict(self.counters), dict(self.idle), *sums, list(self.dropped), self.waits, self.wait_s, self.peak_bytes
        )

    def load(self, state: TallyState) -> None:
        """Go on from there; the counters stay the same objects."""
        self.counters.clear()
        self.counters.update(state.counters)
        self.idle.clear()
        self.idle.update(state.idle)
        self.left_out.load(state.left_out)
        self.trained.load(state.trained)
        self.dropped.clear()
        self.dropped.extend(state.dropped)
        self.waits, self.wait_s, self.peak_bytes = state.waits, state.wait_s, state.peak_bytes

    def drop(self, group_id: str, reason: str) -> None:
        """Remember which prompt was given up."""
        self.dropped.append((group_id, reason))
