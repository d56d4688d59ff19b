"""Gold answers out of what files write: after ####, in the last \\boxed{}, a choice, a grid; and what scores them.

Knows rows as texts only, no file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.data.columns import parsed, plain, text_of

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_INTEGER = re.compile(r"-?\d+")
_MATH = re.compile(r"[-+]?[\d.,]+%?|[-+]?\d+\s*/\s*\d+|.*[\\$^_=].*|\(.*\)|\[.*\]", re.DOTALL)
_TO_END_OF_FORMULA = re.compile(r"([^$\n]*?)(?:\$|\\\]|\\\))")
_REDACTED = ("redacted", "___", "hidden", "n/a", "?", "null", "none")

LONGEST_ANSWER = 200
"""Characters of a solution without a mark that is taken to be the answer itself."""


def is_integer(gold: str) -> bool:
    """Whether an answer is a whole number."""
    return _INTEGER.fullmatch(gold.strip()) is not None


def looks_like_math(gold: str) -> bool:
    """Whether an answer is a number, a fraction, an interval or a formula, and not words."""
    return _MATH.fullmatch(gold.strip()) is not None


def boxed(text: str) -> str | None:
    """What is inside the last \\boxed{} or \\fbox{}, braces inside it kept; None without a whole one."""
    for found in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*(\{|\s[^\s{])", text))):
        if not found[1].startswith("{"):
            # \boxed 12 in a formula: the rest of it, as those who made MATH read it
            rest = text[found.start(1) :].lstrip()
            formula = _TO_END_OF_FORMULA.match(rest)
            return (formula[1] if formula else rest.split()[0]).strip().rstrip(".")
        depth, start = 0, found.end() - 1
        for i in range(start, len(text)):
            escaped = i > 0 and text[i - 1] == "\\" and not (i > 1 and text[i - 2] == "\\")
            if text[i] in "{}" and not escaped:
                depth += 1 if text[i] == "{" else -1
                if depth == 0:
                    return text[start + 1 : i].strip()
    return None


def after_hashes(text: str) -> str | None:
    """What stands behind the last ####, commas between digits removed; None without one."""
    _, mark, tail = text.rpartition("####")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", tail).strip() if mark else None


def answer_of(cell: Any, what: str, worked: bool = False) -> str:
    """The gold of a cell: what follows ####, or is in the last \\boxed{}, else all of it.

    worked: the cell may hold a worked solution, which is no answer without a mark. Raises TaskError.
    """
    text = text_of(cell, what)
    for found in (after_hashes(text), boxed(text)):
        if found is not None:
            if not found:
                raise TaskError(f"{what} marks an empty answer")
            return found
    if worked and len(text) > LONGEST_ANSWER:
        raise TaskError(f"{what} has neither #### nor a \\boxed{{}}, and is too long to be the answer itself")
    return text.strip()


def grid_of(cell: Any, what: str) -> str:
    """The solution of a ZebraLogic grid, as JSON {"header": [...], "rows": [[...], ...]}.

    Raises TaskError for another shape and for one in which the answers were blanked out.
    """
    grid = parsed(cell) if isinstance(cell, str) else cell
    header, rows = (plain(grid.get(k)) for k in ("header", "rows")) if isinstance(grid, Mapping) else (None, None)
    if not isinstance(header, list) or not isinstance(rows, list) or not header or not rows:
        raise TaskError(f'{what} is no grid {{"header": [...], "rows": [[...], ...]}}')
    if any(not isinstance(row, list) or len(row) != len(header) for row in rows):
        raise TaskError(f"{what} has a row that is not as long as its header")
    cells = [[str(c).strip() for c in row] for row in rows]
    blank = sum(_is_blank(c) for row in cells for c in row[1:])
    if blank or len(header) < 2:
        raise TaskError(
            f"{what} is redacted: {blank} of its cells hold no answer; take a copy of the set that has the solutions"
        )
    return json.dumps({"header": [str(h) for h in header], "rows": cells}, ensure_ascii=False)


def _is_blank(cell: str) -> bool:
    return not cell or set(cell) == {"_"} or set(cell) == {"-"} or cell.lower() in _REDACTED


def choices_of(cell: Any, what: str) -> list[str]:
    """The choices of a question, 2 to 26. Raises TaskError."""
    found = plain(parsed(cell) if isinstance(cell, str) else cell)
    if not isinstance(found, Sequence) or isinstance(found, str) or not 2 <= len(found) <= len(LETTERS):
        raise TaskError(f"{what} is no list of 2 to {len(LETTERS)} choices")
    return [text_of(c, what) for c in found]


def letter_of(cell: Any, choices: Sequence[str], what: str) -> str:
    """The letter of the right choice, given as its text, its letter, or its number from 0. Raises TaskError."""
    text = text_of(cell, what).strip()
    folded = [c.strip().casefold() for c in choices]
    if folded.count(text.casefold()) == 1:
        return LETTERS[folded.index(text.casefold())]
    if text.upper() in LETTERS[: len(choices)]:
        return text.upper()
    if is_integer(text) and 0 <= int(text) < len(choices):
        return LETTERS[int(text)]
    raise TaskError(f"{what}={text!r} is none of the choices {list(choices)}")


def choice_question(puzzle: str, question: str, choices: Sequence[str]) -> str:
    """A puzzle, its question, and its choices by letter, with how to answer."""
    listed = "\n".join(f"{LETTERS[i]}) {c.strip()}" for i, c in enumerate(choices))
    parts = [p.strip() for p in (puzzle, question) if p.strip()]
    return "\n\n".join([*parts, listed, "End with `Answer: ` and the letter of the right choice."])
