r"""The verifier `math`: numbers and equal text by rules, everything else by the library math-verify.

The library is slow (milliseconds), may run for minutes on an odd answer and gives some wrong verdicts;
docs/verifiers.md lists what is decided before it is asked.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.rewards.base import Verdict, verdict
from asyncrl.tasks.rewards.extract import last_integer, marked, plain_integer
from asyncrl.tasks.rewards.numbers import MAX_CHARS, Value, normalise, same, value_of

LIBRARY_S = 2
"""Limit of one step of the library, seconds; only the main thread can have one."""
MAX_DEPTH = 40
"""Nested brackets of what the library is asked about."""

_INTEGER = re.compile(r"-?\d+", re.ASCII)
_WORD = re.compile(r"[A-Za-z]{4,}(?: [A-Za-z]{2,})*")
_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(\d{1,2})\}?")
_EQUATION = re.compile(r"[^=<>]*=([^=<>]*)")
_BRACKETS = re.compile(r"\\?[(\[{)\]}]")
_MORE = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*(?:[,;/]|or\b|and\b)[^{}]*\d")
"""A second number in a text behind the first one, which the library would pass over as a unit."""
_SPACES = re.compile(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])")


def score_math(text: str, answer: str) -> Verdict:
    """1 if the answer that the response marks equals the gold one, else 0.

    Without a mark, a whole gold number is compared with the last integer of the text, and any other gold answer with
    the last line. TimeoutError when the library does not finish.
    """
    gold, number = _read(answer)
    given = marked(text)
    if given is None:
        whole = number is not None and number.number.denominator == 1 and not number.percent
        given = last_integer(text) if whole else _last_line(text)
    if not given:
        return Verdict(0.0)
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(gold):  # most answers of most sets
        found = plain_integer(given)
        return verdict(found == plain_integer(gold), found)
    found = normalise(given)
    return verdict(equal(gold, number, found), _written(found))


@functools.lru_cache(maxsize=4096)
def _read(answer: str) -> tuple[str, Value | None]:
    """The normalised gold answer, and the number that it is."""
    gold = normalise(answer)
    if not gold:
        raise TaskError("math: the gold answer is empty")
    return gold, value_of(gold)


def equal(gold: str, number: Value | None, found: str) -> bool:
    """Whether two normalised answers count as equal; number: the gold one, where it is one."""
    decided = by_rules(gold, number, found)
    return by_library(gold, found) if decided is None else decided


def by_rules(gold: str, number: Value | None, found: str) -> bool | None:
    """The same without the library; None where the rules do not decide."""
    if _tight(gold) == _tight(found):
        return True
    if len(found) > MAX_CHARS or len(gold) > MAX_CHARS or _depth(found) > MAX_DEPTH:
        return False
    other = value_of(found)
    if number is not None:
        if other is None and (equation := _EQUATION.fullmatch(found)):
            other = value_of(normalise(equation.group(1)))
        if other is None:
            return False if _MORE.search(found) else None
        return same(number, other)
    if _WORD.fullmatch(gold):
        # To the library a bare word is a product of its letters: blue equals lube.
        return gold.casefold() == found.casefold()
    base = _BASE.fullmatch(gold)
    if base is not None:
        digits, _, theirs = found.partition("_")
        return digits.casefold() == base.group(1).casefold() and theirs.strip("{}") in ("", base.group(2))
    if {_kind(gold), _kind(found)} == {"(", "{"} and "," in gold:
        return False  # a point or an interval is no set of its two numbers
    return None


def by_library(gold: str, found: str) -> bool:
    """What math-verify says; equal text where it cannot read the gold answer.

    TimeoutError after LIBRARY_S where signals work: that is the main thread; elsewhere nothing limits it.
    """
    limit = LIBRARY_S if threading.current_thread() is threading.main_thread() else None
    library = load()
    try:
        want = _gold(gold, limit)
        if not want:
            return _tight(gold) == _tight(found)
        have = _parse(found, limit)
        # The gold answer goes first: the library is not symmetric.
        return bool(have) and bool(
            library.verify(list(want), have, timeout_seconds=limit, raise_on_error=True, allow_set_relation_comp=True)
        )
    except library.errors.TimeoutException as exc:
        raise TimeoutError(f"math-verify did not finish within {limit} s on {found[:60]!r}") from exc


@functools.cache
def load() -> Any:
    """math-verify, loaded once: it brings sympy."""
    import math_verify
    import math_verify.errors

    # It warns of every odd answer, and that it has no time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


@functools.lru_cache(maxsize=4096)
def _gold(gold: str, limit: int | None) -> tuple[Any, ...]:
    return tuple(_parse(gold, limit))


def _parse(answer: str, limit: int | None) -> list[Any]:
    # Bare \sqrt{2} and (1,2) are read as nothing at all, and no answer ever equals nothing.
    parsed: list[Any] = load().parse(f"\\boxed{{{answer}}}", parsing_timeout=limit)
    return parsed


def _last_line(text: str) -> str:
    return text.rstrip()[-4 * MAX_CHARS :].rpartition("\n")[2].strip()


def _written(found: str) -> str:
    value = value_of(found)
    return value.text if value is not None else _tight(found)


def _tight(text: str) -> str:
    return _SPACES.sub("", text)


def _kind(text: str) -> str:
    return text.removeprefix("\\")[:1]


def _depth(text: str) -> int:
    depth = deepest = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket[-1] in "([{" else -1
        deepest = max(deepest, depth)
    return deepest
