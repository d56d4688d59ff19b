"""Every combination of methods: those that the rules accept train a real policy, the others are refused with a message.

One take of one or two updates, on one rank; the policy begins each time with the same weights.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.algos.registry import ADVANTAGES, AGGREGATIONS, CORRECTIONS, SURROGATES
from asyncrl.config import Config, validate
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import rows_of
from asyncrl.learner.records import update_scalars
from asyncrl.learner.reference import open_reference
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update, score_take
from asyncrl.models.describe import describe
from tests.learner.groups import make_groups

REWARDS = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
KNOBS = {"mask": {"low": 0.9}, "trm": {"bound": 0.9}}
"""Bounds that some of the few tokens here break, and not all."""


def config(model_dir, updates: int = 1, **algorithm) -> Config:
    algorithm = {"native_drift_every": 0, "rdc": {"mode": "off"}} | algorithm
    return validate({
        "model": {"path": model_dir}, "staleness": {"sync_every": 1, "updates_per_take": updates},
        "learner": {"lr": 0.01, "warmup_updates": 0}, "algorithm": algorithm,
    })  # fmt: skip


class Bench:
    """Policies by whether they replay routes, a take, and the start weights."""

    def __init__(self, model_dir, world) -> None:
        plain = config(model_dir)
        self.world, self.info, self.dir = world, describe(model_dir), model_dir
        self.policies = {r: build_policy(plain.model, plain.learner, r, world) for r in (False, True)}
        self.start = {r: self.weights(r) for r in (False, True)}
        self.groups = self._sampled(make_groups(self.info, 2, 4, 5, max_tokens=8), plain)
        with_kl = config(model_dir, kl={"coef": 0.1})
        self.reference = open_reference(with_kl, world)
        # Elsewhere than the policy, as after some updates, so that there is something to pull.
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter.mul_(1.1)

    def _sampled(self, groups, plain):
        """The groups with rewards that differ, and log-probs near those of the policy, as it gave a few updates ago."""
        rng, rewards = np.random.default_rng(2), iter(REWARDS)
        old = score_take(self.policies[False], rows_of(groups, 0, 0, self.info), plain, self.info, self.world).old_logp
        out = []
        for group in groups:
            first, made = len(group.prompt.token_ids) - 1, []
            for t in group.trajectories:
                logp = old[t.trajectory_id][first : first + t.num_tokens].float().numpy()
                noise = rng.normal(0, 0.5, t.num_tokens).astype(np.float32)
                made.append(replace(t, logprobs=logp + noise, reward=next(rewards)))
            out.append(replace(group, trajectories=tuple(made)))
        return out

    def weights(self, replays: bool):
        return [p.to_local().detach().clone() for p in self.policies[replays].parameters()]

    def train(self, c: Config) -> list:
        """Outcomes of the updates of one take, from the start weights on."""
        policy = self.policies[c.algorithm.replays]
        with torch.no_grad():
            for parameter, start in zip(policy.parameters(), self.start[c.algorithm.replays], strict=True):
                parameter.to_local().copy_(start)
        updater = Updater(policy, c.learner, c.algorithm, self.world)
        count = c.staleness.updates_per_take
        batches = [self.groups] if count == 1 else [self.groups[:1], self.groups[1:]]
        rows = rows_of(self.groups, 0, 0, self.info)
        state = score_take(policy, rows, c, self.info, self.world) if count > 1 else None
        reference = self.reference if c.algorithm.kl.coef else None
        return [
            run_update(policy, updater, rows_of(groups, u, 0, self.info), u, 0.0, state, c, self.info, self.world,
                       reference=reference)
            for u, groups in enumerate(batches)
        ]  # fmt: skip

    def check(self, c: Config) -> list:
        """Train by it; every update must step with finite numbers, and the weights must move."""
        outcomes = self.train(c)
        for out in outcomes:
            assert (out.step.outcome, out.step.reason) == ("stepped", ""), c.algorithm
            assert math.isfinite(out.step.loss) and math.isfinite(out.step.grad_norm), c.algorithm
            scalars = update_scalars(out, self.info)
            assert out.forced_fraction == 1 or not c.algorithm.replays, c.algorithm
            if c.algorithm.correction.kind != "none":
                assert 0 < scalars["mismatch/weight_mean"] < 10, c.algorithm
        # Clipping may leave the last update without a gradient, never the first.
        assert outcomes[0].step.grad_norm > 0, c.algorithm
        replays = c.algorithm.replays
        moved = [not torch.equal(a, b) for a, b in zip(self.weights(replays), self.start[replays], strict=True)]
        assert all(moved), c.algorithm
        return outcomes


@pytest.fixture(scope="module")
def bench(model_dir, world):
    return Bench(model_dir, world)


def accepted(model_dir, combinations) -> list[Config]:
    """The configs that the rules accept; each of the others is refused with one sentence that has a remedy."""
    configs, refused = [], 0
    for updates, algorithm in combinations:
        try:
            configs.append(config(model_dir, updates, **algorithm))
        except ConfigError as exc:
            said, refused = str(exc), refused + 1
            assert len(said.splitlines()) == 1 and "; set " in said and said.startswith("algorithm."), said
    print(f"{len(configs)} combinations accepted, {refused} refused")
    assert configs and refused
    return configs


@pytest.mark.parametrize("routes", ["native", "r3", "r2"])
def test_surrogates_ratios_corrections_and_takes(bench, routes):
    combinations = (
        (
            updates,
            {
                "surrogate": surrogate,
                "ratio": ratio,
                "correction": {"kind": kind} | KNOBS.get(kind, {}),
                "routes": routes,
            },
        )
        for surrogate, ratio, kind, updates in itertools.product(
            SURROGATES, ("proximal", "behaviour"), CORRECTIONS, (1, 2)
        )
    )
    configs = accepted(bench.dir, combinations)
    losses = [tuple(out.step.loss for out in bench.check(c)) for c in configs]
    # In this take every method cuts or weighs something, and so no two of them may come out the same.
    for (one, a), (two, b) in itertools.combinations(zip(configs, losses, strict=True), 2):
        assert a != b, (one.algorithm, two.algorithm)


def test_r2_begins_as_native_routes_and_r3_does_not(bench):
    loss = {}
    for routes in ("native", "r2", "r3"):
        loss[routes] = [out.step.loss for out in bench.train(config(bench.dir, 2, routes=routes))]
    # The first update of a take has the routes with which it was scored, whoever chose them.
    assert loss["r2"][0] == pytest.approx(loss["native"][0], rel=1e-5)
    assert loss["r2"][1] != pytest.approx(loss["native"][1], rel=1e-4)
    assert loss["r3"][0] != pytest.approx(loss["native"][0], rel=1e-4)


def test_advantages_aggregations_and_the_reference_policy(bench):
    kl = ({}, {"coef": 0.1}, {"coef": 0.1, "where": "reward"}, {"coef": 0.1, "estimator": "k3"}, {"where": "reward"})
    combinations = (
        (1, {"advantage": advantage, "aggregation": aggregation, "kl": term})
        for advantage, aggregation, term in itertools.product(ADVANTAGES, AGGREGATIONS, kl)
    )
    for c in accepted(bench.dir, combinations):
        (out,) = bench.check(c)
        assert (out.step.kl > 0) == c.algorithm.kl_in_loss
        assert (update_scalars(out, bench.info).get("policy/ref_kl", 0) > 0) == (c.algorithm.kl.coef > 0)


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_filter_that_drops_nothing_is_no_filter(bench, surrogate, updates):
    ratio = "behaviour" if updates == 1 else "proximal"
    ways = ({"mode": "filter", "q": 0.0}, {"mode": "off"}, {"mode": "filter", "q": 0.4})
    kind = "none" if ratio == "behaviour" else "tis"
    chosen = {"surrogate": surrogate, "ratio": ratio, "correction": {"kind": kind}}
    configs = [config(bench.dir, updates, **chosen, rdc=rdc) for rdc in ways]
    results = [(bench.train(c), bench.weights(False)) for c in configs]
    (zero, after_zero), (off, after_off), (some, after_some) = results
    assert [(o.step.loss, o.step.grad_norm) for o in zero] == [(o.step.loss, o.step.grad_norm) for o in off]
    assert all(torch.equal(a, b) for a, b in zip(after_zero, after_off, strict=True))
    assert all(o.keep.all() for o in zero) and not all(o.keep.all() for o in some)
    assert not all(torch.equal(a, b) for a, b in zip(after_zero, after_some, strict=True))
