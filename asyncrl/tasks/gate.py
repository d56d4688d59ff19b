"""The check that a verifier must pass before a task may train: junk earns nothing, gold earns 1.

Found necessary in the field: some public procedural tasks pay 1.0 for any text, pay a fraction for
text that merely contains the answer, or raise on junk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncrl.errors import TaskError
from asyncrl.tasks.base import Item
from asyncrl.tasks.rewards import score, verifier

MAX_JUNK_REWARD = 0.05

_JUNK = (
    " ", "nan", "inf", "None", "True", "False", "#", "##", "{}", "[]", "\\boxed{}", "<answer></answer>", "1/0",
    "the answer is below", "0" * 400, "(" * 400, "9^" * 40, "\x00\ufffd",
)  # fmt: skip


def check(source: str, items: Sequence[Item], task: str | None = None) -> None:
    """Gate verifiers on some items of a task: of each item its own, else that of `source`.

    task: how errors name it, where it is not by `source`. Raises TaskError that names the task and the verifier. Needs
    `prepare` of the verifiers that have it.
    """
    task = source if task is None else task
    if not items:
        raise TaskError(f"task {task!r}: no items to check its verifier with")
    for item in items:
        _Gate(task, item.verifier or source).check(item)


class _Gate:
    """One verifier on its way into one task."""

    def __init__(self, task: str, source: str) -> None:
        self._source = source
        self._verifier = verifier(source)
        self._who = f"task {task!r}" if task == source else f"task {task!r} with verifier {source!r}"

    def check(self, item: Item) -> None:
        """Raise TaskError for an item that the verifier scores wrongly."""
        if not item.answer:
            raise TaskError(f"{self._who}: item {_shown(item.text)} has no answer")
        try:
            gold = self._verifier.gold(item.answer)
        except Exception as exc:  # foreign verifier code may raise anything; the task is refused by name
            raise TaskError(f"{self._who}: its verifier cannot use the answer {_shown(item.answer)}: {exc!r}") from exc
        if self._score(gold, item) != 1.0:
            raise TaskError(f"{self._who}: the gold response {_shown(gold)} to {_shown(item.text)} does not score 1")
        for empty in ("", None):
            if self._score(empty, item) != 0.0:
                raise TaskError(f"{self._who}: an empty response to {_shown(item.text)} does not score 0")
        # Text that contains the gold answer, or stops short of it, is junk too: it must not be paid for.
        wrapped = (
            f"maybe {item.answer} or not", f"{item.answer} {item.answer}", f"{gold}{item.answer}0", f"{item.answer}.5",
            item.text,
        )  # fmt: skip
        for junk in (*_JUNK, *wrapped):
            if junk.casefold() == item.answer.casefold() or (self._verifier.anywhere and _names(junk, item.answer)):
                continue
            value = self._score(junk, item)
            if value > MAX_JUNK_REWARD:
                raise TaskError(
                    f"{self._who}: junk response {_shown(junk)} to {_shown(item.text)} scores {value}, "
                    f"at most {MAX_JUNK_REWARD} is allowed"
                )

    def _score(self, text: str | None, item: Item) -> float:
        try:
            return score(self._source, text, item.answer)
        except TaskError as exc:
            raise TaskError(f"{self._who}: {exc}") from exc
        except Exception as exc:  # foreign verifier code may raise anything; the task is refused by name
            shown = None if text is None else text[:40]
            raise TaskError(f"{self._who}: its verifier raised {exc!r} on {shown!r}") from exc


def _names(text: str, answer: str) -> bool:
    """Whether the text has the answer as a word of its own, or a number that is it, signs and zeros aside (4-2: 2)."""
    before, after = r"(?<![\w.])" if answer[:1].isalnum() else "", r"(?!\w|\.\d)" if answer[-1:].isalnum() else ""
    if re.search(before + re.escape(answer) + after, text):
        return True
    numbers = re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))
    return answer.removeprefix("-") in {n if "." in n else n.lstrip("0") or "0" for n in numbers}


def _shown(text: str) -> str:
    return repr(text[:80] + ("..." if len(text) > 80 else ""))
