"""What a verifier is and what it says. Knows no verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

MAX_EXTRACTED = 256
"""Characters of an extracted answer."""


class Verdict(NamedTuple):
    """What a verifier says of one response.

    reward: 0 or 1 (in [0, 1]; any finite number of a user's reward). parts: named parts of it. extracted: the answer
    that the response gives, written alike for answers that count as equal, at most 256 characters; "" for none.
    """

    reward: float
    parts: Mapping[str, float] = {}
    extracted: str = ""


class Verifier(NamedTuple):
    """score(text, answer) -> reward in [0, 1], or a Verdict. gold(answer) -> shortest response that earns 1.

    anywhere: the answer counts wherever the text names it, so a text that names it is no junk to the gate.
    prepare: loads what `score` needs, before a deadline runs.
    """

    score: Callable[[str, str], float | Verdict]
    gold: Callable[[str], str]
    anywhere: bool = False
    prepare: Callable[[], object] | None = None


def verdict(right: bool, extracted: str | None) -> Verdict:
    """1 or 0, with the extracted answer cut to what a verdict may carry."""
    return Verdict(float(right), extracted=(extracted or "")[:MAX_EXTRACTED])
