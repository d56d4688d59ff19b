"""A real engine and a real learner on the same weights: what each says about the same response."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.algos.drift import expert_counts
from asyncrl.config import validate
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.generator.collect import to_trajectory
from asyncrl.learner.batch import rows_of
from asyncrl.learner.records import update_scalars
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from asyncrl.types import Group, Prompt, SamplingParams, Version
from tests.helpers.tiny_models import qwen3_moe

SWAPPED = (1, 5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and the same function with two experts (weights and router rows) in swapped places."""
    root = tmp_path_factory.mktemp("models")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=48, seed=5).save_pretrained(root / "plain")
    tensors = load_file(root / "plain" / "model.safetensors")
    swapped = dict(tensors)
    a, b = SWAPPED
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            order = list(range(len(tensor)))
            order[a], order[b] = b, a
            swapped[name] = tensor[order].contiguous()
        for here, there in ((a, b), (b, a)):
            if f".experts.{here}." in name:
                swapped[name] = tensors[name.replace(f".experts.{here}.", f".experts.{there}.")]
    (root / "swapped").mkdir()
    for file in Path(root / "plain").iterdir():
        if file.suffix == ".json":
            (root / "swapped" / file.name).write_bytes(file.read_bytes())
    save_file(swapped, root / "swapped" / "model.safetensors", metadata={"format": "pt"})
    return root


def sample(folder, generator_id, seed, groups=3, size=4, full=False, temperature=0.8):
    """Groups sampled by a real engine on the model in folder; rewards alternate."""
    info = describe(folder)
    engine = TorchEngine(str(folder), version=Version(0, 0), seed=seed)
    rng = np.random.default_rng(seed)
    made = []

    async def run():
        params = SamplingParams(temperature, 12, (0,))
        for g in range(groups):
            ids = rng.integers(1, 48, 5).astype(np.int32)
            completions = await engine.generate(ids, size, params)
            trajectories = tuple(
                to_trajectory(c, f"{generator_id}/p{g}#1.{i}", 5, float(i % 2), info, full)
                for i, c in enumerate(completions)
            )
            prompt = Prompt(f"{generator_id}p{g}", ids, "", "", "t")
            made.append(Group(f"{generator_id}/p{g}", prompt, generator_id, 1, temperature, trajectories))

    try:
        asyncio.run(run())
    finally:
        engine.close()
    return made


def learn(folders, groups, world, **algorithm):
    config = validate(
        {"model": {"path": str(folders / "plain")}, "staleness": {"sync_every": 1}, "algorithm": algorithm}
    )
    info = describe(folders / "plain")
    replay = config.algorithm.routes == "r3"
    policy = build_policy(config.model, config.learner, replay, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    outcome = run_update(policy, updater, rows_of(groups, 0, 0, info), 0, 0.0, None, config, info, world)
    return outcome, update_scalars(outcome, info)


def test_at_lag_zero_both_sides_agree_on_log_probs_and_routes(folders, world):
    _, scalars = learn(folders, sample(folders / "plain", "g0", 1), world, rdc={"mode": "observe"})
    assert scalars["drift/max"] == 0
    assert scalars["mismatch/kl_k3"] < 1e-9
    assert scalars["mismatch/f_1.2"] == 0
    assert scalars["generator/g0/abs_log_ratio"] < 1e-5


def test_a_generator_with_two_expert_ids_swapped_shows_the_drift_worked_out_by_hand(folders, world):
    """Same function, so log-probs agree; the swapped pair's counts trade places in every layer."""
    good = sample(folders / "plain", "g0", 2)
    bad = sample(folders / "swapped", "g1", 3)
    outcome, scalars = learn(folders, good + bad, world, rdc={"mode": "observe"})
    a, b = SWAPPED
    by_hand = []
    for group in bad:
        for t in group.trajectories:
            counts = t.route_counts.astype(int).sum(axis=0)  # [L, E] as the bad generator counted
            moved = 2 * np.abs(counts[:, a] - counts[:, b]).sum()
            by_hand.append(moved / (2 * 2 * t.num_tokens * 2))  # / (2 L T K)
    got = [d for d, (_, _, g) in zip(outcome.table["drift"], outcome.table.names, strict=True) if g == "g1"]
    assert got == pytest.approx(by_hand, abs=1e-12)
    assert max(by_hand) > 0
    assert scalars["generator/g0/drift"] == 0
    assert scalars["generator/g1/drift"] == pytest.approx(np.mean(by_hand))
    # Token probabilities do not see it: that is what drift is for.
    assert scalars["generator/g1/abs_log_ratio"] < 1e-4


def test_rdc_drops_from_the_bad_generator(folders, world):
    groups = sample(folders / "plain", "g0", 2) + sample(folders / "swapped", "g1", 3)
    outcome, _ = learn(folders, groups, world, rdc={"q": 0.2, "buckets": 1})
    dropped = [g for (_, _, g), keep in zip(outcome.table.names, outcome.keep, strict=True) if not keep]
    assert dropped == ["g1"] * 4  # floor(0.2 * 24)


def test_replaying_the_rollout_routes_at_lag_zero_changes_nothing(folders, world):
    groups = sample(folders / "plain", "g0", 4, full=True)
    native, _ = learn(folders, groups, world, rdc={"mode": "observe"})
    replayed, scalars = learn(folders, groups, world, routes="r3", rdc={"mode": "observe"})
    assert scalars["r3/forced_fraction"] == 1.0
    assert scalars["drift/max"] == 0
    assert replayed.step.loss == pytest.approx(native.step.loss, rel=1e-5)
    assert replayed.step.grad_norm == pytest.approx(native.step.grad_norm, rel=1e-4)


def test_replaying_other_routes_changes_the_log_probs(folders, world):
    groups = sample(folders / "plain", "g0", 4, full=True)
    shifted = [
        replace(g, trajectories=tuple(replace(t, routes=(t.routes + 1) % 8) for t in g.trajectories)) for g in groups
    ]
    _, same = learn(folders, groups, world, routes="r3", rdc={"mode": "observe"})
    _, other = learn(folders, shifted, world, routes="r3", rdc={"mode": "observe"})
    assert same["mismatch/kl_k3"] < 1e-9
    # The experts of a random model say little; it is still far above rounding.
    assert other["mismatch/kl_k3"] > 1e-6


def test_counts_of_the_engine_are_those_of_its_full_routes(folders):
    for group in sample(folders / "plain", "g0", 6, groups=1, full=True):
        for t in group.trajectories:
            mask = torch.zeros(1, len(t.routes), dtype=torch.bool)
            mask[0, 4:] = True
            want = expert_counts(torch.from_numpy(t.routes.astype(np.int64))[None], mask, 8)[0]
            assert (t.route_counts.sum(axis=0) == want.numpy()).all()
