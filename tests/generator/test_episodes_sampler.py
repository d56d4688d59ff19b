"""Leases that are answered with episodes: groups with some of them, evaluations of one version."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl import wire
from asyncrl.config import validate
from asyncrl.errors import TaskError
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.sample import MixedVersions, OutOfTime, Sampler
from asyncrl.tasks.environments.observations import Observations
from asyncrl.tasks.environments.pool import EnvironmentPool
from asyncrl.tasks.pool import RewardPool
from asyncrl.tasks.text import Decoder
from asyncrl.types import Completion
from tests.generator.test_episodes import prompt_of
from tests.generator.tracer_engine import INFO, STOP, TracerEngine
from tests.tasks.conftest import SYMBOLS, write_tokenizer


@pytest.fixture(scope="module")
def char_dir(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), SYMBOLS)


class Late(TracerEngine):
    """Stops the second turn of the first conversation, as an engine does at the limit."""

    async def generate(self, *args: Any, **rest: Any) -> list[Completion]:
        found = await super().generate(*args, **rest)
        turn = args[5]
        late = turn.conversation == "episode-0" and turn.rows > 0
        return [] if late else found


def lease(prompt: Any, deadline_s: float = 60.0, evaluation: str = "") -> wire.LeaseMsg:
    return wire.LeaseMsg("g#1", "g", 1, wire.prompt_to_msg(prompt), deadline_s, evaluation)


def with_sampler(char_dir: Any, engine: Any, job: Any, **sections: Any) -> Any:
    config = validate({"model": {"path": "m"}, "algorithm": {"group_size": 4, "groups_per_update": 1}} | sections)

    async def run() -> Any:
        with (
            RewardPool(1, 10.0) as rewards,
            EnvironmentPool("tests.generator.scripted_environment:Scripted", 1, 60.0, 2**32) as pool,
        ):
            decoder = Decoder(char_dir)
            episodes = Episodes(pool, Observations(char_dir, False), decoder, INFO, 4)
            sampler = Sampler(engine, rewards, decoder, INFO, config, "g0", (STOP,), episodes)
            async with asyncio.timeout(100):
                return await job(sampler)

    return asyncio.run(run())


def test_a_group_of_episodes_has_their_rewards_parts_and_masks(char_dir):
    group = with_sampler(char_dir, TracerEngine([3, 3]), lambda s: s.group(lease(prompt_of(["12", None]))))
    assert [t.reward for t in group.trajectories] == [3.0] * 4  # 1 + 2
    for t in group.trajectories:
        assert t.parts == {"steps": 2.0, "characters": 4.0, "turns": 2.0}
        assert t.loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 3
        assert np.isnan(t.logprobs[3:5]).all()
    assert wire.decode_group(wire.encode_group(group)).trajectories[0].parts["turns"] == 2.0


def test_partial_sends_the_episodes_that_ended_in_time(char_dir):
    prompt = prompt_of(["12", None])
    group = with_sampler(char_dir, Late([3, 3]), lambda s: s.group(lease(prompt)), replay={"on_timeout": "partial"})
    assert len(group.trajectories) == 3
    with pytest.raises(OutOfTime, match="3 of 4 responses were sampled within"):
        with_sampler(char_dir, Late([3, 3]), lambda s: s.group(lease(prompt)))


def test_episodes_whose_environment_fails_are_counted_and_never_a_reward_of_0(char_dir):
    async def job(sampler: Sampler) -> None:
        with pytest.raises(TaskError, match="4 of 4 responses to p not scored: error: RuntimeError: told to"):
            await sampler.group(lease(prompt_of(["1", None], **{"raise": 2})))
        assert sampler.counters["verifier_errors"] == 4
        assert sampler.episodes is not None and sampler.episodes.pool.counters["errors"] == 4

    with_sampler(char_dir, TracerEngine([3, 3]), job)


def test_an_evaluation_episode_is_of_one_version(char_dir):
    prompt = prompt_of(["1", None])
    job = lambda s: s.evaluation(lease(prompt, 60.0, "0.3"))  # noqa: E731
    result = with_sampler(char_dir, TracerEngine([3, 3], [[3], [3]]), job)
    assert result.version == (0, 3) and result.answers[0].reward == 3.0 and result.answers[0].length == 7
    with pytest.raises(MixedVersions, match=r"of versions 0\.3, 0\.4"):
        with_sampler(char_dir, TracerEngine([3, 3], [[3], [4]]), job)
