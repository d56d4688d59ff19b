"""Which faults come, and when: drawn from a seed, independent of how the run fares. Pure.

A deck holds every kind of fault; it is shuffled and dealt to its end, then again. A card that cannot be played now
(a learner that made no progress since its last restart is spared) is put off, not lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KILL, TERMINATE, STOP = "kill", "terminate", "stop"
LATENCY, BANDWIDTH, PARTITION, PARTITION_UP, PARTITION_DOWN, RESET = (
    "latency", "bandwidth", "partition", "partition_up", "partition_down", "reset",
)  # fmt: skip
PROCESS = (KILL, TERMINATE, STOP)
LINK = (LATENCY, BANDWIDTH, PARTITION, PARTITION_UP, PARTITION_DOWN, RESET)

CARDS = (
    [(KILL, "replay")] * 2
    + [(KILL, "generator")] * 3
    + [(KILL, "learner"), (KILL, "rank")]
    + [(TERMINATE, "generator")]
    + [(STOP, role) for role in ("replay", "learner", "generator", "generator")]
    + [(LATENCY, "generator"), (LATENCY, "learner"), (BANDWIDTH, "generator"), (BANDWIDTH, "learner")]
    + [(kind, "generator") for kind in (PARTITION, PARTITION_UP, PARTITION_DOWN, RESET)]
    + [(kind, "learner") for kind in (PARTITION, PARTITION_UP, PARTITION_DOWN, RESET)]
)
SHORT_CARDS = (
    [(KILL, role) for role in ("replay", "generator", "learner")]
    + [(STOP, role) for role in ("replay", "generator", "learner")]
    + [(TERMINATE, "generator"), (LATENCY, "generator"), (BANDWIDTH, "generator"), (LATENCY, "learner")]
    + [(kind, "generator") for kind in (PARTITION, PARTITION_UP, PARTITION_DOWN, RESET)]
    + [(PARTITION, "learner"), (RESET, "learner")]
)
"""Every kind once, few of those that cost the run many seconds."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits of the draws, in seconds. gap: between two faults; down: of a killed role; stop, hold: of a freeze."""

    gap: tuple[float, float] = (2.0, 10.0)
    down: tuple[float, float] = (0.0, 8.0)
    stop: tuple[float, float] = (0.5, 20.0)
    hold: tuple[float, float] = (1.0, 20.0)
    latency: tuple[float, float] = (0.05, 0.5)
    rate: tuple[float, float] = (2e4, 1e6)


SHORT_PACE = Pace(gap=(0.5, 2.0), down=(0.0, 1.0), stop=(0.5, 4.0), hold=(1.0, 4.0))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. seconds: how long it lasts, or a killed role is down. value, back: up and down.

    They are a latency in s or a rate in bytes/s. pick in [0, 1) chooses among the generators. gap: seconds to the
    next fault.
    """

    number: int
    kind: str
    target: str
    pick: float
    seconds: float
    value: float
    back: float
    gap: float


def plan(seed: int, cards: Sequence[tuple[str, str]], pace: Pace) -> Iterator[Fault]:
    """Faults without end; every deck of len(cards) has each card once. Each takes the same number of draws."""
    rng = random.Random(seed)
    number = 0
    while True:
        deck = list(cards)
        rng.shuffle(deck)
        for kind, target in deck:
            gap, pick, long, one, two = rng.uniform(*pace.gap), rng.random(), rng.random(), rng.random(), rng.random()
            low, high = {KILL: pace.down, TERMINATE: pace.down, STOP: pace.stop}.get(kind, pace.hold)
            limits = pace.rate if kind == BANDWIDTH else pace.latency
            value, back = (limits[0] + x * (limits[1] - limits[0]) for x in (one, two))
            # Squared: most are short, some are long.
            yield Fault(number, kind, target, pick, low + long * long * (high - low), value, back, gap)
            number += 1
