"""What a replay that was started again still waits for: its generators, and the groups that they keep.

Pure: `now` is passed in. Until everyone is back and has sent what it kept (or had the time for it)
nothing new is leased or frozen: work that is still out there is neither done twice nor overtaken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class Recovery:
    """Over from the start, unless `begin` is called."""

    def __init__(self) -> None:
        self._awaited: set[str] = set()
        self._promised: dict[str, str] = {}
        self._until = -math.inf
        self._late = True

    @property
    def active(self) -> bool:
        """True while generators of the earlier process, or what they keep, are awaited."""
        return not self._late and bool(self._awaited or self._promised)

    @property
    def waiting(self) -> str:
        """For whom or what, in words."""
        return f"{', '.join(sorted(self._awaited)) or 'generators'} to send {len(self._promised)} or more groups again"

    def begin(self, generators: Iterable[str], until: float) -> None:
        """Wait for these to say Hello again, at most until then."""
        self._awaited, self._until, self._late = set(generators), until, False

    def returned(self, generator_id: str) -> None:
        """A generator said Hello and what it has."""
        self._awaited.discard(generator_id)

    def promise(self, group_id: str, generator_id: str) -> None:
        """A generator keeps this group, and will send it."""
        self._promised[group_id] = generator_id

    def came(self, group_id: str, generator_id: str) -> None:
        """It was sent."""
        if self._promised.get(group_id) == generator_id:
            del self._promised[group_id]

    def lost(self, generator_id: str) -> None:
        """A generator is gone with what it promised."""
        self._promised = {g: n for g, n in self._promised.items() if n != generator_id}

    def tick(self, now: float) -> None:
        """Go on without those that are late, and without what comes later."""
        if not self._late and (now >= self._until or not self.active):
            self._late = True
            self._awaited.clear()

    def expects(self, group_id: str) -> bool:
        """True while this group may still come again."""
        return self.active or group_id in self._promised
