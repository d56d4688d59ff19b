"""A reward of the user's: the function that task.reward names, in a pool worker (docs/verifiers.md).

The name comes from the configuration of the process that started the worker; nothing that was received names code.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.errors import TaskError
from asyncrl.tasks.processes import Child, first_word
from asyncrl.tasks.rewards.base import MAX_EXTRACTED, Verdict
from asyncrl.tasks.words import memory_hint, with_article

RESPONSE, RESPONSES = "text", "texts"
CONTEXT = ("prompt", "answer", "extra", "data_source")
MAX_PARTS = 24
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Asked(NamedTuple):
    """What a reward may read of the prompt of some responses. extra: JSON, or ""."""

    answer: str = ""
    extra: str = ""
    data_source: str = ""
    prompt: str = ""


class UserReward:
    """The function, called by the names of its parameters; one that is asynchronous runs in a loop of its own."""

    def __init__(self, name: str) -> None:
        """Import it. Raises TaskError, which names task.reward, the reason and the remedy."""
        self._name = name
        self._call = _find(name)
        self._parameters = _parameters(name, self._call)
        self._runner: asyncio.Runner | None = None

    @property
    def takes_groups(self) -> bool:
        """True when it is asked about all responses of a group at once: it declares `texts`."""
        return RESPONSES in self._parameters

    def score(self, text: str, asked: Asked) -> Verdict:
        """Verdict on one response. Raises TaskError for a bad result, and whatever the function raises."""
        return self._verdict(self._run({RESPONSE: text}, asked), "")

    def score_group(self, texts: Sequence[str], asked: Asked) -> list[Verdict | TaskError]:
        """Verdicts on all responses of one prompt, in order; a TaskError in the place of a bad one.

        Raises TaskError when the result is no list of that length, and whatever the function raises.
        """
        results = self._run({RESPONSES: list(texts)}, asked)
        if not isinstance(results, (list, tuple)):
            raise TaskError(f"{self._name} returned {_shown(results)} for {len(texts)} responses; return a list")
        if len(results) != len(texts):
            raise TaskError(f"{self._name} returned {len(results)} rewards for {len(texts)} responses")
        out: list[Verdict | TaskError] = []
        for i, result in enumerate(results):
            try:
                out.append(self._verdict(result, f" for response {i}"))
            except TaskError as exc:
                out.append(exc)
        return out

    def _run(self, responses: dict[str, Any], asked: Asked) -> Any:
        given: dict[str, Any] = dict(responses)
        for name in CONTEXT:
            if name in self._parameters:
                value = getattr(asked, name)
                given[name] = (json.loads(value) if value else {}) if name == "extra" else value
        result = self._call(**given)
        if inspect.isawaitable(result):
            self._runner = self._runner or asyncio.Runner()
            result = self._runner.run(_awaited(result))
        return result

    def _verdict(self, result: Any, which: str) -> Verdict:
        """Of what the function returned for one response."""
        what = f"{self._name} returned{which}"
        if not isinstance(result, Mapping):
            return Verdict(_finite(result, what, "a number or a dict with a number as 'reward'"))
        if "reward" not in result:
            raise TaskError(f"{what} a dict without 'reward': it has {sorted(map(str, result))[:10]}")
        named = {k: v for k, v in result.items() if k not in ("reward", "extracted")}
        if len(named) > MAX_PARTS:
            raise TaskError(f"{what} {len(named)} parts; at most {MAX_PARTS} are kept")
        for name in named:
            if not isinstance(name, str) or not _PART.fullmatch(name):
                raise TaskError(
                    f"{what} a part named {str(name)[:80]!r}; use up to 64 letters, digits, '_', '.' and '-'"
                )
        extracted = result.get("extracted", "")
        if not isinstance(extracted, str):
            raise TaskError(f"{what} extracted={_shown(extracted)}; it must be a text")
        reward = _finite(result["reward"], f"{what} reward", "a finite number")
        parts = {k: _finite(v, f"{what} part {k}", "a finite number") for k, v in named.items()}
        return Verdict(reward, parts, extracted[:MAX_EXTRACTED])


def check(name: str, memory_bytes: int, timeout_s: float = 60.0) -> None:
    """Load the function in a worker, as the run will. Raises TaskError: key, value, reason and remedy."""
    child = Child("asyncrl.tasks.worker", "asyncrl.tasks.rewards:judge", str(memory_bytes), name)
    first = first_word(child, f"task.reward={name}", memory_bytes, timeout_s)
    if "failed" in first:
        raise TaskError(first["failed"])


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function = name.partition(":")
    remedy = (
        "name a function as package.module:function, importable from the folder in which asyncrl is started "
        "(docs/verifiers.md)"
    )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:  # importing runs foreign code
        why = f"importing {module_name!r} failed with {type(exc).__name__}: {str(exc)[:300]}{memory_hint(exc)}"
        raise TaskError(f"task.reward={name}: {why}; {remedy}") from exc
    found = getattr(module, function, None)
    if not callable(found):
        where = getattr(module, "__file__", None) or "a package without a file"
        what = (
            "has no function"
            if found is None
            else f"has {with_article(type(found).__name__)}, which cannot be called, as"
        )
        raise TaskError(f"task.reward={name}: {module_name!r} ({where}) {what} {function!r}; {remedy}")
    call: Callable[..., Any] = found
    return call


def _parameters(name: str, call: Callable[..., Any]) -> frozenset[str]:
    """Names that it is called with. Raises TaskError for parameters that nothing is given for."""
    known = (RESPONSE, RESPONSES, *CONTEXT)
    remedy = f"declare text (one response) or texts (all of a group), and what you need of {', '.join(CONTEXT)}"
    try:
        declared = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as exc:
        raise TaskError(f"task.reward={name}: its parameters cannot be read ({exc}); {remedy}") from exc
    by_name = {p.name for p in declared if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for p in declared:
        if p.kind is p.POSITIONAL_ONLY or (p.name in by_name and p.name not in known and p.default is p.empty):
            raise TaskError(f"task.reward={name}: nothing is given for its parameter {p.name!r}; {remedy}")
    if (RESPONSE in by_name) == (RESPONSES in by_name):
        both = "both text and texts" if RESPONSE in by_name else "neither text nor texts"
        raise TaskError(f"task.reward={name}: it takes {both}; {remedy}")
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in declared)
    return frozenset(by_name & set(known)) | (frozenset(CONTEXT) if takes_rest else frozenset())


async def _awaited(value: Any) -> Any:
    return await value


def _finite(value: Any, what: str, wanted: str) -> float:
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()  # of numpy or torch: np.True_, a tensor of no axes
    if not isinstance(value, numbers.Real):
        raise TaskError(f"{what} {_shown(value)}; return {wanted}")
    if not math.isfinite(value):
        raise TaskError(f"{what} {float(value)}; return {wanted} that is finite")
    return float(value)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
