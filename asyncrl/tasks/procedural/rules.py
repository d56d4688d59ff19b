r"""Rules that compare a response with the one right answer of a procedural task: numbers, words, lists, grids.

The answer is what the response marks last: \boxed{...}, <answer>...</answer> or `Answer: ...`; without a mark it is the
last line, or for numbers the last number. Every search is linear in the text, and nothing odd in it raises.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

from asyncrl.tasks.rewards.base import Verdict, Verifier, verdict
from asyncrl.tasks.rewards.extract import last_boxed, numbers

MAX_CHARS = 400
"""Digits of a number and characters of a line that are compared; longer ones are wrong."""
ROOT_TOLERANCE = Decimal("0.00011")
"""Difference that two roots rounded to four places may have."""

_ANSWER = re.compile(r"\banswer\b[*_]{0,3}[ \t]{0,3}:[*_]{0,3}", re.IGNORECASE)
_FRACTION = re.compile(r"(-?)(?:\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}|(\d+)/(-?\d+)|(\d+))")
_ROLE = re.compile(r"(\w+) is (?:an? )?(\w+)")
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,3})?", re.IGNORECASE)
_FACTOR = re.compile(r"\s*(?:\u00d7|\*|\u00b7|\\times|\\cdot|\bx\b)\s*")


class Found(NamedTuple):
    """What the response gives as its answer. marked: it says so; open_end: text may follow the answer."""

    text: str
    marked: bool = False
    open_end: bool = False

    def lines(self) -> list[str]:
        """Lines with something on them, without the fences of a block of code."""
        return [s for line in self.text.splitlines() if (s := line.strip()) and not s.startswith("```")]

    def line(self) -> str:
        """The one line of the answer: the first one after a mark, else the last one of the response; "" for none."""
        lines = self.lines()
        line = (lines[0] if self.marked else lines[-1]) if lines else ""
        return line if len(line) <= MAX_CHARS else ""


def find(text: str) -> Found:
    """The part of a response that its last mark points at, or all of it."""
    found = [(-1, Found(text.strip()))]
    if boxed := last_boxed(text):
        found.append((boxed.at, Found(boxed.text.strip(), True)))
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        found.append((start, Found(text[start + len("<answer>") : end].strip(), True)))
    found += [(m.start(), Found(text[m.end() :].strip(), True, True)) for m in deque(_ANSWER.finditer(text), maxlen=1)]
    return max(found, key=lambda pair: pair[0])[1]


def _number(found: Found, _: str) -> str | None:
    given = numbers(found.line() if found.marked else found.text)
    return _plain(given[-1]) if given else None


def _plain(number: str) -> str | None:
    """`-007.50` to `-7.5`."""
    if len(number) > MAX_CHARS or not _DECIMAL.fullmatch(number):
        return None
    # Of a zero neither the sign nor the number of places counts.
    value = Decimal(number)
    return format(value.normalize() if value else Decimal(0), "f") if abs(value.adjusted()) < MAX_CHARS else None


def _fraction(found: Found, _: str) -> str | None:
    """Reduced or not as it stands: whoever asks for lowest terms wants no other."""
    match = _FRACTION.fullmatch(_bare(found.line()).replace(" ", ""))
    if match is None:
        return None
    sign, top, below, over, under, whole = match.groups()
    a, b = int(top or over or whole), int(below or under or "1")
    a, b = (-a if sign else a), b
    return f"{-a}/{-b}" if b < 0 else f"{a}/{b}"


def _word(found: Found, _: str) -> str | None:
    return _bare(found.line()).casefold() or None


def _text(found: Found, _: str) -> str | None:
    return _bare(found.line()) or None


def _bare(line: str) -> str:
    """A line without quotes, emphasis, dollar signs and a full stop around it, single spaces inside."""
    line = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", line)
    return " ".join(line.strip(" \t.!\"'`*$").split())


def _list(found: Found, _: str) -> str | None:
    inside = _bare(found.line()).strip("[]() ")
    entries = [entry.strip(" \t\"'") for entry in inside.split(",")]
    return ", ".join(_plain(entry) or entry for entry in entries) if any(entries) else None


def _factors(found: Found, _: str) -> str | None:
    factors = _FACTOR.split(_bare(found.line()))
    if not all(f.isascii() and f.isdigit() and len(f) < 20 for f in factors):
        return None
    return " * ".join(str(f) for f in sorted(map(int, factors)))


def _roots(found: Found, answer: str) -> str | None:
    """The gold roots themselves when the given ones are those, in any order and within the rounding."""
    entries = [entry.strip(" \t\"'[]()$") for entry in _bare(found.line()).split(",")]
    if not all(len(entry) <= 40 and _DECIMAL.fullmatch(entry) for entry in entries):
        return None
    given = sorted(Decimal(entry) for entry in entries)
    gold = sorted(Decimal(entry.strip()) for entry in answer.split(","))
    close = len(given) == len(gold) and all(abs(a - b) <= ROOT_TOLERANCE for a, b in zip(given, gold, strict=True))
    return ", ".join(str(root) for root in (gold if close else given))


def _roles(found: Found, _: str) -> str | None:
    """`Zoe is a knight, and Amy is a knave.`: who is what, each person once."""
    line = _bare(found.line())
    parts = [part.removeprefix("and ").strip() for part in re.split(r",| and (?=\w+ is )", line)]
    pairs = [_ROLE.fullmatch(part) for part in parts if part]
    roles = {pair.group(1): pair.group(2).casefold() for pair in pairs if pair is not None}
    if not pairs or len(roles) != len(pairs):
        return None
    return ", ".join(f"{name} is {roles[name]}" for name in sorted(roles))


def _grid(found: Found, answer: str) -> str | None:
    """Rows of the grid, by as many lines as the gold one has, or a JSON array of arrays."""
    rows, gold = _rows(found), _rows(Found(answer))
    if found.marked and not found.open_end:
        return "\n".join(rows) or None
    return "\n".join(rows[: len(gold)] if found.marked else rows[-len(gold) :]) or None


def _rows(found: Found) -> list[str]:
    at = ("\n" + found.text).rfind("\n[[")
    if at >= 0:
        try:
            return [" ".join(str(cell) for cell in row) for row in json.loads(found.text[at:].strip(" `\n"))]
        except (ValueError, TypeError, RecursionError):
            return []
    # The signs between the cells of a futoshiki and the bars of a table are no part of its cells.
    bare = [" ".join(re.sub(r"[<>\u2227\u2228|]", " ", line).split()) for line in found.lines()]
    return [row for row in bare if row]


Rule = Callable[[Found, str], str | None]


def _verifier(rule: Rule, *, anywhere: bool = False) -> Verifier:
    def score(text: str, answer: str) -> Verdict:
        given = rule(find(text), answer)
        return verdict(given is not None and given == rule(Found(answer), answer), given)

    return Verifier(score, gold=str, anywhere=anywhere)


NUMBER = _verifier(_number, anywhere=True)
"""The last number, exactly."""
FRACTION = _verifier(_fraction)
"""A fraction as it stands, so one in lowest terms is not one that can be reduced."""
WORD = _verifier(_word)
"""A line of text, in any case."""
TEXT = _verifier(_text)
"""A line of text."""
LIST = _verifier(_list)
"""Entries between commas, in order."""
FACTORS = _verifier(_factors)
"""Whole factors, in any order."""
ROOTS = _verifier(_roots)
"""Numbers to four places, in any order."""
ROLES = _verifier(_roles)
"""Who is what, in any order."""
GRID = _verifier(_grid)
"""Rows of cells."""
