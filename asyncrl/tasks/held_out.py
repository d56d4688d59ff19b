"""What is asked of each held-out set: how many samples, and whether a greedy answer, too. Pure."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.sections.fleet import EvalSection
from asyncrl.sections.task import EvalSetSection, TaskSection
from asyncrl.tasks.names import names_of
from asyncrl.types import Prompt


class Asked(NamedTuple):
    """Of every prompt of a set: sampled responses, and whether a greedy one."""

    samples: int
    greedy: bool


def asked_of(section: EvalSetSection, evaluation: EvalSection) -> Asked:
    """Of one set of task.eval: its own numbers, else those of the section eval."""
    return Asked(
        section.samples if section.samples is not None else evaluation.samples,
        section.greedy if section.greedy is not None else evaluation.greedy,
    )


def asked_by_set(task: TaskSection, evaluation: EvalSection) -> dict[str, Asked]:
    """By the name of the set, of the sets of task.eval; chain_sum lists none and takes those of the section eval."""
    return {name: asked_of(section, evaluation) for name, section in zip(names_of(task.eval), task.eval, strict=True)}


def set_of(prompt: Prompt) -> str:
    """Name of the held-out set that a prompt is of."""
    return prompt.data_source or prompt.source
