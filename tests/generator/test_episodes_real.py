"""Episodes on the real engine, in the real generator: one forward of the learner over the whole says the same."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl import wire
from asyncrl.config import validate
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.generator import episodes as episodes_module
from asyncrl.generator.collect import to_trajectory
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.loop import Generator
from asyncrl.learner.batch import rows_of
from asyncrl.learner.records import update_scalars
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from asyncrl.models.load import load_model
from asyncrl.models.routes import RouteHook
from asyncrl.replay.ledger import State
from asyncrl.tasks.base import read_stop_token_ids
from asyncrl.tasks.environments.observations import Observations
from asyncrl.tasks.environments.pool import EnvironmentPool
from asyncrl.tasks.text import Decoder, load_tokenizer
from asyncrl.types import Group, Prompt, SamplingParams, Version
from tests.engines.support import plain_forward
from tests.generator.test_timeouts import Rig
from tests.helpers.char_model import save_char_model

SCRIPTED = "tests.generator.scripted_environment:Scripted"
SCORER = "asyncrl.tasks.rewards:score"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_char_model(tmp_path_factory.mktemp("char") / "model", steps=60)


def episodes_for(folder: Any, pool: EnvironmentPool, max_turns: int = 4) -> Episodes:
    return Episodes(pool, Observations(folder, False), Decoder(folder), describe(folder), max_turns)


def prompt_of(folder: Any, text: str, observations: list[str | None]) -> Prompt:
    ids = np.array(load_tokenizer(folder).encode(text, add_special_tokens=False).ids, np.int32)
    return Prompt(f"p{text}", ids, text, "7", "chain_sum", "chain_sum", json.dumps({"observations": observations}))


def play(folder: Any, prompts: list[Prompt], n: int = 4, temperature: float = 0.8) -> list[Group]:
    """Groups of episodes of the real engine; rewards alternate."""
    info, stops = describe(folder), read_stop_token_ids(folder)
    sampling = SamplingParams(temperature, 90, stops)

    async def run() -> list[Group]:
        with EnvironmentPool(SCRIPTED, 1, 60.0, 2**32) as pool:
            made = episodes_for(folder, pool)
            played = await asyncio.gather(*(made.play(engine, p, n, sampling, 60.0) for p in prompts))
        groups = []
        for i, (prompt, found) in enumerate(zip(prompts, played, strict=True)):
            assert len(found) == n
            trajectories = tuple(
                to_trajectory(r.completion, f"{i}#1.{j}", len(prompt.token_ids), float(j % 2), info, True, stops)
                for j, r in enumerate(found)
            )
            groups.append(Group(str(i), prompt, "g0", 1, temperature, trajectories))
        return groups

    engine = TorchEngine(folder, version=Version(0, 0), seed=3, max_rows=16)
    try:
        return asyncio.run(run())
    finally:
        engine.close()


def random_prompts(folder: Any, seed: int, count: int = 3) -> list[Prompt]:
    """Expressions whose environments say something of random length three times: episodes of four turns."""
    rng = np.random.default_rng(seed)
    return [
        prompt_of(
            folder,
            f"{rng.integers(10)}+{rng.integers(10)}=",
            ["".join(rng.choice(list("0123456789+-="), rng.integers(1, 7))) for _ in range(3)] + [None],
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def groups(folder):
    return play(folder, random_prompts(folder, 0))


def test_log_probs_and_routes_of_four_turns_are_those_of_one_forward_over_the_whole(folder, groups):
    model = load_model(folder, "float32").eval()
    hook = RouteHook(model)
    observed, turns = 0, []
    for group in groups:
        for t in group.trajectories:
            ids = np.concatenate([group.prompt.token_ids, t.token_ids]).astype(np.int32)
            logits, routes = plain_forward(model, hook, ids)
            logp = (logits.double() / group.temperature).log_softmax(-1).numpy()
            first = len(group.prompt.token_ids) - 1
            want = logp[np.arange(first, len(ids) - 1), ids[first + 1 :]]
            np.testing.assert_allclose(t.logprobs[t.loss_mask], want[t.loss_mask], rtol=0, atol=1e-4)
            assert np.isnan(t.logprobs[~t.loss_mask]).all()
            np.testing.assert_array_equal(np.sort(t.routes, axis=-1), np.sort(routes[:-1], axis=-1))
            observed += int((~t.loss_mask).sum())
            turns.append(1 + int((np.diff(t.loss_mask.astype(int)) == -1).sum()))
    assert observed > 20 and turns.count(4) >= 6, "sample more: too few episodes had four turns"


def test_the_learner_sees_no_drift_and_no_mismatch_in_episodes(folder, groups, world):
    config = validate(
        {"model": {"path": str(folder)}, "staleness": {"sync_every": 1}, "algorithm": {"rdc": {"mode": "observe"}}}
    )
    info = describe(folder)
    policy = build_policy(config.model, config.learner, False, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    received = [wire.decode_group(wire.encode_group(g)) for g in groups]
    outcome = run_update(policy, updater, rows_of(received, 0, 0, info), 0, 0.0, None, config, info, world)
    scalars = update_scalars(outcome, info)
    assert scalars["drift/max"] == 0
    assert scalars["mismatch/kl_k3"] < 1e-9
    assert scalars["generator/g0/abs_log_ratio"] < 1e-5


# --- in the generator -----------------------------------------------------------------------------


def run_rig(folder: Any, tmp_path: Any, scenario: Any, environment: str = SCRIPTED, **changes: Any) -> None:
    rig = Rig(
        folder,
        tmp_path,
        scorer=SCORER,
        **{"replay": {"lease_timeout_s": 60, "max_attempts": 1}, "generator": {"reward_timeout_s": 10}} | changes,
    )
    try:

        async def run() -> None:
            with EnvironmentPool(environment, 1, rig.config.generator.reward_timeout_s, 2**32) as pool:
                rig.sampler = replace(rig.sampler, episodes=episodes_for(folder, pool, max_turns=2))
                await rig.run(scenario)

        asyncio.run(run())
    finally:
        rig.close()


def test_a_generator_sends_episodes_with_the_rewards_and_parts_of_their_environment(folder, tmp_path):
    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) == 1)
        take = rig.queue.take(0, 0)
        assert take is not None
        ((entry,),) = [[e for _, e in rig.queue.shard(0, 0, 1)]]
        group = wire.decode_group(entry.payload)
        assert len(group.trajectories) == 8
        for t in group.trajectories:
            assert t.reward in (0.0, 0.5, 1.0) and t.parts["turns"] in (1.0, 2.0)
            assert (t.parts["turns"] == 2.0) == bool((~t.loss_mask).any())
        assert {t.parts["turns"] for t in group.trajectories} >= {2.0}
        assert rig.engine.stats()["running"] == 0

    environment = "examples.environments.self_correction:SelfCorrection"
    run_rig(folder, tmp_path, scenario, environment)


def test_b20_a_group_whose_turns_do_not_fit_together_is_dropped_and_counted(folder, tmp_path, monkeypatch):
    sound = episodes_module._Conversation._observe

    async def drops_a_token(self: Any, ids: Any, done: Any) -> Any:
        following = await sound(self, ids, done)
        return None if following is None else np.delete(following, len(ids))

    monkeypatch.setattr(episodes_module._Conversation, "_observe", drops_a_token)

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.tally.counters["failed_trajectoryerror"] >= 1)
        assert generator.counters["failed"] >= 1
        assert rig.queue.tally.dropped[0][1] == "max_attempts"
        assert rig.queue.ledger.count(State.QUEUED) == 0

    run_rig(folder, tmp_path, scenario, "examples.environments.self_correction:SelfCorrection")
