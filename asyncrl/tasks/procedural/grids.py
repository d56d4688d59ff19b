"""ZebraLogic-style puzzles that ask for the whole grid, made by the puzzle generator of reasoning-gym.

Knows nothing of how they are graded (asyncrl.tasks.zebra).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from random import Random

from asyncrl.errors import TaskError
from asyncrl.tasks.base import Item

SIZES = range(2, 7)
"""Houses, and features of a house (the name among them)."""


def read_size(options: Mapping[str, object], key: str) -> tuple[int, int]:
    """(houses, features) of the option size, such as 3*4. Raises TaskError naming `key`.options."""
    unknown = sorted(set(options) - {"size"})
    if unknown:
        raise TaskError(
            f"{key}.options.{unknown[0]} is unknown to zebra_grid; it takes size alone, such as size: '3*4'"
        )
    size = str(options.get("size", "3*3"))
    match = re.fullmatch(r"(\d)\s*[*x]\s*(\d)", size)
    houses, features = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if houses not in SIZES or features not in SIZES:
        raise TaskError(
            f"{key}.options.size={size!r} must be HOUSES*FEATURES with both from {SIZES.start} to {SIZES.stop - 1}, "
            "such as '3*4'"
        )
    return houses, features


def puzzle(seed: int, houses: int, features: int) -> Item:
    """The puzzle of that seed: a function of the three numbers alone."""
    from reasoning_gym.logic.contrib.logic_puzzle.generate import generate_puzzle

    instance, _ = generate_puzzle(Random(seed), houses, features)
    header = [str(column) for column in instance["solution"]["table_header"]]
    rows = [[str(cell) for cell in row] for row in instance["solution"]["table_rows"]]
    gold = json.dumps({"header": header, "rows": rows}, ensure_ascii=False)
    return Item(question(str(instance["puzzle"]), header, houses), gold, "zebra_grid")


def question(text: str, header: Sequence[str], houses: int) -> str:
    """The puzzle with the form that the answer must have, for a header that begins with House."""
    blank = {f"House {number}": dict.fromkeys(header[1:], "___") for number in range(1, houses + 1)}
    form = json.dumps({"reasoning": "___", "solution": blank}, indent=4, ensure_ascii=False)
    return f"{text.strip()}\n\nSolve the puzzle. Give your reasoning and the solution as JSON of this form:\n\n{form}"
