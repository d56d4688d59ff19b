"""Where the time goes that is not work: shares of the time between two records, by reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def learner_idle(
    span_s: float, busy_s: float, waited_s: float, waits: Mapping[str, float], **pauses: float
) -> dict[str, float]:
    """Share of span_s by reason; together with busy_s / span_s they make 1. Empty when no time passed.

    waited_s: for takes; waits: how much of it replay itself was waiting, by what was missing, and the rest is the
    transfer. pauses: seconds by other reasons, each the sum of all its pauses. What nobody claims is `other`.
    """
    if span_s <= 0:
        return {}
    seconds, left = {}, max(0.0, span_s - busy_s)
    of_take = {k: v for k, v in waits.items() if v > 0}
    scale = min(1.0, waited_s / total) if (total := sum(of_take.values())) else 0.0
    claims = {k: v * scale for k, v in of_take.items()}
    claims["transfer"] = max(0.0, waited_s - sum(claims.values()))
    for reason, claimed in {**claims, **pauses}.items():
        seconds[reason] = min(max(0.0, claimed), left)
        left -= seconds[reason]
    seconds["other"] = left
    return {reason: value / span_s for reason, value in seconds.items()}


def generator_idle(busy: float, loading: float, refused: Mapping[str, float]) -> dict[str, float]:
    """Share of a generator's time without decoding, by reason; together with busy they make 1.

    busy, loading: shares of its time. refused: lease requests that got less than asked for, by reason, over the whole
    fleet: they split what is left in proportion; without any it is `other` (scoring, sending, the last answers of a
    group).
    """
    left = max(0.0, 1.0 - busy)
    out = {"loading": min(max(0.0, loading), left)}
    left -= out["loading"]
    total = sum(refused.values())
    out["other"] = 0.0 if total else left
    return out | {reason: left * count / total if total else 0.0 for reason, count in refused.items()}
