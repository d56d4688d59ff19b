"""Prompts and rewards. No torch and no transformers anywhere below this package.

`build` makes the training and held-out prompts of a task; `RewardPool` scores responses in worker
processes. Importing this package stays cheap (the workers do it): the parts load when used.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.sections.task import TaskSection
    from asyncrl.tasks.base import Task

__all__ = ["build", "check", "longest_prompt"]


def build(task: TaskSection, tokenizer_dir: str | Path) -> Task:
    """Training and held-out prompts of the configured task, tokenized with a model folder's tokenizer.

    Deterministic in the task section, the files it names and the tokenizer. Raises TaskError when the verifier fails
    its gate, when there are too few different items, when training and held-out texts overlap, when a file cannot be
    read (it names file, row and column), or when the tokenizer cannot write the prompts or names no stop token.
    """
    from asyncrl.tasks import chain_sum, sources

    if task.name == "chain_sum":
        return chain_sum.build(task, tokenizer_dir)
    return sources.build(task, tokenizer_dir)


def check(task: TaskSection, limit_s: float = math.inf) -> None:
    """What can be seen before any process starts: sizes, files and their first rows, names of procedures.

    limit_s: longest time that making the items may take, run.start_timeout_s. Raises TaskError as `build` does.
    """
    from asyncrl.tasks import chain_sum, sources

    if task.name == "chain_sum":
        chain_sum.check_sizes(task)
    else:
        sources.check(task, limit_s)


def longest_prompt(task: TaskSection, tokenizer_dir: str | Path) -> int:
    """Bound on the tokens of a prompt, without building any. Raises TaskError for an unusable chat template."""
    from asyncrl.tasks import chain_sum, sources

    if task.name == "chain_sum":
        return chain_sum.longest_prompt(task, tokenizer_dir)
    return sources.longest_prompt(task, tokenizer_dir)
