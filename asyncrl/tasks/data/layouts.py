"""What the columns of a file mean: which one is the prompt, which the gold answer, what scores it.

A layout is found by the names of the columns, in any case; keys of the config come first. Knows rows, no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.errors import TaskError
from asyncrl.sections.task import SourceSection
from asyncrl.tasks.base import Item
from asyncrl.tasks.data import gold, wrappers
from asyncrl.tasks.data.columns import Messages, Values, as_json, find, plain, prompt_of, text_of, value
from asyncrl.tasks.procedural import grids

PROMPTS = ("prompt", "problem", "question", "puzzle")
ANSWERS = ("reward_model.ground_truth", "answer", "solution")
IDS = ("extra_info.index", "unique_id", "id", "problem_idx", "index")
MATH_COLUMNS = frozenset({"subject", "level", "type"})
"""Columns of MATH and its subsets, whose answers are not all whole numbers."""
GAME = "extra_info.game_data_str"
"""Where SynLogic keeps its gold, as JSON, with reward_model empty."""

_BULKY = frozenset({"source_prompt", "solution", "reward_model", "messages"})
"""Columns that repeat the prompt or the answer: they travel only for a user's reward or environment."""
_SHORT = 256
_LARGEST_EXTRA = 2**16

Kind = Literal["plain", "grid", "choice"]


@dataclass(frozen=True)
class Wants:
    """What the task needs of a row. answers: a gold, which a user's own reward may do without. columns: all of them,
    as a user's reward or environment may read any. tasks: rows of one prompt with different other columns are
    different tasks, as they are for an environment."""

    answers: bool = True
    columns: bool = False
    tasks: bool = False


@dataclass(frozen=True)
class Layout:
    """Where a file keeps what. key: of the config, for errors. keys: paths that make two rows different."""

    kind: Kind
    prompt: str
    answer: str | None
    columns: tuple[str, ...]
    verifier: str | None
    key: str
    wants: Wants = field(default_factory=Wants)

    @property
    def keys(self) -> tuple[str, ...]:
        """Paths of the values that make two rows different."""
        if self.wants.tasks:
            return self.columns
        return self._used

    @property
    def _used(self) -> tuple[str, ...]:
        """Paths of the prompt and of its answer."""
        more = {"plain": (GAME,) if self.answer == ANSWERS[0] else (), "grid": (), "choice": ("question", "choices")}
        return tuple(k for k in (self.prompt, self.answer, *more[self.kind]) if k and _has(self.columns, k))

    @property
    def wanted(self) -> tuple[str, ...]:
        """Columns to read."""
        if self.wants.columns:
            return self.columns
        used = {find(k, self.columns) or find(k.partition(".")[0], self.columns) for k in self._used}
        return tuple(c for c in self.columns if c in used or c.lower() not in _BULKY)

    def item(self, values: Values, where: str) -> Item:
        """The item of a row. Raises TaskError that names where and the column."""
        asked = prompt_of(value(values, self.prompt), f"{where}: column {self.prompt!r}")
        text, messages = (asked, ()) if isinstance(asked, str) else (asked[-1][1], asked)
        answer = self._answer(values, where)
        if self.kind == "grid":
            grid = json.loads(answer)
            text = grids.question(text, grid["header"], len(grid["rows"]))
        elif self.kind == "choice":
            choices = gold.choices_of(value(values, "choices"), f"{where}: column 'choices'")
            question = text_of(value(values, "question"), f"{where}: column 'question'")
            text = gold.choice_question(text, question, choices)
        whole = bool(messages) or wrappers.unwrap(text) != text or self.kind != "plain"
        verifier = self.verifier or self._verifier(values, answer, where)
        return Item(text, answer, verifier, self._extra(values, where), _kept(messages), whole, where)

    def _answer(self, values: Values, where: str) -> str:
        place = f"{where}: column {self.answer!r}"
        cell = value(values, self.answer) if self.answer else None
        if self.kind == "grid":
            return gold.grid_of(cell, place)
        if self.kind == "choice":
            return gold.letter_of(cell, gold.choices_of(value(values, "choices"), f"{where}: column 'choices'"), place)
        if self.answer == ANSWERS[0] and not _says(cell) and _says(game := value(values, GAME)):
            found = value({"game": game}, "game.answer")
            if not _says(found):
                if self.wants.answers:
                    raise TaskError(f"{where}: column {GAME!r} has no answer, and {ANSWERS[0]} is empty")
                return ""
            return found if isinstance(found, str) else json.dumps(as_json(found), ensure_ascii=False)
        if not self.wants.answers and not _says(cell):
            return ""
        if not self.wants.answers and isinstance(plain(cell), list | Mapping):
            return json.dumps(as_json(cell), ensure_ascii=False)  # for code that knows what it is
        leaf = (self.answer or "").rpartition(".")[2].lower()
        return gold.answer_of(cell, place, worked=leaf == "solution")

    def _verifier(self, values: Values, answer: str, where: str) -> str:
        """What scores a row, by the data set that it names, else by its columns and its gold."""
        if self.kind != "plain":
            return {"grid": "zebra_grid", "choice": "choice"}[self.kind]
        if self.answer == ANSWERS[0] and not _says(value(values, self.answer)) and answer:
            return "exact"
        named = str(value(values, "data_source") or "").lower()
        if "gsm8k" in named:
            return "gsm8k"
        if "aime" in named:
            return "integer" if gold.is_integer(answer) else "math"
        lower = {c.lower() for c in self.columns}
        ability = str(value(values, "ability") or "").lower()
        if "math" in named or ability == "math" or MATH_COLUMNS & lower:
            return "math"
        if "####" in str(value(values, self.answer or "") or ""):
            return "gsm8k"
        if gold.is_integer(answer):
            return "integer"
        if "problem" in lower or gold.looks_like_math(answer):
            return "math"
        if not self.wants.answers:
            return ""
        raise TaskError(
            f"{where}: nothing says how the answer {answer[:60]!r} is scored; set {self.key}.verifier "
            "(docs/verifiers.md)"
        )

    def _extra(self, values: Values, where: str) -> str:
        """The other columns as JSON: all of them where a user's code may read them, else the short ones."""
        used = {(find(k, self.columns) or find(k.partition(".")[0], self.columns)) for k in self._used}
        name = next((v for k in IDS if (v := value(values, k)) is not None), None)
        if self.wants.columns:
            prompt = find(self.prompt, self.columns)
            rest = {as_json(k): as_json(v) for k, v in values.items() if k != prompt}
        else:
            short = {k: v for k, v in values.items() if k not in used and k.lower() not in _BULKY and _is_short(v)}
            rest = {as_json(k): as_json(v) for k, v in short.items()}
        rest = ({"id": as_json(name)} if name is not None else {}) | rest
        text = json.dumps(rest, ensure_ascii=False) if rest else ""
        if len(text) > _LARGEST_EXTRA:
            raise TaskError(
                f"{where}: its other columns take {len(text)} characters, and at most {_LARGEST_EXTRA} travel with a "
                "prompt; write a file without the largest ones"
            )
        return text


