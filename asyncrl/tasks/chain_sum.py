"""reasoning-gym chain_sum: `3+0+7-4=` in the task's template -> running totals and `#6`, or any text with a last 6.

Knows nothing of how answers are scored. reasoning-gym makes item i from Random(seed + i), so two
seeds share items; all sets here come from disjoint index ranges, and the texts are compared too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Iterator
from pathlib import Path

from asyncrl.errors import TaskError
from asyncrl.sections.task import TaskSection
from asyncrl.tasks import chat, gate
from asyncrl.tasks.base import Item, Task, check_disjoint, make_prompts, read_stop_token_ids

SOURCE = "chain_sum"

# Each task seed owns 2^32 generator seeds, cut into ranges: held-out, training, demonstrations.
_SEED_STRIDE = 2**32
_HELD_OUT_RANGE = 0
_TRAIN_RANGE = 2**30
_DEMONSTRATION_RANGE = 2**31

# Repeats are redrawn. A draw costs about 15 us, so this is half a minute; a set that needs more is
# nearly exhausted or too large to be drawn at every start.
_MAX_DRAWS = 2**21


def build(task: TaskSection, tokenizer_dir: str | Path) -> Task:
    """Prompts of the task; see `asyncrl.tasks.build` for the errors."""
    train, held_out = build_items(task)
    source = SOURCE if task.answer == "running_total" else task.answer
    gate.check(source, [*train[:8], *held_out[:8]])
    write = chat.writer(task.template, task.chat, tokenizer_dir, task.system_prompt)
    return Task(
        name=SOURCE,
        train=make_prompts(source, train, tokenizer_dir, write, SOURCE),
        eval=make_prompts(source, held_out, tokenizer_dir, write, SOURCE),
        stop_token_ids=read_stop_token_ids(tokenizer_dir),
    )


def longest_prompt(task: TaskSection, tokenizer_dir: str | Path) -> int:
    """Bound on the tokens of a prompt: of what stands around the expression, and one per digit, sign and `=`.

    Raises TaskError as `build` does for templates.
    """
    write = chat.writer(task.template, task.chat, tokenizer_dir, task.system_prompt)
    return chat.longest(write, task.max_terms * (task.digits + 1), tokenizer_dir)


def check_sizes(task: TaskSection) -> None:
    """Raise TaskError naming task.train_size or task.eval_size when so many expressions cannot be drawn.

    Draws nothing: a draw picks a number of terms, then one of its n expressions evenly, so d draws
    find n (1 - exp(-d p / n)) of them in expectation, p the share of that number of terms.
    """
    held_out = _expect("task.eval_size", task.eval_size, _expressions(task, task.eval_min_terms), {})
    _expect("task.train_size", task.train_size, _expressions(task, task.min_terms), held_out)


def build_items(task: TaskSection) -> tuple[list[Item], list[Item]]:
    """(training items, held-out items): unique texts, none shared.

    The held-out items are drawn first and do not depend on the training settings but the seed,
    so accuracies of runs with other training sets stay comparable. Raises TaskError naming
    task.train_size or task.eval_size when there are too few different expressions.
    """
    check_sizes(task)
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


def demonstrations(task: TaskSection) -> Iterator[Item]:
    """Endless training expressions (repeats included) from a range of their own, none held out."""
    _, held_out = build_items(task)
    taken = {item.text for item in held_out}
    return (item for item in _draw(task, _DEMONSTRATION_RANGE, task.min_terms) if item.text not in taken)


def _draw(task: TaskSection, start: int, min_terms: int) -> Iterator[Item]:
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


def _expressions(task: TaskSection, min_terms: int) -> dict[int, int]:
    """Number of terms -> number of different expressions."""
    numbers = 10 if task.digits == 1 else 9 * 10 ** (task.digits - 1)
    return {terms: numbers**terms * 2 ** (terms - 1) for terms in range(min_terms, task.max_terms + 1)}


def _expect(key: str, count: int, sizes: dict[int, int], taken: dict[int, float]) -> dict[int, float]:
    """Expressions by number of terms among the first `count` different ones outside `taken`."""

    def found(draws: int) -> dict[int, float]:
        left = {terms: size - taken.get(terms, 0.0) for terms, size in sizes.items()}
        return {t: left[t] * -math.expm1(-draws / (len(sizes) * sizes[t])) for t in sizes}

    low, high = 0, _MAX_DRAWS
    most = sum(found(high).values())
    if most < count - 0.5:
        raise _too_few(key, count, round(most))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(found(middle).values()) >= count - 0.5 else (middle + 1, high)
    return found(low)


def _too_few(key: str, count: int, found: int) -> TaskError:
    return TaskError(
        f"{key}={count}: only {found} different chain_sum expressions are found in {_MAX_DRAWS} draws; "
        f"lower {key} or raise task.max_terms or task.digits"
    )


def _distinct(source: Iterator[Item], count: int, taken: Container[str], key: str) -> list[Item]:
    """The first `count` items with different texts outside `taken`, in the order drawn."""
    found: dict[str, Item] = {}
    for _ in range(2 * _MAX_DRAWS):  # `check_sizes` judges by the mean; a draw may be unlucky
        item = next(source)
        if item.text not in taken:
            found.setdefault(item.text, item)
        if len(found) == count:
            return list(found.values())
    raise _too_few(key, count, len(found))
