"""weights.on_load abort and drain: what runs, waits and is sampled again when weights come; the versions it has."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.gate import Gate
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.errors import EngineError, VersionGone, WeightSyncError
from asyncrl.models.names import stream
from asyncrl.types import Completion, ModelInfo, SamplingParams, Segment, Version
from tests.engines.support import LOUD
from tests.helpers import tiny_models
from tests.helpers.sources import Given

PROMPT = np.array([5, 6, 7], dtype=np.int32)
V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
SAMPLING = SamplingParams(1.0, 8, ())
NOTHING = Given(dict)


def run(coroutine: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(limited())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def settled() -> None:
    """Whatever can run without a new event has run."""
    for _ in range(20):
        await asyncio.sleep(0)


def sample(version: Version) -> Completion:
    return Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), (Segment(version, 0, 1),), "length", None)


class Scripted:
    """An engine whose requests end when the test says so: `calls` are what came and has not ended."""

    def __init__(self) -> None:
        self.version, self.closed, self.torn = V0, False, False
        self.calls: list[dict[str, Any]] = []
        self.loads: list[Version] = []
        self.fault: Exception | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.running_at_load: list[int] = []

    def describe(self) -> ModelInfo:
        return ModelInfo((0,), 8, 2, 64)

    def stats(self) -> dict[str, float]:
        return {"tokens": 3.0, "torn": float(self.torn)}

    def close(self) -> None:
        self.closed = True

    async def generate(self, prompt_ids, n, sampling, limit_s=None, cut=None, turn=None):
        """Ends with n samples when `done` is set, with `ready` of them when it is cut or the limit is over."""
        call = {"n": n, "sampling": sampling, "limit_s": limit_s, "cut": cut, "ready": 0, "done": asyncio.Event()}
        self.calls.append(call)
        waits = [asyncio.create_task(event.wait()) for event in (call["done"], cut)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            return [sample(self.version)] * (n if call["done"].is_set() else call["ready"])
        finally:
            for wait in waits:
                wait.cancel()
            self.calls.remove(call)

    async def load(self, version, source):
        self.running_at_load.append(len(self.calls))
        await self.may_load.wait()
        if self.fault is not None:
            raise self.fault
        self.version = version
        self.loads.append(version)


def versions(completions: list[Completion]) -> list[Version]:
    assert all(len(c.segments) == 1 for c in completions)
    return [c.segments[0].version for c in completions]


def test_an_open_gate_is_the_engine():
    async def scenario():
        engine = Scripted()
        gate = Gate(engine, "drain")
        assert gate.version == V0 and gate.describe() == engine.describe() and gate.is_open
        request = asyncio.create_task(gate.generate(PROMPT, 3, SAMPLING, 5.0))
        await until(lambda: engine.calls)
        assert engine.calls[0]["n"] == 3 and engine.calls[0]["sampling"] is SAMPLING
        assert 4.0 < engine.calls[0]["limit_s"] <= 5.0
        engine.calls[0]["done"].set()
        assert len(await request) == 3
        assert gate.stats() == {"tokens": 3.0, "torn": 0.0, "waits": 0.0, "resampled": 0.0}
        gate.close()
        assert engine.closed

    run(scenario())


def test_drain_waits_for_what_runs_and_keeps_the_rest_out():
    async def scenario():
        engine = Scripted()
        gate = Gate(engine, "drain")
        old = [asyncio.create_task(gate.generate(PROMPT, 2, SAMPLING)) for _ in range(2)]
        await until(lambda: len(engine.calls) == 2)
        load = asyncio.create_task(gate.load(V1, NOTHING))
        await until(lambda: not gate.is_open)
        new = asyncio.create_task(gate.generate(PROMPT, 1, SAMPLING))
        await settled()
        assert len(engine.calls) == 2 and not engine.calls[0]["cut"].is_set() and not engine.loads
        engine.calls[0]["done"].set()
        await settled()
        assert not load.done() and len(engine.calls) == 1
        engine.calls[0]["done"].set()
        await load
        assert gate.version == V1 and gate.is_open and engine.running_at_load == [0]
        await until(lambda: engine.calls)
        engine.calls[0]["done"].set()
        assert [versions(await task) for task in (*old, new)] == [[V0, V0], [V0, V0], [V1]]
        assert gate.stats()["waits"] == 1 and gate.stats()["resampled"] == 0

    run(scenario())


def test_abort_keeps_what_is_finished_and_samples_the_rest_again():
    async def scenario():
        engine = Scripted()
        gate = Gate(engine, "abort")
        sampling = SamplingParams(1.0, 8, (), seed=10)
        request = asyncio.create_task(gate.generate(PROMPT, 4, sampling, 50.0))
        await until(lambda: engine.calls)
        engine.calls[0]["ready"] = 1
        first_limit = engine.calls[0]["limit_s"]
        await gate.load(V1, NOTHING)
        assert engine.running_at_load == [0] and gate.is_open
        await until(lambda: engine.calls)
        again = engine.calls[0]
        assert again["n"] == 3 and again["limit_s"] < first_limit
        # The first sample may be of any number from 10 to 13.
        assert again["sampling"] == SamplingParams(1.0, 8, (), seed=14)
        again["ready"] = 1
        await gate.load(V2, NOTHING)
        await until(lambda: engine.calls)
        assert engine.calls[0]["n"] == 2 and engine.calls[0]["sampling"].seed == 18
        engine.calls[0]["done"].set()
        assert versions(await request) == [V0, V1, V2, V2]
        assert gate.stats()["resampled"] == 3 + 2

    run(scenario())


def test_abort_has_nothing_to_sample_again_when_all_is_finished_by_then():
    async def scenario():
        engine = Scripted()
        gate = Gate(engine, "abort")
        request = asyncio.create_task(gate.generate(PROMPT, 2, SAMPLING))
        await until(lambda: engine.calls)
        engine.calls[0]["ready"] = 2
        await gate.load(V1, NOTHING)
        assert versions(await request) == [V0, V0] and gate.stats()["resampled"] == 0

    run(scenario())


@pytest.mark.parametrize("mode", ["abort", "drain"])
def test_a_load_that_fails_opens_the_gate_under_the_old_label(mode):
    async def scenario():
        engine = Scripted()
        engine.fault = WeightSyncError("tensor a is not finite")
        gate = Gate(engine, mode)
        request = asyncio.create_task(gate.generate(PROMPT, 2, SAMPLING))
        await until(lambda: engine.calls)
        if mode == "drain":
            engine.calls[0]["done"].set()
        with pytest.raises(WeightSyncError, match="tensor a is not finite"):
            await gate.load(V1, NOTHING)
        assert gate.is_open and gate.version == V0
        if mode == "abort":
            await until(lambda: engine.calls)
            engine.calls[0]["done"].set()
        assert versions(await request) == [V0, V0]

    run(scenario())


@pytest.mark.parametrize("mode", ["abort", "drain"])
def test_a_version_that_is_gone_touches_nothing_that_runs(mode):
    def gone():
        raise VersionGone("nobody has it")

    async def scenario():
        engine = Scripted()
        gate = Gate(engine, mode)
        request = asyncio.create_task(gate.generate(PROMPT, 2, SAMPLING))
        await until(lambda: engine.calls)
        for _ in range(3):
            with pytest.raises(VersionGone):
                await gate.load(V1, Given(gone))
            assert gate.is_open and not engine.calls[0]["cut"].is_set()
        engine.calls[0]["done"].set()
        assert versions(await request) == [V0, V0] and engine.running_at_load == []

    run(scenario())


def test_the_time_of_a_request_runs_at_the_gate():
    async def scenario():
        engine = Scripted()
        engine.may_load.clear()
        gate = Gate(engine, "drain")
        load = asyncio.create_task(gate.load(V1, NOTHING))
        await until(lambda: not gate.is_open)
        assert await gate.generate(PROMPT, 2, SAMPLING, 0.01) == []
        cut = asyncio.Event()
        cut_one = asyncio.create_task(gate.generate(PROMPT, 2, SAMPLING, None, cut))
        lost = asyncio.create_task(gate.generate(PROMPT, 2, SAMPLING))
        await settled()
        cut.set()
        assert await cut_one == []
        lost.cancel()
        await asyncio.wait([lost])
        assert lost.cancelled() and not engine.calls
        engine.may_load.set()
        await load
        assert gate.is_open and gate.stats()["waits"] == 3

    run(scenario())


@pytest.mark.parametrize("mode", ["abort", "drain"])
def test_a_caller_cuts_a_running_request_as_without_a_gate(mode):
    async def scenario():
        engine = Scripted()
        gate = Gate(engine, mode)
        cut = asyncio.Event()
        request = asyncio.create_task(gate.generate(PROMPT, 3, SAMPLING, None, cut))
        await until(lambda: engine.calls)
        engine.calls[0]["ready"] = 1
        cut.set()
        assert len(await request) == 1 and not engine.calls
        # Also when new weights came at the same moment: nobody wants the rest.
        cut = asyncio.Event()
        request = asyncio.create_task(gate.generate(PROMPT, 3, SAMPLING, None, cut))
        await until(lambda: engine.calls)
        cut.set()
        await gate.load(V1, NOTHING)
        assert len(await request) == 0 and not engine.calls and gate.stats()["resampled"] == 0

    run(scenario())


def test_a_limit_that_ends_in_an_aborted_request_ends_it():
    async def scenario():
        engine = Scripted()
        engine.may_load.clear()
        gate = Gate(engine, "abort")
        request = asyncio.create_task(gate.generate(PROMPT, 3, SAMPLING, 0.2))
        await until(lambda: engine.calls)
        engine.calls[0]["ready"] = 1
        load = asyncio.create_task(gate.load(V1, NOTHING))
        assert len(await request) == 1
        engine.may_load.set()
        await load
        assert not engine.calls

    run(scenario())


def test_cancelled_requests_and_loads_leave_the_gate_usable():
    async def scenario():
        engine = Scripted()
        gate = Gate(engine, "drain")
        request = asyncio.create_task(gate.generate(PROMPT, 1, SAMPLING))
        await until(lambda: engine.calls)
        load = asyncio.create_task(gate.load(V1, NOTHING))
        await until(lambda: not gate.is_open)
        load.cancel()
        await asyncio.wait([load])
        assert load.cancelled() and gate.is_open
        load = asyncio.create_task(gate.load(V1, NOTHING))
        await until(lambda: not gate.is_open)
        request.cancel()
        await load
        assert gate.is_open and gate.version == V1 and not engine.calls

    run(scenario())


def test_an_engine_error_counts_as_an_end():
    class Broken(Scripted):
        async def generate(self, *arguments):
            raise EngineError("the engine hangs")

    async def scenario():
        gate = Gate(Broken(), "drain")
        with pytest.raises(EngineError, match="hangs"):
            await gate.generate(PROMPT, 1, SAMPLING)
        await gate.load(V1, NOTHING)
        assert gate.version == V1

    run(scenario())


def test_loads_take_turns_and_no_request_is_lost_between_them():
    async def scenario():
        engine = Scripted()
        for mode in ("drain", "abort"):
            gate = Gate(engine, mode)
            loads = [asyncio.create_task(gate.load(Version(0, i), NOTHING)) for i in range(1, 6)]
            requests = [asyncio.create_task(gate.generate(PROMPT, 2, SAMPLING)) for _ in range(8)]
            while not all(task.done() for task in (*loads, *requests)):
                for call in engine.calls[::2]:
                    call["done"].set()
                await asyncio.sleep(0)
            assert [len(versions(request.result())) for request in requests] == [2] * 8
            assert gate.is_open and not engine.calls
        assert engine.loads == [Version(0, i) for i in range(1, 6)] * 2
        assert engine.running_at_load == [0] * 10

    run(scenario())


def test_the_limit_of_a_load_is_without_the_wait_for_what_runs():
    async def scenario():
        engine = Scripted()
        gate = Gate(engine, "drain")
        request = asyncio.create_task(gate.generate(PROMPT, 1, SAMPLING))
        await until(lambda: engine.calls)
        load = asyncio.create_task(gate.load(V1, NOTHING, 5.0))
        await until(lambda: not gate.is_open)
        # Not patience of the test: the wait is longer than a limit which the load keeps.
        short = asyncio.create_task(gate.load(V2, NOTHING, 0.1))
        await asyncio.sleep(0.3)
        assert not load.done() and not short.done()
        engine.calls[0]["done"].set()
        await load
        await short
        assert gate.version == V2
        engine.may_load.clear()
        with pytest.raises(TimeoutError):
            await gate.load(Version(0, 3), NOTHING, 0.1)
        assert gate.is_open and gate.version == V2
        await request

    run(scenario())


def test_an_engine_that_samples_nothing_before_a_load_is_not_waited_for():
    async def scenario():
        engine = Scripted()
        gate = Gate(engine, "drain")
        engine.torn = True
        request = asyncio.create_task(gate.generate(PROMPT, 1, SAMPLING))
        await until(lambda: engine.calls)
        await gate.load(V1, NOTHING)
        assert engine.running_at_load == [1]
        engine.calls[0]["done"].set()
        assert versions(await request) == [V1]

    run(scenario())


class Kept(Given):
    """A source with a folder, which counts who has it."""

    kind = "folder"

    def __init__(self) -> None:
        super().__init__(dict)
        self.held, self.taken = 0, 0
        self.may_give = threading.Event()
        self.may_give.set()

    def folder(self) -> "Kept":
        return self

    def __enter__(self) -> Path:
        assert self.may_give.wait(30)
        self.held, self.taken = self.held + 1, self.taken + 1
        return Path("/v0.1")

    def __exit__(self, *exc: object) -> None:
        self.held -= 1


def test_a_folder_is_held_from_before_the_wait_until_the_load_is_over():
    class Loads(Scripted):
        async def load(self, version, source):
            assert source.kind == "folder" and kept.held == 1
            with source.folder() as path:
                assert path == Path("/v0.1") and kept.held == 1
            await super().load(version, source)

    kept = Kept()

    async def scenario():
        engine = Loads()
        gate = Gate(engine, "drain")
        request = asyncio.create_task(gate.generate(PROMPT, 1, SAMPLING))
        await until(lambda: engine.calls)
        load = asyncio.create_task(gate.load(V1, kept))
        await until(lambda: not gate.is_open)
        assert kept.held == 1
        engine.calls[0]["done"].set()
        await load
        await request
        assert (kept.held, kept.taken) == (0, 1)

    run(scenario())


def test_a_folder_that_comes_when_nobody_waits_any_more_is_let_go():
    kept = Kept()
    kept.may_give.clear()

    async def scenario():
        gate = Gate(Scripted(), "drain")
        with pytest.raises(TimeoutError):
            await gate.load(V1, kept, 0.05)
        assert gate.is_open
        kept.may_give.set()
        await until(lambda: kept.taken == 1 and kept.held == 0)

    run(scenario())


def test_a_source_of_broadcasts_is_asked_whether_it_has_the_version():
    class Gone(Given):
        kind = "broadcast"

        def checksums(self, names, ranks):
            assert list(names) == []
            raise VersionGone("the learner is started again")

    async def scenario():
        engine = Scripted()
        gate = Gate(engine, "abort")
        with pytest.raises(VersionGone):
            await gate.load(V1, Gone(dict))
        assert engine.running_at_load == []

    run(scenario())


# --- the real engine --------------------------------------------------------------------------------

LONG = SamplingParams(1.0, 300, ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.qwen3_moe(**LOUD), tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> Iterator[TorchEngine]:
    engine = TorchEngine(folder, version=V0, max_rows=8, max_length=400)
    yield engine
    engine.close()


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_real_responses_have_one_version_each(engine, mode):
    weights = dict(stream(tiny_models.qwen3_moe(**LOUD, seed=1)))

    async def scenario():
        gate = engine if mode == "keep" else Gate(engine, mode)
        requests = [asyncio.create_task(gate.generate(PROMPT, 2, LONG)) for _ in range(3)]
        before = engine.stats()["steps"]
        await until(lambda: engine.stats()["steps"] > before + 5)
        await gate.load(V1, Given(lambda: weights))
        late = await gate.generate(PROMPT, 2, LONG)
        return await asyncio.gather(*requests), late, gate.stats()

    groups, late, stats = run(scenario())
    done = [c for group in groups for c in group]
    assert [len(c.token_ids) for c in done] == [300] * 6
    found = [[s.version for s in c.segments] for c in done]
    wanted = {"keep": [V0, V1], "abort": [V1], "drain": [V0]}[mode]
    assert found == [wanted] * 6
    assert versions(late) == [V1, V1]
    assert stats.get("resampled", 0.0) == (6 if mode == "abort" else 0)


def test_the_real_engine_keeps_finished_samples_of_an_aborted_group(engine):
    """Stop tokens end most responses early; whatever is finished then stays, under the weights that it has."""
    weights = dict(stream(tiny_models.qwen3_moe(**LOUD, seed=1)))
    sampling = SamplingParams(1.0, 300, tuple(range(0, 64, 20)))

    async def group(gate: Gate, update: int) -> list[Completion]:
        request = asyncio.create_task(gate.generate(PROMPT, 8, sampling))
        before = engine.stats()["steps"]
        await until(lambda: engine.stats()["steps"] > before + 8 or request.done())
        await gate.load(Version(0, update), Given(lambda: weights))
        return await request

    async def scenario():
        gate = Gate(engine, "abort")
        # A slow host may come after the last one has ended.
        for update in range(1, 50):
            found = versions(await group(gate, update))
            assert len(found) == 8 and found == sorted(found)
            assert set(found) <= {Version(0, update - 1), Version(0, update)}
            if len(set(found)) == 2:
                assert gate.stats()["resampled"] > 0
                return True
        return False

    assert run(scenario())
