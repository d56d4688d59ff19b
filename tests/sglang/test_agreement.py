"""The same checkpoint and the same tokens: what a real SGLang server and the learner's model say about them."""

import asyncio

import numpy as np
import pytest
import torch

from asyncrl.config import validate
from asyncrl.generator.collect import to_trajectory
from asyncrl.generator.open_engine import open_engine
from asyncrl.learner.batch import rows_of
from asyncrl.learner.records import update_scalars
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from asyncrl.models.load import load_model
from asyncrl.models.routes import RouteHook
from asyncrl.types import Group, Prompt, SamplingParams
from tests.conftest import world  # noqa: F401

GROUPS, SIZE, NEW = 8, 8, 48


def config_for(folder, url):
    return validate(
        {
            "model": {"path": str(folder)},
            "staleness": {"sync_every": 1},
            "sampling": {"max_new_tokens": NEW},
            "generator": {"engine": "sglang", "sglang": {"urls": [url]}},
            "weights": {"carrier": "collective"},
            "algorithm": {"group_size": SIZE, "rdc": {"mode": "observe"}},
        }
    )


def sample(config, info, tmp_path, temperature):
    """GROUPS groups with their completions from the server; prompts of different lengths."""
    rng = np.random.default_rng(0)
    made = []

    async def one(engine, g):
        ids = rng.integers(2, info.vocab_size, 4 + 3 * g).astype(np.int32)
        params = SamplingParams(temperature, NEW, (1,))
        completions = await engine.generate(ids, SIZE, params)
        trajectories = tuple(
            to_trajectory(c, f"0/p{g}#1.{i}", len(ids), float(i % 2), info, True, (1,))
            for i, c in enumerate(completions)
        )
        made.append(Group(f"0/p{g}", Prompt(f"p{g}", ids, "", "", "t"), "g0", 1, temperature, trajectories))

    async def run():
        async with open_engine(config, tmp_path, "g0", info, SamplingParams(temperature, NEW, (1,))) as engine:
            await asyncio.gather(*(one(engine, g) for g in range(GROUPS)))

    asyncio.run(run())
    return made


def learner_says(model, hook, prompt, t, temperature):
    """Log-probs [T] and routes [S - 1, L, K] of the learner's model for one response."""
    ids = torch.from_numpy(np.concatenate([prompt, t.token_ids]).astype(np.int64))[None]
    with torch.no_grad(), hook.record():
        logits = model(input_ids=ids).logits[0].float()
    logp = torch.log_softmax(logits / temperature, -1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    routes = hook.native[:, 0].permute(1, 0, 2)[:-1]
    return logp[at, ids[0, 1:][at]].numpy(), routes.numpy()


@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        ("untied_moe", 1.0),
        ("dense_first_moe", 0.7),
        pytest.param("untied_moe", 0.7, marks=pytest.mark.long),
        pytest.param("dense_first_moe", 1.0, marks=pytest.mark.long),
    ],
)
def test_log_probs_routes_and_drift_agree(request, start_server, tmp_path, world, family, temperature):  # noqa: F811
    folder = request.getfixturevalue(family)
    server, info = start_server("--disable-shared-experts-fusion", model=folder), describe(folder)
    config = config_for(folder, server.url)
    groups = sample(config, info, tmp_path, temperature)
    model = load_model(folder, "float32", config.model.attention, config.model.experts)
    hook = RouteHook(model)
    worst, rows, same = 0.0, 0, 0
    for group in groups:
        for t in group.trajectories:
            logp, routes = learner_says(model, hook, group.prompt.token_ids, t, temperature)
            worst = max(worst, float(np.abs(logp - t.logprobs).max()))
            equal = (np.sort(routes, -1) == np.sort(t.routes.astype(np.int64), -1)).all(axis=(1, 2))
            rows, same = rows + len(equal), same + int(equal.sum())
    print(f"{family} T={temperature}: {rows} rows, log-probs within {worst:.2e}, routes equal {same / rows:.5f}")
    assert rows > 500 and worst <= 1e-4
    assert same / rows >= 0.999
    policy = build_policy(config.model, config.learner, False, world)
    # The label of the start weights is older than any update.
    updater = Updater(policy, config.learner, config.algorithm, world)
    outcome = run_update(policy, updater, rows_of(groups, 0, -1, info), 0, 0.0, None, config, info, world)
    scalars = update_scalars(outcome, info)
    assert scalars["drift/mean"] <= 1e-3 and scalars["mismatch/kl_k3"] < 1e-8
