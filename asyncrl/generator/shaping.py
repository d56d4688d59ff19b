"""What a response that the length limit cut off, or nearly did, loses of its reward. Pure; training only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

PART = "truncation_penalty"
"""The part of the reward that says how much, 0 or below."""

MAX_PARTS = 32
"""What a message carries of one response."""


class Rule(Protocol):
    """What the algorithm section says of truncated responses."""

    @property
    def truncated(self) -> str:
        """As in the config."""
        ...

    @property
    def truncated_penalty(self) -> float:
        """As in the config."""
        ...

    @property
    def overlong_buffer(self) -> int:
        """As in the config."""
        ...


def shape(
    reward: float, parts: Mapping[str, float], length: int, finish_reason: str, a: Rule, max_new_tokens: int
) -> tuple[float, dict[str, float]]:
    """Reward and parts of a response of `length` tokens after algorithm.truncated.

    keep, mask: unchanged. penalise, with L = max_new_tokens, B = overlong_buffer and P = truncated_penalty:

        0                          length <= L - B
        P (L - B - length) / B     L - B < length <= L
        -P                         cut off, whatever the length

    Soft overlong punishment: Yu et al., DAPO, arXiv 2503.14476, equation 13, with P = 1. There a response beyond L is
    the one that is cut off; here L is the limit itself. B = 0 penalises cut-off responses only.
    """
    if a.truncated != "penalise":
        return reward, dict(parts)
    penalty, buffer = 0.0, a.overlong_buffer
    if finish_reason == "length":
        penalty = -a.truncated_penalty
    elif buffer and length > max_new_tokens - buffer:
        penalty = a.truncated_penalty * max(-1.0, (max_new_tokens - buffer - length) / buffer)
    others = [(name, value) for name, value in parts.items() if name != PART]
    return reward + penalty, dict(others[: MAX_PARTS - 1]) | {PART: penalty}
