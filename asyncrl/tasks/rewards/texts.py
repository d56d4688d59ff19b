r"""Verifiers that compare text or whole numbers: microseconds, the standard library only."""

from __future__ import annotations

import re

from asyncrl.errors import TaskError
from asyncrl.tasks.rewards.base import Verdict, verdict
from asyncrl.tasks.rewards.extract import last_integer, marked, numbers, plain_integer
from asyncrl.tasks.rewards.numbers import normalise, value_of

_OPTION = re.compile(r"\b(?:answer|option|choice)(?:\s+is)?\s*:?\s*[*_]*\(?([A-Z])\b\)?", re.IGNORECASE)
_PARENTHESES = re.compile(r"\(([A-Z])\)")
_LETTER = re.compile(r"\W*([A-Za-z])(?:\W.*)?", re.DOTALL)


def score_after_hash(text: str, answer: str) -> Verdict:
    """1.0 if what follows the last `#` equals the answer, character by character, else 0.0."""
    _, mark, value = text.rpartition("#")
    return verdict(bool(mark) and value == answer, value if mark else None)


def score_last_integer(text: str, answer: str) -> Verdict:
    """1 if the last integer of the text is the answer, else 0."""
    found = last_integer(text)
    return verdict(found is not None and found == plain_integer(answer), found)


def score_integer(text: str, answer: str) -> Verdict:
    """1 if the marked answer is the whole gold number, else 0; nothing counts outside a mark.

    033 is 33, and `m+n=33` and `33 apples` are 33; a mark with two numbers gives no answer. Raises TaskError for a
    gold answer that is no whole number.
    """
    gold = _whole(answer)
    if gold is None:
        raise TaskError(f"integer: the gold answer {answer[:60]!r} is no whole number; use the verifier math")
    given = marked(text)
    found = None if given is None else _whole(given)
    return verdict(found == gold, found)


def _whole(text: str) -> str | None:
    """A whole number, alone or as the only number of a text, without leading zeros."""
    plain = normalise(text)
    value = value_of(plain.rpartition("=")[2].strip())
    if value is not None:
        return str(value.number) if value.number.denominator == 1 and not value.percent else None
    found = numbers(plain)
    return plain_integer(found[0]) if len(found) == 1 and last_integer(plain) is not None else None


def score_gsm8k(text: str, answer: str) -> Verdict:
    """1 if the number after the last `####`, else the last number of the text, is the gold one, else 0.

    The gold answer may be a whole solution that ends with `#### N`. Raises TaskError when it gives no number.
    """
    gold = value_of(normalise(answer.rpartition("####")[2]))
    if gold is None:
        raise TaskError(f"gsm8k: the gold answer {answer[-60:]!r} gives no number")
    _, mark, after = text.rpartition("####")
    found = numbers(after if mark else text)
    given = value_of(found[0 if mark else -1]) if found else None
    return verdict(given is not None and given.number == gold.number, None if given is None else given.text)


def score_exact(text: str, answer: str) -> Verdict:
    """1 if the marked answer, else the whole text, is the gold one up to white space, else 0."""
    given = marked(text)
    found = " ".join((text if given is None else given).split())
    return verdict(found == " ".join(answer.split()) and bool(found), found)


def score_choice(text: str, answer: str) -> Verdict:
    """1 if the response chooses the gold letter, else 0.

    Its choice is the letter that the marked answer begins with, else that of the last `answer is X` or `option X`, else
    the last `(X)`, else the only letter of the text. A gold answer that is no single letter is compared as `exact`.
    """
    gold = normalise(answer).strip("()[]. ")
    if len(gold) != 1 or not gold.isalpha():
        return score_exact(text, answer)
    found = _choice(text)
    return verdict(found == gold.upper(), found)


def _choice(text: str) -> str | None:
    given = marked(text)
    if given is not None or len(text.strip().strip("*_")) <= 4:
        letter = _LETTER.fullmatch(normalise(text if given is None else given))
        return None if letter is None else letter.group(1).upper()
    found = _OPTION.findall(text) or _PARENTHESES.findall(text)
    return found[-1].upper() if found else None
