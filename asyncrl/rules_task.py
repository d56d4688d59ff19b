"""The rules between the settings of the task, its rewards and the evaluation; as asyncrl.rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config import Config


def problems(c: Config) -> Iterator[str]:
    """One sentence per rule that the config breaks."""
    yield from _chain_sum(c) if c.task.name == "chain_sum" else _sources(c)
    if "{question}" not in c.task.template:
        yield f"task.template={c.task.template!r} has no {{question}}; put it where the question goes"
    if c.task.system_prompt is not None and not c.task.chat:
        yield (
            f"task.system_prompt={c.task.system_prompt!r} would not be sent with task.chat=false; set task.chat=true, "
            "or write it into task.template"
        )
    if c.task.curriculum.low >= c.task.curriculum.high:
        yield (
            f"task.curriculum.low={c.task.curriculum.low:g} must be below task.curriculum.high="
            f"{c.task.curriculum.high:g}, or no prompt is between them"
        )
    if c.task.environment is not None and c.task.reward is not None:
        yield (
            f"task.reward={c.task.reward} would not be asked with task.environment={c.task.environment}, whose steps "
            "give the reward; set task.reward=null, or call it in the environment"
        )
    yield from _truncated(c)
    if c.learner.keep_best is not None and c.eval.every == 0:
        yield (
            f"learner.keep_best={c.learner.keep_best} needs evaluations, but eval.every=0; set eval.every, or "
            "learner.keep_best=null"
        )


def _chain_sum(c: Config) -> Iterator[str]:
    if c.task.max_terms < max(c.task.min_terms, c.task.eval_min_terms):
        yield (
            f"task.max_terms={c.task.max_terms} is smaller than task.min_terms={c.task.min_terms} or "
            f"task.eval_min_terms={c.task.eval_min_terms}; raise task.max_terms"
        )
    for key in ("train", "eval"):
        if getattr(c.task, key):
            yield f"task.{key} lists sources, which task.name=chain_sum does not read; set task.name=sources"


def _sources(c: Config) -> Iterator[str]:
    if c.eval.every and not c.task.eval:
        yield (
            f"eval.every={c.eval.every} needs held-out prompts: list at least one set in task.eval, or set eval.every=0"
        )
    for part in ("train", "eval"):
        names: set[str] = set()
        for i, source in enumerate(getattr(c.task, part)):
            key = f"task.{part}[{i}]"
            if (source.path is None) == (source.procedural is None):
                yield (
                    f"{key} needs either path or procedural, and not both: path={source.path!r}, "
                    f"procedural={source.procedural!r}"
                )
            if source.template is not None and "{question}" not in source.template:
                yield f"{key}.template={source.template!r} has no {{question}}; put it where the question goes"
            if source.system_prompt is not None and not c.task.chat:
                yield (
                    f"{key}.system_prompt would not be sent with task.chat=false; set task.chat=true, or write it into "
                    f"{key}.template"
                )
            if source.options and source.procedural is None:
                yield f"{key}.options belong to a procedural source, and this one has path={source.path!r}; remove them"
            for column in ("prompt_key", "answer_key"):
                if getattr(source, column) is not None and source.procedural is not None:
                    yield (
                        f"{key}.{column}={getattr(source, column)!r} names a column of a file, and this source has "
                        f"procedural={source.procedural!r}; remove it"
                    )
            if part == "eval":
                yield from _asks_nothing(c, i)
            if source.name is not None and source.name in names:
                yield f"{key}.name={source.name!r} names two sources of task.{part}; give each its own"
            names.add(source.name or "")


def _asks_nothing(c: Config, i: int) -> Iterator[str]:
    section, key = c.task.eval[i], f"task.eval[{i}]"
    samples = c.eval.samples if section.samples is None else section.samples
    greedy = c.eval.greedy if section.greedy is None else section.greedy
    if samples == 0 and not greedy:
        yield (
            f"{key} is asked for nothing: samples=0 and greedy=false; set {key}.samples to at least 1, or "
            f"{key}.greedy=true, or remove the set"
        )


def _truncated(c: Config) -> Iterator[str]:
    a = c.algorithm
    if a.overlong_buffer and a.truncated != "penalise":
        yield (
            f"algorithm.overlong_buffer={a.overlong_buffer} has no effect with algorithm.truncated={a.truncated}; set "
            "algorithm.truncated=penalise, or algorithm.overlong_buffer=0"
        )
    if a.overlong_buffer >= c.sampling.max_new_tokens:
        yield (
            f"algorithm.overlong_buffer={a.overlong_buffer} leaves no length without a penalty with "
            f"sampling.max_new_tokens={c.sampling.max_new_tokens}; lower it"
        )
