"""The check that a verifier must pass before a task may train: junk earns nothing, gold earns 1.

Found necessary in the field: some public procedural tasks pay 1.0 for any text, pay a fraction for
text that merely contains the answer, or raise on junk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncrl.errors import TaskError
from asyncrl.tasks.base import Item
from asyncrl.tasks.rewards import Verifier, score, verifier

MAX_JUNK_REWARD = 0.05

_JUNK = (
    " ", "nan", "inf", "None", "True", "False", "#", "##", "{}", "[]", "\\boxed{}", "<answer></answer>", "1/0",
    "the answer is below", "0" * 400, "(" * 400, "9^" * 40, "\x00\ufffd",
)  # fmt: skip


def check(source: str, items: Sequence[Item]) -> None:
    """Gate the verifier of `source` on some of its items. Raises TaskError that names the task."""
    if not items:
        raise TaskError(f"task {source!r}: no items to check its verifier with")
    checked = verifier(source)
    for item in items:
        _check_item(source, checked, item)


def _check_item(source: str, checked: Verifier, item: Item) -> None:
    gold = checked.gold(item.answer)
    if not item.answer:
        raise TaskError(f"task {source!r}: item {item.text!r} has no answer")
    if _score(source, gold, item) != 1.0:
        raise TaskError(f"task {source!r}: the gold response {gold!r} to {item.text!r} does not score 1")
    for empty in ("", None):
        if _score(source, empty, item) != 0.0:
            raise TaskError(f"task {source!r}: an empty response to {item.text!r} does not score 0")
    # Text that contains the gold answer, or stops short of it, is junk too: it must not be paid for.
    wrapped = (
        f"maybe {item.answer} or not", f"{item.answer} {item.answer}", f"{gold}{item.answer}0", f"{item.answer}.5",
        item.text,
    )  # fmt: skip
    for junk in (*_JUNK, *wrapped):
        if checked.anywhere and _names(junk, item.answer):
            continue
        value = _score(source, junk, item)
        if value > MAX_JUNK_REWARD:
            raise TaskError(
                f"task {source!r}: junk response {junk[:40]!r} to {item.text!r} scores {value}, "
                f"at most {MAX_JUNK_REWARD} is allowed"
            )


def _names(text: str, answer: str) -> bool:
    """Whether one of the numbers in the text is the answer, signs and leading zeros aside (4-2 names 2)."""
    numbers = re.findall(r"\d+(?:\.\d+)?", text)
    return answer.removeprefix("-") in {n if "." in n else str(int(n)) for n in numbers}


def _score(source: str, text: str | None, item: Item) -> float:
    try:
        return score(source, text, item.answer)
    except TaskError:
        raise
    except Exception as exc:  # foreign verifier code may raise anything; the task is refused by name
        shown = None if text is None else text[:40]
        raise TaskError(f"task {source!r}: its verifier raised {exc!r} on {shown!r}") from exc
