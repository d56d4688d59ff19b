"""Calls a method of the registry with what it names: the one place where a name in a config becomes a function.

Knows no single method. A parameter of a method is an input of its kind (INPUTS) or one of its knobs, by name:

surrogates    logp [B, T] with a gradient; old_logp [B, T]: pi_old, or mu under ratio=behaviour; advantages [B];
              mask [B, T]; knobs of `algorithm`. Returns a TokenLoss.
corrections   logp [B, T]: pi_old; rollout_logp [B, T]: mu, NaN where missing; mask [B, T]; router_shift [B, T]: how far
              the router moved since the start of the take; knobs of `algorithm.correction`. Returns weights [B, T]
              without a gradient, 0 where the mask is 0.
advantages    groups (advantages.groups.Groups), eps. Returns [B].
aggregations  sum_B [B], count_B [B], total_tokens, total_sequences, constant. Returns a scalar.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.algos.registry import Method

INPUTS: Mapping[str, tuple[str, ...]] = {
    "surrogates": ("logp", "old_logp", "advantages", "mask"),
    "corrections": ("logp", "rollout_logp", "mask", "router_shift"),
    "advantages": ("groups", "eps"),
    "aggregate": ("sum_B", "count_B", "total_tokens", "total_sequences", "constant"),
}
"""Folder of a kind of methods, to what a method of it may name besides its knobs."""


@functools.cache
def function(place: str) -> Callable[..., Any]:
    """The function of a registry line: "module:function" below asyncrl.algos."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"asyncrl.algos.{module}"), name)
    return found


@functools.cache
def named(place: str) -> tuple[str, ...]:
    """What the function of a registry line takes, in order."""
    return tuple(inspect.signature(function(place)).parameters)


def call(method: Method, inputs: Mapping[str, Any], settings: object = None) -> Any:
    """Run a method. inputs: tensors by name, of which it gets those it names. settings: the config section with its
    knobs; where one is null, the method's own default counts. Raises ValueError for a name that is neither, and what
    the method raises, ValueError as a rule."""
    given = {**inputs, **knobs_of(method, settings)}
    names = named(method.place)
    if unknown := [name for name in names if name not in given]:
        raise ValueError(
            f"{method.place} has a parameter {unknown[0]!r}, which is no input of its kind ({', '.join(inputs)}) and "
            f"none of its knobs ({', '.join(method.knobs) or 'it has none'}); name one of these, or add the knob to "
            "its line in asyncrl/algos/registry.py and a key of that name to its config section"
        )
    if unused := [name for name in method.knobs if name not in names]:
        raise ValueError(
            f"{method.place} has a knob {unused[0]!r} in asyncrl/algos/registry.py, but no parameter of that name; its "
            f"parameters are {', '.join(names)}"
        )
    return function(method.place)(**{name: given[name] for name in names})


def knobs_of(method: Method, settings: object) -> dict[str, Any]:
    """The settings that a method takes, with its own default for those that are null. ValueError for a knob that the
    section lacks."""
    values = {}
    for name in method.knobs:
        if not hasattr(settings, name):
            raise ValueError(
                f"{method.place} has a knob {name!r}, which is no key of {type(settings).__name__}; add it there, in "
                "asyncrl/sections/algorithm.py"
            )
        value = getattr(settings, name)
        values[name] = method.defaults.get(name) if value is None else value
    return values
