"""What is asked in an evaluation: which responses to which prompts, and what makes two evaluations the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.tasks.held_out import Asked, asked_by_set, set_of
from asyncrl.types import Prompt

NO_SETS = "there is nothing to evaluate; list at least one set in task.eval (docs/evaluation.md)"


class Key(NamedTuple):
    """One response: to which prompt, sample number (0 for greedy), greedy."""

    prompt_id: str
    sample: int
    greedy: bool


class Chosen(NamedTuple):
    """What the command line says over the config; None and () change nothing."""

    samples: int | None = None
    greedy: bool | None = None
    limit: int | None = None
    sets: tuple[str, ...] = ()


class Questions(NamedTuple):
    """The prompts of every set in their order, and what is asked of them."""

    prompts: Mapping[str, Sequence[Prompt]]
    asked: Mapping[str, Asked]

    def keys(self) -> list[tuple[Key, Prompt]]:
        """Every response, a prompt's after each other."""
        out: list[tuple[Key, Prompt]] = []
        for name, prompts in self.prompts.items():
            samples, greedy = self.asked[name]
            for prompt in prompts:
                out += [(Key(prompt.prompt_id, i, False), prompt) for i in range(samples)]
                out += [(Key(prompt.prompt_id, 0, True), prompt)] * greedy
        return out


def questions(config: Config, held_out: Sequence[Prompt], chosen: Chosen) -> Questions:
    """By set. ConfigError when there is no set, none of a name that is chosen, or nothing is asked of one."""
    by_set: dict[str, list[Prompt]] = {}
    for prompt in held_out:
        by_set.setdefault(set_of(prompt), []).append(prompt)
    if not by_set:
        raise ConfigError(f"no prompt is held out: {NO_SETS}")
    if unknown := [name for name in chosen.sets if name not in by_set]:
        raise ConfigError(f"--set={unknown[0]}: there is no such set in task.eval; there is {', '.join(by_set)}")
    names = [name for name in by_set if name in (chosen.sets or by_set)]
    general = Asked(config.eval.samples, config.eval.greedy)
    own = asked_by_set(config.task, config.eval)
    asked = {}
    for name in names:
        of = own.get(name, general)
        asked[name] = Asked(
            of.samples if chosen.samples is None else chosen.samples,
            of.greedy if chosen.greedy is None else chosen.greedy,
        )
        if asked[name] == Asked(0, False):
            raise ConfigError(f"nothing is asked of the set {name}: samples=0 and no greedy answer; give --samples=8")
    return Questions({name: by_set[name][: chosen.limit] for name in names}, asked)


def identity(config: Config, model: str, asked: Questions) -> dict[str, Any]:
    """What two evaluations must have in common to be one, by the name of the setting. model: fingerprint of its folder.

    Prompts are compared as they are and not by the settings they were made from.
    """
    t, s, g = config.task, config.sampling, config.generator
    out: dict[str, Any] = {
        "the model": model, "model.dtype": config.model.dtype, "model.router_dtype": config.model.router_dtype,
        "generator.engine": g.engine, "run.seed": config.run.seed, "sampling.temperature": s.temperature,
        "sampling.max_new_tokens": s.max_new_tokens, "task.reward": t.reward, "task.environment": t.environment,
        "task.max_turns": t.max_turns if t.environment else None,
    }  # fmt: skip
    out["the sets"] = sorted(asked.prompts)
    for name, prompts in sorted(asked.prompts.items()):
        digest = xxhash.xxh3_64()
        for p in prompts:
            digest.update("\0".join((p.prompt_id, p.text, p.answer, p.source, p.extra, "")).encode())
            digest.update(p.token_ids.tobytes())
        out[f"the prompts of {name}"] = f"{len(prompts)} with hash {digest.hexdigest()}"
        out[f"the samples of {name}"], out[f"greedy of {name}"] = asked.asked[name]
    return out


def without_training(config: Config) -> Config:
    """The config with no training data, so that none is read and held-out prompts are not compared with any."""
    return config.model_copy(update={"task": config.task.model_copy(update={"train": ()})})
