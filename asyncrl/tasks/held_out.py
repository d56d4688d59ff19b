"""What is asked of each held-out set: how many samples, and whether a greedy answer, too. Pure."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.errors import ConfigError
from asyncrl.sections.fleet import EvalSection
from asyncrl.sections.task import EvalSetSection, TaskSection
from asyncrl.tasks.estimates import ks
from asyncrl.tasks.names import names_of
from asyncrl.types import Prompt

MOST_NAMED = 40
"""Metrics that a message names."""


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


def names_answers(task: TaskSection) -> bool:
    """Whether a verifier of asyncrl's scores, which names the answer it finds; users' rewards need not."""
    return task.reward is None and task.environment is None


def metric_names(task: TaskSection, evaluation: EvalSection) -> list[str]:
    """The metrics that an evaluation with these settings may have; eval/<set>/part/<name> are not among them."""
    asked = asked_by_set(task, evaluation)
    if task.name == "chain_sum":
        asked = {"chain_sum": Asked(evaluation.samples, evaluation.greedy)}
    names = ["eval/sampled_accuracy"] * any(a.samples for a in asked.values())
    names += ["eval/greedy_accuracy"] * any(a.greedy for a in asked.values())
    names += [f"eval/{word}" for word in ("response_length", "truncated_fraction", "count", "failed")]
    for name, (k, greedy) in asked.items():
        own = [f"avg_at_{k}"] * (k > 0) + [f"pass_at_{j}" for j in ks(k)] + [f"maj_at_{k}"] * (k > 1)
        own += ["greedy"] * greedy + ["length", "truncated", "no_answer", "stderr", "ci_low", "ci_high"]
        names += [f"eval/{name}/{word}" for word in (*own, "prompts", "count", "failed")]
    return names


def check_keep_best(metric: str | None, task: TaskSection, evaluation: EvalSection) -> None:
    """ConfigError for a learner.keep_best that no evaluation will have, with the names that can come."""
    if metric is None or not evaluation.every:
        return
    names = metric_names(task, evaluation)
    sets = {name.split("/")[1] for name in names if name.count("/") == 2}
    word = metric.split("/")
    if metric in names or (len(word) > 3 and word[1] in sets and word[2] == "part"):
        return
    own = [name for name in names if name.startswith(f"eval/{word[1]}/")]
    shown = own or [name for name in names if name.split("/")[-1] not in ("stderr", "prompts", "count", "failed")]
    more = f" and {len(shown) - MOST_NAMED} more" * (len(shown) > MOST_NAMED)
    raise ConfigError(
        f"learner.keep_best={metric}: no evaluation will have such a metric; the names that can come are "
        f"{', '.join(shown[:MOST_NAMED])}{more}, and eval/<set>/part/<name> of a reward with parts"
    )
