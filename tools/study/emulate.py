"""One process that plays learner and generators: weights of every update, and responses sampled by any of them.

The asynchrony is emulated, so it is exact: a response has the lag that it is asked to have. Everything else is
asyncrl's own: the embedded engine, rewards, collation, scoring, objective and optimizer. Knows no filter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.config import Config, load_config
from asyncrl.engines.base import Broadcast
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.generator.collect import to_trajectory
from asyncrl.learner.batch import Row, rows_of
from asyncrl.learner.shard import Policy, World
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from asyncrl.models.load import load_model
from asyncrl.models.names import Loader, stream
from asyncrl.tasks import build
from asyncrl.tasks.rewards import score
from asyncrl.tasks.text import Decoder
from asyncrl.types import Completion, Group, Prompt, SamplingParams, Version
from study.faults import Kind, make_engine
from study.plan import BASE, Size

WORLD = World(0, 1, torch.device("cpu"))
ROWS = 512
"""Responses that an engine runs at a time."""

Weights = Mapping[str, Tensor]


class Sampling(NamedTuple):
    """How one group is sampled: by what kind of generator, with the weights of which update, labelled as which."""

    kind: Kind
    weights: int
    label: int


class Held:
    """Weights in memory as an engine's source."""

    kind: Literal["tensors", "folder", "broadcast"] = "tensors"

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def tensors(self) -> Weights:
        """As they are."""
        return self._weights

    def folder(self) -> AbstractContextManager[Path]:
        raise NotImplementedError

    def broadcast(self, engine: str, ranks: int) -> Broadcast:
        raise NotImplementedError

    def leave(self, engine: str) -> None:
        """Nothing to leave."""

    def checksums(self, names: Sequence[str], ranks: int) -> dict[str, frozenset[str]]:
        """None are known."""
        return {}


def study_config(model: str, size: Size, overrides: Sequence[str] = ()) -> Config:
    """The quickstart's config with the sizes of the study's training runs, TIS, and nothing dropped."""
    words = [f"model.path={model}", f"learner.lr={size.lr:g}", "algorithm.rdc.mode=observe", *overrides]
    return load_config(BASE, words)


class Lab:
    """Policy, prompts and engines of one study. Engines are made when first asked for; close() ends them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.info = describe(config.model.path)
        self.policy = Policy(load_model(config.model.path, "float32"), config.learner.logprob_chunk, replay=False)
        self.loader = Loader(self.policy.model)
        task = build(config.task, config.model.path)
        self.prompts, self.stops = task.train, task.stop_token_ids
        self._decoder = Decoder(config.model.path)
        self._engines: dict[Kind, TorchEngine] = {}
        self._loads = 0

    def close(self) -> None:
        """End the engines' threads."""
        for engine in self._engines.values():
            engine.close()

    def weights(self) -> dict[str, Tensor]:
        """A copy of the policy's weights, by Hugging Face name."""
        return dict(stream(self.policy.model))

    def rows(self, groups: Sequence[Group], update: int) -> list[Row]:
        """Rows of the groups at an update; no token is too old."""
        return rows_of(groups, update, -1, self.info)

    def sample(
        self, prompts: Sequence[Prompt], how: Sequence[Sampling], history: Mapping[int, Weights], n: int, seed: int
    ) -> list[Group]:
        """One scored group of n per prompt, sampled as `how` says; the same seed gives the same groups."""
        groups: dict[int, Group] = {}
        for one in dict.fromkeys(how):
            places = [i for i, other in enumerate(how) if other == one]
            done = self._generate(
                one, [prompts[i] for i in places], history[one.weights], n, [seed + i for i in places]
            )
            for i, completions in zip(places, done, strict=True):
                groups[i] = self._group(i, prompts[i], completions)
        return [groups[i] for i in range(len(prompts))]

    def _generate(
        self, one: Sampling, prompts: Sequence[Prompt], weights: Weights, n: int, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        engine = self._engines.get(one.kind)
        if engine is None:
            engine = self._engines[one.kind] = make_engine(self.config.model.path, one.kind, 0, ROWS)
        # Engines refuse to go back, so every load is a new epoch; lag counts updates.
        self._loads += 1
        s = self.config.sampling

        async def all_of_them() -> list[list[Completion]]:
            await engine.load(Version(self._loads, one.label), Held(weights))
            params = [SamplingParams(s.temperature, s.max_new_tokens, self.stops, seed=1000 * seed) for seed in seeds]
            asked = [engine.generate(p.token_ids, n, q) for p, q in zip(prompts, params, strict=True)]
            return list(await asyncio.gather(*asked))

        return asyncio.run(all_of_them())

    def _group(self, i: int, prompt: Prompt, completions: Sequence[Completion]) -> Group:
        trajectories, keeps = [], self.config.algorithm.routes == "r3"
        for j, done in enumerate(completions):
            reward = score(prompt.source, self._decoder.decode(done.token_ids), prompt.answer)
            name = f"{prompt.prompt_id}#{i}.{j}"
            trajectories.append(to_trajectory(done, name, len(prompt.token_ids), reward, self.info, keeps, self.stops))
        return Group(
            f"{prompt.prompt_id}#{i}", prompt, "g0", 0, self.config.sampling.temperature, tuple(trajectories)
        )  # fmt: skip


def trajectory(lab: Lab, updates: int, lag: int, seed: int) -> tuple[dict[int, dict[str, Tensor]], list[float]]:
    """Weights of updates 0 to `updates` of a run whose responses all have `lag` (at first less); its rewards."""
    a = lab.config.algorithm
    updater = Updater(lab.policy, lab.config.learner, a, WORLD)
    history, rewards, carry = {0: lab.weights()}, [], 0.0
    order = np.random.default_rng(seed).permutation(len(lab.prompts))
    for u in range(updates):
        places = order[(u * a.groups_per_update + np.arange(a.groups_per_update)) % len(order)]
        w = max(0, u - lag)
        groups = lab.sample(
            [lab.prompts[i] for i in places], [Sampling(Kind(), w, w)] * len(places), history, a.group_size,
            seed * 10**6 + u * 1000,
        )  # fmt: skip
        rows = lab.rows(groups, u)
        outcome = run_update(lab.policy, updater, rows, u, carry, None, lab.config, lab.info, WORLD)
        carry = outcome.selection.carry
        history[u + 1] = lab.weights()
        rewards.append(float(np.mean(outcome.table["reward"])))
    return history, rewards


def save(history: Mapping[int, Weights], file: Path) -> None:
    """Write the weights of all updates."""
    flat = {f"{u}/{name}": tensor for u, weights in history.items() for name, tensor in weights.items()}
    partial = file.with_suffix(".partial")
    save_file(flat, partial)
    partial.rename(file)


def restore(file: Path) -> dict[int, dict[str, Tensor]]:
    """What `save` wrote."""
    history: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load_file(file).items():
        u, _, name = key.partition("/")
        history.setdefault(int(u), {})[name] = tensor
    return history
