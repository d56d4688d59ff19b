"""Takes of several batches in learner tests: their groups, and their updates as the loop makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import Config, validate
from asyncrl.learner.batch import Row, rows_of
from asyncrl.learner.shard import Policy, World, build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import Outcome, TakeState, run_update, score_take
from asyncrl.models.describe import describe
from asyncrl.types import Group, ModelInfo
from tests.learner.groups import make_groups


def renamed(groups: Sequence[Group], batch: int) -> list[Group]:
    """The groups under names of their own: a take holds each name once."""
    return [
        replace(
            g, group_id=f"{batch}:{g.group_id}",
            trajectories=tuple(replace(t, trajectory_id=f"{batch}:{t.trajectory_id}") for t in g.trajectories),
        )
        for g in groups
    ]  # fmt: skip


def batches_of(info: ModelInfo, count: int, groups: int = 3, size: int = 4, seed: int = 0) -> list[list[Row]]:
    """Batches of one take, rows of random lengths from 1 to 12 tokens; rewards differ within most groups."""
    made = [renamed(make_groups(info, groups, size, seed=seed + b), b) for b in range(count)]
    return [rows_of(groups, u, 0, info) for u, groups in enumerate(made)]


class Spy(Updater):
    """Keeps what each update was told of its rows, and its whole gradient before clipping."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.values: list[Any] = []
        self.scores: list[Any] = []
        self.gradients: list[dict[str, Tensor]] = []

    def backward(self, rows: Any, scores: Any, values: Any, *rest: Any) -> Any:
        """As the real one."""
        self.values.append(values)
        self.scores.append(scores)
        return super().backward(rows, scores, values, *rest)

    def apply(self, update: int, sums: Any) -> Any:
        """As the real one."""
        self.gradients.append({n: p.grad.full_tensor().clone() for n, p in self._policy.named_parameters()})
        return super().apply(update, sums)


def made(folder: str | Path, world: World, **sections: Any) -> tuple[Config, Policy, Spy]:
    """A policy with its updater, of takes of three updates with large steps unless sections say otherwise."""
    tree: dict[str, Any] = {
        "model": {"path": str(folder)},
        "staleness": {"sync_every": 1, "max_lag": 8, "updates_per_take": 3},
        "learner": {"lr": 0.02, "warmup_updates": 0},
        "algorithm": {"rdc": {"mode": "observe"}},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    config = validate(tree)
    policy = build_policy(config.model, config.learner, config.algorithm.replays, world)
    return config, policy, Spy(policy, config.learner, config.algorithm, world)


def whole(policy: Policy) -> dict[str, Tensor]:
    """All weights by name, copied."""
    return {n: p.full_tensor().detach().clone() for n, p in policy.named_parameters()}


def run_take(
    config: Config, policy: Policy, updater: Updater, batches: Sequence[list[Row]], world: World, alone: bool = False
) -> tuple[TakeState | None, list[Outcome], list[dict[str, Tensor]]]:
    """The state of the take, the outcome of each update, and the weights before each. alone: without a scoring pass."""
    info = describe(config.model.path)
    rows = [r for batch in batches for r in batch]
    state = None if alone else score_take(policy, rows, config, info, world)
    outcomes, before = [], []
    for u, batch in enumerate(batches):
        before.append(whole(policy))
        outcomes.append(run_update(policy, updater, batch, u, 0.0, state, config, info, world))
        assert outcomes[-1].step.outcome == "stepped"
    return state, outcomes, before


def same_gradients(a: Spy, b: Spy) -> bool:
    """True when all gradients of all updates are the same to the bit."""
    pairs = zip(a.gradients, b.gradients, strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in pairs)
