"""Turns of conversations with the embedded engine: what it keeps, and what it refuses."""

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.base import Turn
from asyncrl.engines.gate import Gate
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.errors import EngineError
from asyncrl.models.names import stream
from asyncrl.types import SamplingParams, Version
from tests.engines.support import LOUD
from tests.engines.talk import assert_same, sampling
from tests.helpers import tiny_models
from tests.helpers.sources import Given


@pytest.fixture
def engine(tmp_path):
    folder = tiny_models.save(tiny_models.qwen3_moe(**LOUD), tmp_path / "model")
    engine = TorchEngine(folder, version=Version(0, 0), max_rows=4, max_length=400)
    yield engine
    engine.close()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_the_engine_keeps_turns_until_a_load_or_forget(engine):
    prompt, other = np.arange(20, dtype=np.int32), tiny_models.qwen3_moe(**LOUD, seed=1)

    async def talk():
        (first,) = await engine.generate(prompt, 1, sampling(5), turn=Turn("c"))
        longer = np.concatenate((prompt, first.token_ids, [7, 8, 9])).astype(np.int32)
        (second,) = await engine.generate(longer, 1, sampling(5), turn=Turn("c", 24))
        assert first.routes.shape[0] == 24 and second.routes.shape[0] == 28 + 5 - 1 - 24
        assert engine.stats()["reused_tokens"] == 24 and engine.stats()["conversations"] == 1
        assert engine.stats()["prompt_tokens"] == 20 + 4
        (plain,) = await engine.generate(longer, 1, sampling(5))
        assert_same(second, plain, 24)
        await engine.load(Version(0, 1), Given(lambda: dict(stream(other))))
        assert engine.stats()["conversations"] == 0
        longest = np.concatenate((longer, second.token_ids, [3])).astype(np.int32)
        (third,) = await engine.generate(longest, 1, sampling(5), turn=Turn("c", 32))
        (plain,) = await engine.generate(longest, 1, sampling(5))
        assert_same(third, plain, 32)
        assert third.segments[0].version == Version(0, 1)
        assert engine.stats()["reused_tokens"] == 24 and engine.stats()["conversations"] == 1
        engine.forget("c")
        await engine.generate(prompt, 1, sampling(1))
        assert engine.stats()["conversations"] == 0

    run(talk())
    engine.close()
    engine.forget("c")  # of an engine that ended


def test_a_turn_that_new_weights_stopped_is_sampled_again_from_its_first_token(engine):
    prompt, other = np.arange(20, dtype=np.int32), tiny_models.qwen3_moe(**LOUD, seed=1)

    async def talk():
        gate = Gate(engine, "abort")
        (first,) = await gate.generate(prompt, 1, sampling(5), turn=Turn("c"))
        longer = np.concatenate((prompt, first.token_ids, [7])).astype(np.int32)
        tokens = engine.stats()["tokens"]
        work = asyncio.create_task(gate.generate(longer, 1, sampling(300), turn=Turn("c", 24)))
        while engine.stats()["tokens"] < tokens + 2:
            await asyncio.sleep(0.001)
        await gate.load(Version(0, 1), Given(lambda: dict(stream(other))))
        (second,) = await work
        (plain,) = await gate.generate(longer, 1, sampling(300))
        assert_same(second, plain, 24)
        # The one that was stopped went on from the first turn, its successor from nothing.
        assert gate.stats()["resampled"] == 1 and engine.stats()["reused_tokens"] == 24
        assert engine.stats()["conversations"] == 1
        gate.forget("c")
        await gate.generate(prompt, 1, sampling(1))
        assert engine.stats()["conversations"] == 0

    run(talk())


def test_a_cancelled_turn_is_freed(engine):
    async def talk():
        task = asyncio.create_task(
            engine.generate(np.arange(9, dtype=np.int32), 1, SamplingParams(1.0, 380, ()), turn=Turn("c"))
        )
        while not engine.stats()["running"]:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.stats()["running"]:
            await asyncio.sleep(0.002)
        assert engine.stats()["conversations"] == 0

    run(talk())


@pytest.mark.parametrize(
    ("n", "rows", "message"),
    [(2, 0, "n=2 samples of a turn of conversation 'c'"), (1, 3, "rows=3 of a prompt of 3 tokens"), (1, -1, "rows=-1")],
)
def test_a_request_that_cannot_be_a_turn_is_refused(engine, n, rows, message):
    with pytest.raises(EngineError, match=message):
        run(engine.generate(np.array([5, 6, 7], np.int32), n, sampling(4), turn=Turn("c", rows)))
