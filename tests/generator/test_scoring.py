"""What becomes of scores: failed verifiers cost their response alone, parts travel, users' rewards are asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl import wire
from asyncrl.errors import TaskError
from asyncrl.generator.loop import Generator
from asyncrl.replay.ledger import State
from tests.generator.test_timeouts import Rig
from tests.helpers.char_model import save_char_model

QUICK: dict[str, Any] = {
    "sampling": {"max_new_tokens": 4},
    "generator": {"groups_in_flight": 1, "reward_timeout_s": 60},
    "replay": {"lease_timeout_s": 60, "max_attempts": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_char_model(tmp_path_factory.mktemp("char") / "model", steps=0)


@pytest.fixture
def make_rig(folder, tmp_path):
    rigs: list[Rig] = []

    def make(**changes: Any) -> Rig:
        rigs.append(Rig(folder, tmp_path, **(QUICK | changes)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def first_group(rig: Rig):
    (entry, *_) = rig.queue.ledger.of_state(State.QUEUED)
    return wire.decode_group(entry.payload)


@pytest.mark.parametrize("on_timeout", ["partial", "reissue"])
def test_a_failed_verifier_leaves_its_response_out_and_is_counted(make_rig, on_timeout):
    # B62: an error inside a verifier is no reward of 0.
    rig = make_rig(
        scorer="tests.generator.failing_verifier:sometimes",
        replay={"lease_timeout_s": 60, "max_attempts": 1, "on_timeout": on_timeout},
    )

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) >= 1)
        group = first_group(rig)
        # The fourth and the eighth call failed; the others keep their order, rewards and parts.
        assert [t.reward for t in group.trajectories] == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
        assert [t.parts["seen"] for t in group.trajectories] == [1.0, 2.0, 3.0, 5.0, 6.0, 7.0]
        assert generator.counters["reward_errors"] == generator.counters["timeouts"] == 0
        gauges = rig.server.peers.generators["g0"].gauges
        await rig.until(lambda: rig.server.peers.generators["g0"].gauges.get("verifier_errors", 0) >= 2)
        assert gauges.get("verifier_timeouts", 0) == 0

    asyncio.run(rig.run(scenario))


def test_a_group_of_which_one_response_is_left_goes_back(make_rig):
    rig = make_rig(scorer="tests.generator.failing_verifier:mostly")

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.tally.counters["failed_taskerror"] >= 1)
        assert rig.queue.ledger.count(State.QUEUED) == 0 and rig.queue.tally.dropped[0][1] == "max_attempts"
        assert generator.counters["reward_errors"] >= 1 and rig.sampler.counters["verifier_errors"] >= 7

    asyncio.run(rig.run(scenario))


def evaluation_lease(rig: Rig) -> wire.LeaseMsg:
    prompt = wire.prompt_to_msg(rig.queue.ledger.prompts[0])
    return wire.LeaseMsg("eval/0.0/p/0#1", "eval/0.0/p/0", 1, prompt, 60.0, "0.0")


def test_a_reward_of_the_users_scores_groups_and_evaluations(make_rig):
    rig = make_rig(scorer="asyncrl.tasks.rewards:judge", task={"reward": "tests.generator.failing_verifier:group"})

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) >= 1)
        group = first_group(rig)
        assert [t.reward for t in group.trajectories] == [10.0 + i for i in range(8)]
        assert [dict(t.parts) for t in group.trajectories] == [{"known": 1.0, "of": 8.0}] * 8

    asyncio.run(rig.run(scenario))
    (answer,) = asyncio.run(rig.sampler.evaluation(evaluation_lease(rig))).answers
    assert (answer.reward, answer.extracted, answer.parts) == (10.0, "no 0", {"known": 1.0, "of": 1.0})


def test_an_evaluation_whose_verifier_fails_has_no_answer(make_rig):
    rig = make_rig(scorer="tests.generator.failing_verifier:mostly")
    with pytest.raises(TaskError, match=r"1 of 1 responses to .* not scored: error: KeyError: 'no idea'"):
        asyncio.run(rig.sampler.evaluation(evaluation_lease(rig)))
