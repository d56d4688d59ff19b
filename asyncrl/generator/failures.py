"""What a generator does about groups and responses that fail: it says so, not too often, and does not spin."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger(__name__)

FIRST, EACH = 20, 100
"""Of one kind of warning the first so many are logged, then every so many-th."""
SHORTEST_S, LONGEST_S = 0.02, 1.0
"""Pauses after a failed group, each twice the one before as long as all fail."""
REASON = 2000
"""Characters of a reason that replay is told."""


def visible(text: str) -> str:
    """Text with its control characters as escapes: it may come from users' code, and goes to terminals."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Warnings:
    """Warnings of which there may be thousands, by kind."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def say(self, kind: str, text: str) -> None:
        """Log it unless many of this kind were logged."""
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= FIRST:
            more = f" (from now on one of {EACH} such warnings is logged)" if count == FIRST else ""
            log.warning("%s%s", visible(text), more)
        elif count % EACH == 0:
            log.warning("%s (number %d of its kind)", visible(text), count)


class Failures:
    """Failed groups of one generator: how long it asks for no work after them."""

    def __init__(self) -> None:
        self.warnings = Warnings()
        self.until = 0.0
        """Time (monotonic) before which no work is asked for."""
        self._in_a_row = 0

    def failed(self, lease_id: str, reason: str, now: float) -> str:
        """Note a lease that failed. Returns the reason as replay is told it."""
        self._in_a_row += 1
        self.until = now + min(LONGEST_S, SHORTEST_S * 2 ** min(self._in_a_row - 1, 16))
        self.warnings.say(reason.partition(":")[0], f"lease {lease_id} failed: {reason}")
        return visible(reason)[:REASON]

    def succeeded(self) -> None:
        """Note a lease that was answered."""
        self._in_a_row, self.until = 0, 0.0
