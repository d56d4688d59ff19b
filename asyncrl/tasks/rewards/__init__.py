"""Verifiers: (response text, gold answer) -> verdict, by name (docs/verifiers.md).

Pure functions that run in the workers of `asyncrl.tasks.pool`. Each extracts the answer itself and pays 0 or 1.
Importing this is cheap: what a verifier needs besides the standard library is loaded when it is first prepared.
"""

from __future__ import annotations

import importlib
import math

from asyncrl.errors import TaskError
from asyncrl.tasks.rewards import schema, texts
from asyncrl.tasks.rewards.base import MAX_EXTRACTED, Verdict, Verifier
from asyncrl.tasks.rewards.mathematics import load, score_math

__all__ = ["LAZY", "LOOKS_FOR", "USER", "VERIFIERS", "Verdict", "Verifier", "judge", "prepare", "score", "verifier"]

USER = "user"
"""Stands for task.reward, which only workers that were started with it have (asyncrl.tasks.user_reward)."""

VERIFIERS: dict[str, Verifier] = {
    "chain_sum": Verifier(texts.score_after_hash, gold=lambda answer: "#" + answer),
    "last_integer": Verifier(texts.score_last_integer, gold=str, anywhere=True),
    "math": Verifier(score_math, gold=lambda answer: f"\\boxed{{{answer}}}", anywhere=True, prepare=load),
    "integer": Verifier(texts.score_integer, gold=lambda answer: f"\\boxed{{{answer}}}"),
    "gsm8k": Verifier(texts.score_gsm8k, gold=lambda a: f"#### {a.rpartition('####')[2].strip()}", anywhere=True),
    "exact": Verifier(texts.score_exact, gold=lambda answer: f"Answer: {answer}"),
    "choice": Verifier(texts.score_choice, gold=lambda answer: f"Answer: {answer}", anywhere=True),
    "json_schema": Verifier(schema.score_schema, gold=schema.gold_document, prepare=schema.prepare),
}

RULES = ("number", "fraction", "word", "text", "list", "factors", "roots", "roles", "grid")
"""Of datasets of reasoning-gym (docs/procedural.md): rg_number, ..."""

LAZY: dict[str, str] = {
    "zebra_grid": "asyncrl.tasks.zebra:VERIFIER",
    **{f"rg_{rule}": f"asyncrl.tasks.procedural.rules:{rule.upper()}" for rule in RULES},
}
"""Verifiers of modules that are loaded when they are used."""

_MARKED = r"what the response marks last, by \boxed{}, <answer></answer> or `Answer: ...`"
LOOKS_FOR: dict[str, str] = {
    "chain_sum": "the number after the last #",
    "last_integer": "the last whole number of the response",
    "math": r"\boxed{} or a line `Answer: ...`, without one the last whole number or the last line",
    "integer": r"\boxed{} or a line `Answer: ...`; nothing counts outside of them",
    "gsm8k": "the number after the last ####, without one the last number",
    "exact": r"\boxed{} or a line `Answer: ...`, without one the whole response",
    "choice": r"a letter in \boxed{} or `Answer: ...`, without one in `answer is B`, `option B` or the last `(B)`",
    "json_schema": "the last complete JSON object or list",
    "zebra_grid": "the last JSON object with a `solution`",
    **{f"rg_{rule}": f"{_MARKED}, without a mark its last line" for rule in RULES},
    "rg_number": f"{_MARKED}, without a mark its last number",
    "rg_grid": f"{_MARKED}, without a mark its last lines",
}
"""What each verifier looks for in a response: what else it holds earns nothing (docs/verifiers.md)."""


def verifier(source: str) -> Verifier:
    """The verifier of that name. Raises TaskError for an unknown one."""
    if source not in VERIFIERS and source in LAZY:
        module, _, name = LAZY[source].partition(":")
        VERIFIERS[source] = getattr(importlib.import_module(module), name)
    try:
        return VERIFIERS[source]
    except KeyError:
        if source == USER:
            raise TaskError(f"the verifier {USER!r} is task.reward, which is not set") from None
        known = sorted({*VERIFIERS, *LAZY, USER})
        raise TaskError(f"no verifier for source {source!r}; known: {known}") from None


def prepare(source: str) -> None:
    """Load what the verifier needs; an unknown name is an error of the item that asks for it."""
    if source in VERIFIERS or source in LAZY:
        loads = verifier(source).prepare
        if loads is not None:
            loads()


def judge(source: str, text: str | None, answer: str) -> Verdict:
    """Verdict on one response; a missing text (None) counts as an empty one.

    Raises TaskError for an unknown source or a reward outside [0, 1], and whatever the verifier raises: a failure
    inside a verifier is never a reward of 0.
    """
    said = verifier(source).score(text or "", answer)
    found = said if isinstance(said, Verdict) else Verdict(float(said))
    if not (math.isfinite(found.reward) and 0.0 <= found.reward <= 1.0):
        raise TaskError(f"verifier {source!r} returned {found.reward}, rewards lie in [0, 1]")
    return found._replace(extracted=found.extracted[:MAX_EXTRACTED])


def score(source: str, text: str | None, answer: str) -> float:
    """The reward alone, in [0, 1]; see `judge`."""
    return judge(source, text, answer).reward
