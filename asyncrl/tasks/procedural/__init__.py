"""Prompts made by procedures: datasets of reasoning-gym that passed the gate, and zebra grids (docs/procedural.md).

Training and held-out items share no text, for any seeds, sizes and options: whether a text may be held out is a
property of the text. Each seed and part draws from a range of indices of its own besides, because reasoning-gym makes
item i from Random(seed + i), so that two seeds share their items. Importing reasoning-gym costs about a CPU second:
only who builds items or checks options pays it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from itertools import count, islice
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.base import Item
from asyncrl.tasks.procedural import grids
from asyncrl.tasks.procedural.names import NAMES, NOT_ENABLED, ZEBRA_GRID, rule_of
from asyncrl.tasks.rewards import score, verifier

__all__ = ["NAMES", "check", "held_out_text", "items"]

log = logging.getLogger(__name__)

SAY_EVERY_S = 15.0
"""Seconds between two lines about a set that is being made."""

# Each seed owns 2^32 generator seeds, cut into ranges as for chain_sum.
_SEED_STRIDE = 2**32
_HELD_OUT_RANGE = 0
_TRAIN_RANGE = 2**30

# Datasets that prepare all their items at once get them in chunks of so many.
_CHUNK = 256

_HELD_OUT_SHARE = 4
"""One in so many texts may be held out; the others may be trained on."""
_PATIENCE = 64
"""Draws per wanted item before a set is called too small."""


def check(name: str, options: Mapping[str, object], key: str = "source") -> None:
    """Raise TaskError for an unknown procedure or option. key: the source in the config, such as task.train[0].

    Without options, and for zebra_grid, this is cheap; else reasoning-gym is imported.
    """
    if name in NOT_ENABLED:
        raise TaskError(
            f"{key}.procedural={name!r} is a dataset of reasoning-gym that is not enabled: {NOT_ENABLED[name]} "
            "(docs/procedural.md lists those that are)"
        )
    if name not in NAMES:
        near = get_close_matches(name, NAMES, 1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "docs/procedural.md lists them"
        raise TaskError(f"{key}.procedural={name!r} is no procedure that passed the gate; {hint}")
    if name == ZEBRA_GRID:
        grids.read_size(options, key)
    elif options:
        _dataset(name, options, 0, key)


def items(
    name: str, options: Mapping[str, object], size: int, seed: int, held_out: bool, key: str = "source"
) -> list[Item]:
    """`size` items with different texts: a function of the arguments (key aside), the same in every process.

    Item.verifier is set. Left out are items without an answer of the kind that their verifier compares, and those
    whose own question would be paid for as the answer. Raises TaskError naming `key` as `check` does, and when there
    are too few different texts.
    """
    check(name, options, key)
    if size < 1:
        raise TaskError(f"{key}.size={size} must be at least 1")
    start = seed * _SEED_STRIDE + (_HELD_OUT_RANGE if held_out else _TRAIN_RANGE)
    found: dict[str, Item] = {}
    most = 1000 + _PATIENCE * size
    said_at = time.monotonic()
    for drawn, item in enumerate(islice(_draw(name, options, start, key), most)):
        if time.monotonic() - said_at >= SAY_EVERY_S:
            log.info("%s: made %d of %d items of %s so far, in %d draws", key, len(found), size, name, drawn)
            said_at = time.monotonic()
        if held_out_text(item.text) is held_out and item.text not in found and _usable(item):
            found[item.text] = item
            if len(found) == size:
                return list(found.values())
    raise TaskError(
        f"{key}.size={size}: only {len(found)} different {'held-out' if held_out else 'training'} items of {name} are "
        f"found in {most} draws; lower {key}.size, or make more of them by {key}.options"
    )


def held_out_text(text: str) -> bool:
    """Whether a text belongs to the held-out part of all texts."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % _HELD_OUT_SHARE == 0


def _usable(item: Item) -> bool:
    """Whether the answer can be given, and not by giving back the question."""
    if not item.answer.strip() or score(item.verifier, verifier(item.verifier).gold(item.answer), item.answer) != 1.0:
        return False
    return verifier(item.verifier).anywhere or score(item.verifier, item.text, item.answer) == 0.0


def _draw(name: str, options: Mapping[str, object], start: int, key: str) -> Iterator[Item]:
    """Endless items from `start` on, repeats included."""
    if name == ZEBRA_GRID:
        houses, features = grids.read_size(options, key)
        yield from (grids.puzzle(seed, houses, features) for seed in count(start))
    for first in count(start, _CHUNK):
        dataset = _dataset(name, options, first, key)
        for index in range(_CHUNK):
            try:
                entry = dataset[index]
                text, answer = str(entry["question"]), entry["answer"]
            except Exception as exc:  # foreign code; the source is refused by name
                raise TaskError(f"{key}: {name} cannot make its item {first + index}: {exc!r}") from exc
            if isinstance(answer, str):
                yield Item(text, answer, rule_of(name, answer))


def _dataset(name: str, options: Mapping[str, object], seed: int, key: str) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    known = {field.name for field in fields(DATASETS[name][1])} - {"seed", "size"}
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(known)) or 'none'}"
            raise TaskError(f"{key}.options.{option} is no option of {name}; {hint}")
    try:
        return create_dataset(name, seed=seed, size=_CHUNK, **options)
    except Exception as exc:  # its checks are assertions, but a value of a wrong type may raise anything
        raise TaskError(f"{key}.options={dict(options)} are refused by {name}: {exc}") from exc
