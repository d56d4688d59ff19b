"""When a generator says how it is: once a second, and soon after something failed to be scored."""

from __future__ import annotations

HEARTBEAT_S = 1.0
SOON_S = 0.2
"""Shortest time between two heartbeats."""


class Beats:
    """The last heartbeat. failed: how much could not be scored so far."""

    def __init__(self) -> None:
        self._at = self._failed = 0.0

    def due(self, now: float, failed: float) -> bool:
        """True when one is to be sent. A record of the run would lack failures that nobody was told of."""
        return now - self._at >= (SOON_S if failed > self._failed else HEARTBEAT_S)

    def sent(self, now: float, failed: float) -> None:
        """Note one."""
        self._at, self._failed = now, failed
