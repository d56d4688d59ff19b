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
    """One finished group: the result of one lease."""

    group_id: str
    frames: list[Buffer]
    sent_at: float
    wait_s: float = RESEND_S
    admitted: bool = False
    held: bool = False

    def again(self) -> None:
        """Due at once, whatever replay said of it."""
        self.sent_at, self.wait_s, self.admitted, self.held = -math.inf, RESEND_S, False, False


class Outbox:
    """Kept groups by lease id; `now` is any monotonic clock in seconds.

    Two results of one group are kept side by side, for only replay knows which of them it has.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._kept

    @property
    def lease_ids(self) -> list[str]:
        """The leases whose results are kept."""
        return list(self._kept)

    @property
    def unconfirmed(self) -> list[list[Buffer]]:
        """Groups of which replay has not said that it has them, or that it has no room for them."""
        return [k.frames for k in self._kept.values() if not (k.admitted or k.held)]

    def add(self, group_id: str, lease_id: str, frames: list[Buffer], now: float) -> None:
        """Keep a group that is sent now."""
        self._kept[lease_id] = Kept(group_id, frames, now)

    def admitted(self, group_ids: Iterable[str]) -> None:
        """Replay has these."""
        for kept in self._of(group_ids):
            kept.admitted = True

    def hold(self, group_ids: Iterable[str], now: float) -> None:
        """Replay has no room for these and will ask for them; without a word they go again after RESEND_MAX_S."""
        for kept in self._of(group_ids):
            kept.sent_at, kept.wait_s, kept.admitted, kept.held = now, RESEND_MAX_S, False, True

    def wanted(self, group_ids: Iterable[str]) -> bool:
        """Replay asks for these, or leases them anew: due at once. False when none of them is kept."""
        found = self._of(group_ids)
        for kept in found:
            kept.again()
        return bool(found)

    def resolved(self, group_ids: Iterable[str]) -> None:
        """Replay needs no result of these any more."""
        gone = set(group_ids)
        self._kept = {i: k for i, k in self._kept.items() if k.group_id not in gone}

    def void(self, lease_ids: Iterable[str]) -> None:
        """Replay does not want the results of these leases."""
        for lease_id in lease_ids:
            self._kept.pop(lease_id, None)

    def renew(self) -> None:
        """Replay was started again and has nothing: everything is due once."""
        for kept in self._kept.values():
            kept.again()

    def due(self, now: float) -> list[list[Buffer]]:
        """Groups to send again now; each then waits longer."""
        out = []
        for kept in self._kept.values():
            if not kept.admitted and now - kept.sent_at > kept.wait_s:
                kept.wait_s = RESEND_S if kept.sent_at == -math.inf else min(2 * kept.wait_s, RESEND_MAX_S)
                kept.sent_at = now
                out.append(kept.frames)
        return out

    def _of(self, group_ids: Iterable[str]) -> list[Kept]:
        ids = set(group_ids)
        return [k for k in self._kept.values() if k.group_id in ids]
