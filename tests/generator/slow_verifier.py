"""A verifier that hangs on the fourth response that a worker is asked about. Runs in pool workers."""

from __future__ import annotations

import time

_seen: list[str] = []


def score(source: str, text: str, answer: str) -> float:
    _seen.append(text)
    if len(_seen) == 4:
        time.sleep(3600)
    return float(len(_seen) % 2)
