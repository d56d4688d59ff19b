"""What an environment answers to one response. The standard library only: users' modules import it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_OBSERVATION = 1_000_000
"""Characters of an observation."""
MAX_PARTS = 24
"""Named parts of an episode's reward; the number of turns and what shapes rewards come on top."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Step(NamedTuple):
    """The answer of an environment to one response of the policy.

    observation: what the policy reads next; None ends the episode. done: the episode ends, and the observation is not
    used. reward: added to the reward of the episode. parts: named numbers, each added to that of the episode.
    """

    observation: str | None = None
    done: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = {}


def step_of(value: Any) -> Step:
    """What step() returned (a Step, a tuple in its order, a dict of its names), checked.

    Raises ValueError naming what is wrong with it.
    """
    if isinstance(value, Mapping):
        unknown = sorted(str(key) for key in value if key not in Step._fields)
        if unknown:
            raise ValueError(f"step() returned the unknown key {unknown[0]!r}; known: {', '.join(Step._fields)}")
        step = Step(**value)
    elif isinstance(value, tuple) and len(value) <= len(Step._fields):
        step = Step(*value)
    else:
        raise ValueError(f"step() returned {type(value).__name__}; return a Step, a tuple in its order or a dict")
    if step.observation is not None and not isinstance(step.observation, str):
        raise ValueError(f"observation is {type(step.observation).__name__}, expected text or None")
    if step.observation is not None and len(step.observation) > MAX_OBSERVATION:
        raise ValueError(f"observation has {len(step.observation)} characters, at most {MAX_OBSERVATION} are taken")
    parts = {str(name): _finite(f"part {name!r}", part) for name, part in (step.parts or {}).items()}
    _check_names(parts)
    return Step(step.observation, bool(step.done), _finite("reward", step.reward), parts)


def add_parts(total: Mapping[str, float], parts: Mapping[str, float]) -> dict[str, float]:
    """Sums by name. Raises ValueError for more than MAX_PARTS names."""
    out = {**total, **{name: total.get(name, 0.0) + value for name, value in parts.items()}}
    _check_names(out)
    return out


def _check_names(parts: Mapping[str, float]) -> None:
    if len(parts) > MAX_PARTS:
        raise ValueError(f"{len(parts)} named parts, at most {MAX_PARTS} are taken")
    if odd := [name for name in parts if not _NAME.fullmatch(name)]:
        raise ValueError(f"a part is named {odd[0][:80]!r}; use up to 64 letters, digits, '_', '.' and '-'")


def _finite(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{what} is {value!r}, expected a number") from exc
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, expected a finite number")
    return number
