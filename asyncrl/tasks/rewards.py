"""Verifiers: (response text, gold answer) -> reward, by the name of the prompt's source.

Pure functions that run in the workers of `asyncrl.tasks.pool`: standard library only, so that a
worker starts fast. Each source extracts the answer itself and pays 0 or 1; the scorers of
reasoning-gym pay for substrings and are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from asyncrl.errors import TaskError


class Verifier(NamedTuple):
    """score(text, answer) -> reward in [0, 1]. gold(answer) -> shortest response that earns 1."""

    score: Callable[[str, str], float]
    gold: Callable[[str], str]


def score_after_hash(text: str, answer: str) -> float:
    """1.0 if what follows the last `#` equals the answer, character by character, else 0.0."""
    _, mark, value = text.rpartition("#")
    return 1.0 if mark and value == answer else 0.0


VERIFIERS: dict[str, Verifier] = {
    "chain_sum": Verifier(score_after_hash, gold=lambda answer: "#" + answer),
}


def verifier(source: str) -> Verifier:
    """The verifier of a source. Raises TaskError for an unknown name."""
    try:
        return VERIFIERS[source]
    except KeyError:
        raise TaskError(f"no verifier for source {source!r}; known: {sorted(VERIFIERS)}") from None


def score(source: str, text: str | None, answer: str) -> float:
    """Reward in [0, 1] of one response; a missing text (None) counts as an empty one.

    Raises TaskError for an unknown source or a value outside [0, 1], and whatever the verifier
    raises: a failure inside a verifier is never a reward of 0.
    """
    value = float(verifier(source).score(text or "", answer))
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise TaskError(f"verifier {source!r} returned {value}, rewards lie in [0, 1]")
    return value
