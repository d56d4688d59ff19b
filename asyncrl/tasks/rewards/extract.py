r"""Where a response gives its answer: the last \boxed{...}, the last `Answer:` line, the last number.

Every search is linear in the text: responses may be long, and odd on purpose.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ANSWER = re.compile(r"\banswer\b[*_]{0,3}\s{0,3}:\s*(\S[^\n]*)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_INTEGER = re.compile(r"(?:(?<![\w.)])-)?(?<![\w.])(?<!\d/)\d+(?![\w/]|\.\d)")
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?<![\w.])(?<!\d/)\d+(?:\.\d+)?(?![\w/]|\.\d)")


class Found(NamedTuple):
    """A marked answer and where its mark begins."""

    text: str
    at: int


def last_boxed(text: str) -> Found | None:
    r"""Content of the last \boxed{...}, with nested braces; None without one, or when the last one is not closed."""
    at = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    box = _BOX.match(text, at) if at >= 0 else None
    if box is None:
        return None
    depth = 1
    for brace in _BRACES.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return Found(text[box.end() : brace.start()].strip(), at)
    return None


def last_answer_line(text: str) -> Found | None:
    """What follows the last `Answer:` up to the end of its line, without marks of emphasis; None without one."""
    found = [line for rest in ("nswer", "NSWER") if (line := _last_line(text, rest)) is not None]
    if not found:
        return None
    line = max(found, key=re.Match.start)
    return Found(line.group(1).strip().strip("*_`").strip(), line.start())


def _last_line(text: str, rest: str) -> re.Match[str] | None:
    # Far faster than a search with the pattern, which cannot look for a letter of either case.
    at = text.rfind(rest)
    while at > 0:
        line = _ANSWER.match(text, at - 1)
        if line is not None:
            return line
        at = text.rfind(rest, 0, at)
    return None


def marked(text: str) -> str | None:
    """The answer that the response marks: its last box or its last `Answer:` line, whichever comes last."""
    boxed, line = last_boxed(text), last_answer_line(text)
    if boxed is None or (line is not None and line.at > boxed.at):
        return None if line is None else _inside(line.text)
    return boxed.text


def _inside(line: str) -> str:
    boxed = last_boxed(line)
    return line if boxed is None else boxed.text


def last_integer(text: str) -> str | None:
    """The last integer, without thousands separators and leading zeros.

    Whole numbers only: no part of 7.5, 1/2, 2e3 or x7. A minus counts as a sign unless a digit, a letter or `)`
    stands before it (in 5-7 it does not); 1,000 is 1000 and 007 is 7.
    """
    found = _INTEGER.findall(_plain(text))
    return plain_integer(found[-1]) if found else None


def numbers(text: str) -> list[str]:
    """All numbers, by the same rules, decimals too."""
    return [number.strip() for number in _NUMBER.findall(_plain(text))]


def plain_integer(text: str) -> str:
    """Without leading zeros. Stays text: int() refuses numbers of many digits."""
    digits = text.removeprefix("-").lstrip("0") or "0"
    return "-" + digits if text.startswith("-") and digits != "0" else digits


def _plain(text: str) -> str:
    return _THOUSANDS.sub("", text.replace("\u2212", "-"))
