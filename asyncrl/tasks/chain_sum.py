"""reasoning-gym chain_sum: `3+0+7-4=` -> running totals, the answer after the last `#`.

Knows nothing of rewards or tokenizers. reasoning-gym makes item i from Random(seed + i), so two
seeds share items; all sets here come from disjoint index ranges, and the texts are compared too.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from pathlib import Path

from asyncrl.config import ChainSumTask
from asyncrl.errors import TaskError
from asyncrl.tasks import gate
from asyncrl.tasks.base import Item, Task, check_disjoint, make_prompts, read_stop_token_ids

SOURCE = "chain_sum"

# Each task seed owns 2^32 generator seeds, cut into ranges: held-out, training, demonstrations.
_SEED_STRIDE = 2**32
_HELD_OUT_RANGE = 0
_TRAIN_RANGE = 2**30
_DEMONSTRATION_RANGE = 2**31

# Repeats are redrawn. 64 draws per wanted item cover all but e^-64 of a set whose members are
# equally likely; a set that is still short then is nearly exhausted.
_DRAWS_PER_ITEM = 64


def build(task: ChainSumTask, tokenizer_dir: str | Path) -> Task:
    """Prompts of the task; see `asyncrl.tasks.build` for the errors."""
    train, held_out = build_items(task)
    gate.check(SOURCE, [*train[:8], *held_out[:8]])
    return Task(
        name=SOURCE,
        train=make_prompts(SOURCE, train, tokenizer_dir),
        eval=make_prompts(SOURCE, held_out, tokenizer_dir),
        stop_token_ids=read_stop_token_ids(tokenizer_dir),
    )


def build_items(task: ChainSumTask) -> tuple[list[Item], list[Item]]:
    """(training items, held-out items): unique texts, none shared.

    The held-out items are drawn first and do not depend on the training settings but the seed,
    so accuracies of runs with other training sets stay comparable. Raises TaskError naming
    task.train_size or task.eval_size when there are too few different expressions.
    """
    held_out = _distinct(
        _draw(task, _HELD_OUT_RANGE, task.eval_min_terms), task.eval_size, frozenset(), "task.eval_size"
    )
    taken = {item.text for item in held_out}
    train = _distinct(_draw(task, _TRAIN_RANGE, task.min_terms), task.train_size, taken, "task.train_size")
    # Drawn without repeats, the few short expressions come first: shuffle, so that any stretch of
    # the prompt order has the same mix.
    random.Random(task.seed).shuffle(train)
    check_disjoint(SOURCE, train, held_out)
    return train, held_out


def demonstrations(task: ChainSumTask) -> Iterator[Item]:
    """Endless training expressions (repeats included) from a range of their own, none held out."""
    _, held_out = build_items(task)
    taken = {item.text for item in held_out}
    return (item for item in _draw(task, _DEMONSTRATION_RANGE, task.min_terms) if item.text not in taken)


def _draw(task: ChainSumTask, start: int, min_terms: int) -> Iterator[Item]:
    # Importing reasoning-gym costs about 1 CPU second: only processes that build items pay it.
    from reasoning_gym import create_dataset

    dataset = create_dataset(
        SOURCE,
        seed=task.seed * _SEED_STRIDE + start,
        size=_TRAIN_RANGE,
        min_terms=min_terms,
        max_terms=task.max_terms,
        min_digits=task.digits,
        max_digits=task.digits,
    )
    for index in range(_TRAIN_RANGE):
        entry = dataset[index]
        yield Item(entry["metadata"]["expression"].replace(" ", "") + "=", entry["answer"])


def _distinct(source: Iterator[Item], count: int, taken: Container[str], key: str) -> list[Item]:
    """The first `count` items with different texts outside `taken`, in the order drawn."""
    found: dict[str, Item] = {}
    for _ in range(count * _DRAWS_PER_ITEM):
        item = next(source)
        if item.text not in taken:
            found.setdefault(item.text, item)
        if len(found) == count:
            return list(found.values())
    raise TaskError(
        f"{key}={count}: only {len(found)} different chain_sum expressions were found in "
        f"{count * _DRAWS_PER_ITEM} draws; lower {key} or raise task.max_terms or task.digits"
    )