def detect(columns: Sequence[str], source: SourceSection, key: str, path: str, wants: Wants) -> Layout:
    """The layout of a file with these columns. key: `task.train[0]`. Raises TaskError that lists the columns."""
    names = tuple(columns)
    lower = {c.lower() for c in names}
    free = source.prompt_key is None and source.answer_key is None
    if free and {"puzzle", "question", "choices"} <= lower:
        if "answer" not in lower:
            raise _lacks("answer", path, names, f"{key}.answer_key", "the public copy of this set has no answers")
        return Layout("choice", "puzzle", "answer", names, source.verifier, key, wants)
    if free and {"puzzle", "solution"} <= lower:
        return Layout("grid", "puzzle", "solution", names, source.verifier, key, wants)
    prompt = source.prompt_key or next((p for p in PROMPTS if p in lower), None)
    if prompt is None or not _has(names, prompt):
        raise _lacks("prompt", path, names, f"{key}.prompt_key", prompt and f"there is none named {prompt!r}")
    answer = source.answer_key or next((a for a in ANSWERS if a.partition(".")[0] in lower), None)
    if (answer is None and wants.answers) or (answer is not None and not _has(names, answer)):
        raise _lacks("answer", path, names, f"{key}.answer_key", answer and f"there is none named {answer!r}")
    return Layout("plain", prompt, answer, names, source.verifier, key, wants)


def _lacks(what: str, path: str, names: Sequence[str], key: str, why: str | None) -> TaskError:
    return TaskError(
        f"{path!r} has no {what} column{f' ({why})' if why else ''}; its columns are {', '.join(names)}; set {key}"
    )


def _has(columns: Sequence[str], path: str) -> bool:
    return (find(path, columns) or find(path.partition(".")[0], columns)) is not None


def _says(cell: Any) -> bool:
    return cell is not None and cell != ""


def _is_short(cell: Any) -> bool:
    return isinstance(cell, bool | int | float) or (isinstance(cell, str) and len(cell) <= _SHORT)


def _kept(messages: Messages) -> Messages:
    """A single message of the user is a question like any other."""
    return () if len(messages) == 1 else messages
