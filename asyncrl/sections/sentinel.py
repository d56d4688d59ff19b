"""The drift sentinel: which generator differs from the rest of the fleet, and what is done about it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.sections.base import NonNegative, Positive, Seconds, Section


class SentinelSection(Section):
    """Compares each generator's router drift and |log-ratio| with the rest of the fleet (docs/sentinel.md)."""

    enabled: bool = True
    """Judge generators; the metrics `sentinel/*` exist only then."""
    window: int = Field(512, ge=16, le=65536)
    """Last responses of a generator over which it is judged: more see smaller faults, later."""
    min_responses: int = Field(128, ge=8)
    """Fewest responses in the window before a generator is judged."""
    min_generators: int = Field(3, ge=3, le=1024)
    """Fewest sound generators with enough responses before one is acted upon. Of two, each is the other's only
    reference: that they differ is an alarm, which one is wrong is not known."""
    z: float = Field(8.0, ge=3, le=1000)
    """Robust z above which a generator counts as faulty. Sound ones stay below 6."""
    signals: tuple[Literal["drift", "log_ratio"], ...] = Field(("drift", "log_ratio"), min_length=1, max_length=2)
    """What is compared: one of them above `z` is enough, or both together."""
    action: Literal["alarm", "quarantine", "resync"] = "resync"
    """alarm: say it. quarantine: also give it no leases and evict its queued groups, until its process is started
    again. resync: also have it load the newest weights whole, and let it in again after a clean probe."""
    probe_groups: NonNegative = 0
    """Groups of a probe, which are scored and never trained; 0: as many as hold half a window of responses."""
    max_resyncs: Positive = 3
    """How often one generator process is re-synced; after that it stays out until it is started again."""
    backoff_s: Seconds = Field(10.0, ge=0)
    """Wait before the second re-sync of a generator, twice as long before each further one."""
