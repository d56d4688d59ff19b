r"""Answers as text and as exact numbers: \frac{1}{2}, 0.5, 1,000, 033, 75\%, 5\text{ cm}."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_CHARS = 512
"""Longer answers are compared as text only."""

_NAMES = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac"}
_DROPPED = re.compile(
    r"(\\\\)|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle(?![a-z])|\\[!,;:()\[\]$ ]|\\q?quad(?![a-z])|\$|~"
    r"|\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|\\degree|\u00b0"
)
_GROUPING = re.compile(r"(?<=\d),\s*\\!\s*(?=\d)")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(.*[\d}])\s*\\(?:text|mathrm|textrm|mbox)\s*\{"
    # The white space is within what must not follow, or it would be given back and hide the word.
    r"(?!\s*(?:million|billion|trillion|thousand|hundred|dozen|percent|or\b|and\b))[^{}\d]*\}(?:\^\{?\d\}?)?"
)
_PLAIN = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+|(?=\.\d))(?:\.\d*)?"
_DECIMAL = re.compile(_PLAIN)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(
    rf"({_PLAIN})\s*(?:\\(?:text|mathrm|textrm|mbox)\s*\{{\s*)?({'|'.join(_SCALES)})\b[^{{}}\d]*\}}?", re.IGNORECASE
)
_QUOTIENT = re.compile(rf"({_PLAIN})\s*/\s*({_PLAIN})")
_FRACTION = re.compile(rf"([+-]?)\s*\\frac\s*(?:\{{\s*({_PLAIN})\s*\}}|(\d))\s*(?:\{{\s*({_PLAIN})\s*\}}|(\d))")


class Value(NamedTuple):
    """An exact number; percent: it stood before a percent sign."""

    number: Fraction
    percent: bool = False

    @property
    def text(self) -> str:
        """`3`, `-1/2`, `75%`."""
        return f"{self.number}{'%' * self.percent}"


def normalise(answer: str) -> str:
    """The answer without dollar signs, spacing commands, wrappers, a unit in text and a full stop at its end.

    Over MAX_CHARS characters only white space is touched.
    """
    if len(answer) > MAX_CHARS:
        return " ".join(answer.split())
    text = answer.replace("\u2212", "-").replace("{,}", ",").replace("\\%", "%")
    text = _GROUPING.sub(",", text)
    for name, plain in _NAMES.items():
        text = text.replace(name, plain)
    text = _DROPPED.sub(lambda m: m.group(1) or "", text).strip().strip("*").strip()
    text = text[:-1].rstrip() if text.endswith(".") else text
    while (wrapped := _WRAPPED.fullmatch(text)) is not None:
        text = wrapped.group(1).strip()
    unit = _UNIT.fullmatch(text)
    return " ".join((unit.group(1) if unit else text).split())


def value_of(text: str) -> Value | None:
    """The number that a normalised answer is, or None for anything else (also for numbers of over 200 characters)."""
    if len(text) > 200:
        return None
    percent = text.endswith("%")
    text = text[:-1].rstrip() if percent else text
    number = _number(text)
    return None if number is None else Value(number, percent)


def _number(text: str) -> Fraction | None:
    if _DECIMAL.fullmatch(text):
        return _exact(text)
    if scaled := _SCALED.fullmatch(text):
        return _exact(scaled.group(1)) * _SCALES[scaled.group(2).lower()]
    if quotient := _QUOTIENT.fullmatch(text):
        return _divide(quotient.group(1), quotient.group(2), "")
    if fraction := _FRACTION.fullmatch(text):
        sign, a, b, c, d = fraction.groups()
        return _divide(a or b, c or d, sign)
    return None


def _divide(over: str, under: str, sign: str) -> Fraction | None:
    below = _exact(under)
    if not below:
        return None
    value = _exact(over) / below
    return -value if sign == "-" else value


def _exact(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))


def same(gold: Value, other: Value) -> bool:
    """Whether two numbers count as equal: a percent sign on one side may mean the number or its hundredth; fractions
    and decimals agree up to 1e-6, whole numbers exactly."""
    numbers = {other.number}
    if gold.percent != other.percent:
        numbers |= {other.number / 100} if other.percent else {other.number * 100}
    for number in numbers:
        whole = 1 in (number.denominator, gold.number.denominator)
        if number == gold.number or (not whole and abs(number - gold.number) <= Fraction(1, 1_000_000)):
            return True
    return False
