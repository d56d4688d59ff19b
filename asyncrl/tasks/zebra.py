"""Grades the grids of ZebraLogic: the last JSON object of a response with a `solution`, cell by cell.

The rules are those of ZeroEval: keys `House 1`, `House 2`, ..., columns by their names, cells compared without case and
outer spaces, of a list its first entry. Unlike there, no cell of an odd type raises, and the search for the object is
bounded by a few times the length of the text, whatever it holds.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.rewards.base import MAX_EXTRACTED, Verdict, Verifier

_OBJECT = re.compile(r'\{\s{0,99}"')
_DECODER = json.JSONDecoder()
_MAX_TRIES = 256
_MAX_PASSES = 4
_COSTLY = 5_000


def score_grid(text: str, answer: str) -> Verdict:
    """1 when all cells are right, else 0. answer: JSON of {"header": ["House", ...], "rows": [["1", ...], ...]}.

    Parts: cell_accuracy (right cells / all, 0 to 1) and answered (1 for a response with a solution). Raises TaskError
    for a gold answer of another form: that is no reward of 0.
    """
    header, rows = read_gold(answer)
    solution = last_solution(text)
    if solution is None:
        return Verdict(0.0, {"cell_accuracy": 0.0, "answered": 0.0})
    given = [[_cell(_get(_get(solution, f"House {row[0]}"), column)) for column in header[1:]] for row in rows]
    wanted = [[_cell(cell) for cell in row[1:]] for row in rows]
    right = sum(a == b for ours, theirs in zip(given, wanted, strict=True) for a, b in zip(ours, theirs, strict=True))
    total = len(rows) * (len(header) - 1)
    parts = {"cell_accuracy": right / total, "answered": 1.0}
    return Verdict(float(right == total), parts, _short(";".join(",".join(row) for row in given)))


def read_gold(answer: str) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of a gold answer. Raises TaskError saying what is wrong with it."""
    try:
        gold = json.loads(answer)
        header, rows = (
            [str(column) for column in gold["header"]],
            [[_gold(cell) for cell in row] for row in gold["rows"]],
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise TaskError(f"zebra_grid: the gold answer {answer[:80]!r} is not {{header, rows}}: {exc!r}") from exc
    if len(header) < 2 or header[0] != "House" or not rows or any(len(row) != len(header) for row in rows):
        raise TaskError(
            "zebra_grid: the gold answer needs a header that begins with House and rows of its length, got "
            f"{answer[:80]!r}"
        )
    if any(not _cell(cell) or set(_cell(cell)) == {"_"} for row in rows for cell in row):
        raise TaskError(f"zebra_grid: the gold answer has empty cells, as files with redacted answers: {answer[:80]!r}")
    return header, rows


def gold_response(answer: str) -> str:
    """The response that earns 1."""
    header, rows = read_gold(answer)
    houses = {f"House {row[0]}": dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    return json.dumps({"solution": houses}, ensure_ascii=False)


def last_solution(text: str) -> Any:
    """`solution` of the last complete JSON object of the text that has one, or None.

    Tries what begins like an object, the last one first: at most _MAX_TRIES of them, and no more characters than
    a few times those of the text.
    """
    left = _MAX_PASSES * len(text) + 10_000
    starts = [match.start() for match in _OBJECT.finditer(text)]
    for start in reversed(starts[-_MAX_TRIES:]):
        try:
            found, end = _DECODER.raw_decode(text, start)
        except json.JSONDecodeError as exc:
            left -= exc.pos - start
        except (ValueError, RecursionError):  # a number with too many digits, or a deep nest
            left -= _COSTLY
        else:
            if isinstance(found, dict) and "solution" in found:
                return found["solution"]
            left -= end - start
        if left < 0:
            return None
    return None


def _get(mapping: Any, key: str) -> Any:
    return mapping.get(key) if isinstance(mapping, dict) else None


def _cell(value: Any) -> str:
    """A cell as it is compared; "" for what is no text and no number."""
    if isinstance(value, list):
        value = value[0] if value else ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    return value.strip().lower() if isinstance(value, str) else ""


def _gold(cell: Any) -> str:
    return "" if cell is None else str(cell)


def _short(grid: str) -> str:
    """The grid itself where it fits into a verdict, else what stands for it: equal grids are written alike."""
    return grid if len(grid) <= MAX_EXTRACTED else f"grid {hashlib.sha256(grid.encode()).hexdigest()[:32]}"


VERIFIER = Verifier(score_grid, gold=gold_response, anywhere=True)
"""A right grid counts wherever the text has it, if no other one follows."""
