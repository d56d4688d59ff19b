"""Prompts and rewards. No torch and no transformers anywhere below this package.

`build` makes the training and held-out prompts of a task; `RewardPool` scores responses in worker
processes. Importing this package stays cheap (the workers do it): the parts load when used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.sections.policy import ChainSumTask
    from asyncrl.tasks.base import Task

__all__ = ["build"]


def build(task: ChainSumTask, tokenizer_dir: str | Path) -> Task:
    """Training and held-out prompts of the configured task, tokenized with a model folder's tokenizer.

    Deterministic in the task section and the tokenizer. Raises TaskError when the verifier fails its
    gate, when there are too few different items, when training and held-out texts overlap, or when
    the tokenizer cannot write the prompts or names no stop token.
    """
    from asyncrl.tasks import chain_sum

    return chain_sum.build(task, tokenizer_dir)
