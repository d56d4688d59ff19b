"""Groups that replay has not resolved yet: kept, and sent again until it has them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.arrays import Buffer

RESEND_S = 5.0
"""A group whose arrival is not confirmed is sent again after this long, then after twice as long, ..."""
RESEND_MAX_S = 60.0


@dataclass(slots=True)
class Kept:
    """One finished group."""

    lease_id: str
    frames: list[Buffer]
    sent_at: float
    wait_s: float = RESEND_S
    admitted: bool = False
    held: bool = False


class Outbox:
    """Kept groups by group id; `now` is any monotonic clock in seconds."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def lease_ids(self) -> list[str]:
        """The leases whose results are kept."""
        return [k.lease_id for k in self._kept.values()]

    @property
    def unconfirmed(self) -> list[list[Buffer]]:
        """Groups of which replay has not said that it has them, or that it has no room for them."""
        return [k.frames for k in self._kept.values() if not (k.admitted or k.held)]

    def add(self, group_id: str, lease_id: str, frames: list[Buffer], now: float) -> bool:
        """Keep a group that is sent now. False when an earlier result of it is kept: replay wants the first."""
        if group_id in self._kept:
            return False
        self._kept[group_id] = Kept(lease_id, frames, now)
        return True

    def admitted(self, group_ids: Iterable[str]) -> None:
        """Replay has these."""
        for group_id in group_ids:
            if group_id in self._kept:
                self._kept[group_id].admitted = True

    def hold(self, group_ids: Iterable[str], now: float) -> None:
        """Replay has no room for these and will ask for them; without a word they go again after RESEND_MAX_S."""
        for group_id in group_ids:
            kept = self._kept.get(group_id)
            if kept is not None:
                kept.sent_at, kept.wait_s, kept.admitted, kept.held = now, RESEND_MAX_S, False, True

    def wanted(self, group_ids: Iterable[str]) -> None:
        """Replay has room for these now: they are due at once."""
        for group_id in group_ids:
            kept = self._kept.get(group_id)
            if kept is not None:
                kept.sent_at, kept.wait_s, kept.admitted, kept.held = -math.inf, RESEND_S, False, False

    def resolved(self, group_ids: Iterable[str]) -> None:
        """Replay needs these no more."""
        for group_id in group_ids:
            self._kept.pop(group_id, None)

    def renew(self) -> None:
        """Replay was started again and has nothing: everything is due once."""
        for kept in self._kept.values():
            kept.sent_at, kept.wait_s, kept.admitted, kept.held = -math.inf, RESEND_S, False, False

    def due(self, now: float) -> list[list[Buffer]]:
        """Groups to send again now; each then waits longer."""
        out = []
        for kept in self._kept.values():
            if not kept.admitted and now - kept.sent_at > kept.wait_s:
                kept.wait_s = RESEND_S if kept.sent_at == -math.inf else min(2 * kept.wait_s, RESEND_MAX_S)
                kept.sent_at = now
                out.append(kept.frames)
        return out
