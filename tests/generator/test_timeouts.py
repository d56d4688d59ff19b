"""A group that is unfinished near the end of its lease, a queue that is full: real generator, engine and replay."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl import wire
from asyncrl.config import Config, validate
from asyncrl.engines.batch import Batch
from asyncrl.engines.rows import _LIMIT, _STOP_SET
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.errors import EngineError
from asyncrl.generator.loop import Generator
from asyncrl.generator.sample import OutOfTime, Sampler
from asyncrl.models.describe import describe
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.ledger import State
from asyncrl.replay.limits import limits_of
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.service import ReplayServer
from asyncrl.tasks import build
from asyncrl.tasks.base import read_stop_token_ids
from asyncrl.tasks.pool import RewardPool
from asyncrl.tasks.text import Decoder
from asyncrl.transport.rendezvous import publish_address
from asyncrl.transport.sockets import Server
from asyncrl.types import Version
from tests.helpers.char_model import save_char_model

V0 = Version(0, 0)
GIVE_UP_S = 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_char_model(tmp_path_factory.mktemp("char") / "model", steps=0)


class Endless(Batch):
    """A batch in which the first response of a request does not end in time, as often as `times` says."""

    times = 0

    def _add_rows(self, request: Any, samples: int, routes: Any) -> None:
        super()._add_rows(request, samples, routes)
        # The others end after 5 tokens; that one has no stop token, and its steps take long.
        first = self._rows.count - samples
        self._rows._ints[_LIMIT, first : self._rows.count] = 5
        if self.times > 0:
            self.times -= 1
            self._rows._ints[_LIMIT, first] = request.sampling.max_new_tokens
            self._rows._ints[_STOP_SET, first] = self._rows.stop_set((), self._info.vocab_size)

    def step(self) -> None:
        if len(self.running) == 1:
            time.sleep(0.2)
        super().step()


class Rig:
    """Replay and one generator in one event loop; the test is the learner."""

    def __init__(self, folder: Any, tmp_path: Any, *, endless: int = 0, scorer: str = "", **changes: Any) -> None:
        sections: dict[str, Any] = {
            "model": {"path": str(folder)},
            "task": {"train_size": 64, "max_terms": 3, "eval_size": 8},
            "algorithm": {"group_size": 8, "groups_per_update": 1},
            "sampling": {"max_new_tokens": 40},
            "generator": {"groups_in_flight": 1, "reward_timeout_s": 1},
            "staleness": {"sync_every": 1, "max_lag": 0},
            "replay": {"lease_timeout_s": 4},
            "eval": {"every": 0},
        }
        for name, values in changes.items():
            sections[name] = sections[name] | values
        self.config: Config = validate(sections)
        task = build(self.config.task, str(folder))
        info = describe(folder)
        self.queue = ReplayQueue(task.train, limits_of(self.config), info)
        self.server = ReplayServer(
            self.queue, Evaluations(task.eval, self.queue.tally, every=0), Server("tcp://127.0.0.1:*")
        )
        self.queue.publish(V0)
        publish_address(tmp_path / "address", self.server.socket.address)
        c = self.config
        rows = c.generator.groups_in_flight * c.algorithm.group_size
        self.engine = TorchEngine(folder, version=V0, max_rows=rows)
        if endless or not scorer:
            self.engine._batch.__class__ = Endless
            self.engine._batch.times = endless
        self.pool = RewardPool(
            1, c.generator.reward_timeout_s, scorer or "asyncrl.tasks.rewards:score", reward=c.task.reward
        )
        sampler = Sampler(self.engine, self.pool, Decoder(folder), info, c, "g0", read_stop_token_ids(folder))
        self.sampler, self.address = sampler, tmp_path / "address"

    async def run(self, scenario: Callable[[Rig, Generator], Any]) -> None:
        generator = Generator(self.config, self.address, self.sampler, "g0")
        generator.held = V0
        self.running = running = asyncio.create_task(generator.run())
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await scenario(self, generator)
                generator.stopped.set()
                while not running.done():
                    await self.step()
                await running
        finally:
            generator.stopped.set()
            await asyncio.gather(running, return_exceptions=True)
            await generator.link.close()

    async def step(self) -> None:
        await asyncio.to_thread(self.server.step, 0.02)

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            assert not self.running.done()
            await self.step()

    def close(self) -> None:
        self.pool.close()
        self.engine.close()
        self.server.socket.close()


@pytest.fixture
def make_rig(folder, tmp_path):
    rigs: list[Rig] = []

    def make(**changes: Any) -> Rig:
        rigs.append(Rig(folder, tmp_path, **changes))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_partial_sends_what_is_finished_and_the_step_completes(make_rig):
    # B38: a group of 8 of which one response never ends, a deadline of 4 s.
    rig = make_rig(endless=1, replay={"lease_timeout_s": 4, "on_timeout": "partial"})

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) == 1)
        take = rig.queue.take(0, 0)
        ((entry,),) = [[e for _, e in rig.queue.shard(0, 0, 1)]]
        assert len(entry.digest.responses) == 7 and entry.attempt == 1
        assert generator.counters["timeouts"] == 1 and generator.counters["failed"] == 0
        assert rig.queue.tally.counters["partial"] == 1
        # The endless row is gone: its place is free for the next lease.
        await rig.until(lambda: rig.engine.stats()["running"] == 0)
        done = rig.queue.commit(0, 1, "trained", take.batches[0])
        assert len(done) == 1 and rig.queue.tally.trained.count == 7

    asyncio.run(rig.run(scenario))


def test_reissue_gives_the_prompt_out_again_and_the_step_completes(make_rig):
    rig = make_rig(endless=1)

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) == 1)
        take = rig.queue.take(0, 0)
        ((entry,),) = [[e for _, e in rig.queue.shard(0, 0, 1)]]
        assert len(entry.digest.responses) == 8 and entry.attempt == 2
        counters = rig.queue.tally.counters
        # The generator gave up in time: its lease did not expire.
        assert counters["failed_timeout"] == 1 and counters["lease_expired"] == 0 and counters["late_failure"] == 0
        assert generator.counters["timeouts"] == 1
        assert len(rig.queue.commit(0, 1, "trained", take.batches[0])) == 1

    asyncio.run(rig.run(scenario))


def test_a_prompt_that_never_gets_done_is_given_up_by_id(make_rig, caplog):
    rig = make_rig(endless=2, replay={"lease_timeout_s": 2, "max_attempts": 2})

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) == 1)
        ((group_id, reason),) = rig.queue.tally.dropped
        assert reason == "max_attempts" and rig.queue.ledger.is_resolved(group_id)
        assert f"group {group_id} dropped (max_attempts) after 2 attempts" in caplog.text
        assert rig.queue.tally.counters["max_attempts"] == 1 and rig.queue.take(0, 0) is not None

    asyncio.run(rig.run(scenario))


@pytest.mark.parametrize("on_timeout", ["partial", "reissue"])
def test_a_verifier_that_hangs_costs_its_response_only(make_rig, on_timeout):
    # B63
    rig = make_rig(
        scorer="tests.generator.slow_verifier:score",
        sampling={"max_new_tokens": 4},
        generator={"groups_in_flight": 1, "reward_timeout_s": 3},
        replay={"lease_timeout_s": 60, "on_timeout": on_timeout, "max_attempts": 1},
    )

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) == 1)
        (entry,) = rig.queue.ledger.of_state(State.QUEUED)
        # The fourth of every worker's life; a slow machine may cost more.
        assert 2 <= len(entry.digest.responses) <= 6
        assert rig.sampler.counters["verifier_timeouts"] >= 2 and generator.counters["timeouts"] == 0

    asyncio.run(rig.run(scenario))


def test_a_generator_whose_engine_hangs_ends_with_that_reason(make_rig):
    rig = make_rig()
    rig.engine._answer_s = 0.5
    go_on = threading.Event()

    async def scenario(rig: Rig, generator: Generator) -> None:
        rig.engine._worker.send(lambda: go_on.wait(GIVE_UP_S))
        # Replay hears why; the generator does not wait for that, so it may have ended before.
        while not rig.running.done() or rig.queue.tally.counters["generator_engineerror"] == 0:
            await rig.step()

    try:
        with pytest.raises(EngineError, match="the engine hangs"):
            asyncio.run(rig.run(scenario))
        assert rig.queue.tally.counters["generator_engineerror"] == 1
    finally:
        go_on.set()


def test_an_evaluation_response_that_never_ends_is_given_back_in_time(make_rig):
    rig = make_rig(endless=1)
    prompt = wire.prompt_to_msg(rig.queue.ledger.prompts[0])
    lease = wire.LeaseMsg("eval/0.0/p/0#1", "eval/0.0/p/0", 1, prompt, 1.0, "0.0")
    with pytest.raises(OutOfTime, match=r"an evaluation response was not sampled within 0\.8 s"):
        asyncio.run(rig.sampler.evaluation(lease))
    assert asyncio.run(rig.sampler.evaluation(lease)).answers[0].length == 5


def test_a_full_queue_stalls_sampling_and_nothing_else(make_rig):
    # B39, B40: no learner. The queue fills up to its cap; heartbeats go on, nothing is dropped, and the generator
    # stops when it is told to.
    rig = make_rig(
        scorer="asyncrl.tasks.rewards:score",
        algorithm={"group_size": 8, "groups_per_update": 2},
        generator={"groups_in_flight": 4, "reward_timeout_s": 10},
        staleness={"sync_every": 1, "max_lag": 30},
        replay={"lease_timeout_s": 60, "capacity_bytes": 2**16},
    )

    async def scenario(rig: Rig, generator: Generator) -> None:
        queue = rig.queue
        await rig.until(lambda: queue.tally.idle["capacity"] > 5 and queue.ledger.count(State.LEASED) == 0)
        full = queue.ledger.count(State.QUEUED) + queue.ledger.count(State.KEPT)
        times = []
        deadline = time.monotonic() + GIVE_UP_S / 2
        while len(set(times)) < 5:
            await rig.step()
            times.append(rig.server.peers.generators["g0"].gauges.get("time"))
            assert time.monotonic() < deadline
        assert queue.ledger.count(State.QUEUED) + queue.ledger.count(State.KEPT) == full and full >= 2
        assert queue.tally.peak_bytes <= 2**16 and not queue.tally.dropped
        # Each learner step lets sampling go on.
        take = queue.take(0, 0)
        queue.commit(0, 1, "trained", take.batches[0])
        groups = generator.counters["groups"]
        await rig.until(lambda: generator.counters["groups"] > groups)

    asyncio.run(rig.run(scenario))
