"""Verifiers: (response text, gold answer) -> reward, by the name of the prompt's source.

Pure functions that run in the workers of `asyncrl.tasks.pool`: standard library only, so that a
worker starts fast. Each source extracts the answer itself and pays 0 or 1; the scorers of
reasoning-gym pay for substrings and are not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from asyncrl.errors import TaskError


class Verifier(NamedTuple):
    """score(text, answer) -> reward in [0, 1]. gold(answer) -> shortest response that earns 1.

    anywhere: the answer counts wherever the text names it, so a text that names it is no junk to the gate.
    """

    score: Callable[[str, str], float]
    gold: Callable[[str], str]
    anywhere: bool = False


def score_after_hash(text: str, answer: str) -> float:
    """1.0 if what follows the last `#` equals the answer, character by character, else 0.0."""
    _, mark, value = text.rpartition("#")
    return 1.0 if mark and value == answer else 0.0


def score_last_integer(text: str, answer: str) -> float:
    """1.0 if the last integer of the text is the answer, else 0.0.

    Whole numbers only: no part of 7.5, 1/2, 2e3 or x7. A minus counts as a sign unless a digit, a letter or `)`
    stands before it (in 5-7 it does not); 1,000 is 1000 and 007 is 7.
    """
    found = _INTEGER.findall(_THOUSANDS.sub("", text.replace("\u2212", "-")))
    return 1.0 if found and _plain_integer(found[-1]) == _plain_integer(answer) else 0.0


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_INTEGER = re.compile(r"(?:(?<![\w.)])-)?(?<![\w.])(?<!\d/)\d+(?![\w/]|\.\d)")


def _plain_integer(text: str) -> str:
    """Without leading zeros. Stays text: int() refuses numbers of many digits."""
    digits = text.removeprefix("-").lstrip("0") or "0"
    return "-" + digits if text.startswith("-") and digits != "0" else digits


VERIFIERS: dict[str, Verifier] = {
    "chain_sum": Verifier(score_after_hash, gold=lambda answer: "#" + answer),
    "last_integer": Verifier(score_last_integer, gold=str, anywhere=True),
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
