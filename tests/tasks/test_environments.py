"""Environments in real worker processes: what they answer, and what one that misbehaves costs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks.environments import Step
from asyncrl.tasks.environments.check import check
from asyncrl.tasks.environments.pool import EnvironmentFailed, EnvironmentPool
from asyncrl.tasks.environments.step import add_parts, step_of

ODD = "tests.tasks.odd_environments:Odd"
MEMORY = 2**32
LONG = 60.0


def with_pool(job: Any, environment: str = ODD, workers: int = 1, timeout_s: float = LONG, **rest: Any) -> Any:
    async def run() -> Any:
        with EnvironmentPool(environment, workers, timeout_s, MEMORY, **rest) as pool:
            async with asyncio.timeout(100):
                return await job(pool)

    return asyncio.run(run())


async def failure(episode: Any, text: str) -> EnvironmentFailed:
    with pytest.raises(EnvironmentFailed) as caught:
        await episode.step(text)
    return caught.value


def test_an_episode_keeps_its_state_and_its_process():
    async def job(pool: EnvironmentPool) -> None:
        one = pool.episode("p1", "a1", '{"k": 1}')
        two = pool.episode("p2", "a2")
        first = await one.step("who")
        other = await two.step("who")
        again = await one.step("who")
        assert first.observation is not None and again.observation is not None and other.observation is not None
        assert first.observation.startswith("p1|a1|[('k', 1)]|1|") and again.observation.startswith(
            "p1|a1|[('k', 1)]|2"
        )
        assert other.observation.startswith("p2|a2|[]|1|")
        pid = first.observation.rsplit("|", 1)[1]
        assert pid == again.observation.rsplit("|", 1)[1] != other.observation.rsplit("|", 1)[1]
        assert {int(pid), int(other.observation.rsplit("|", 1)[1])} == set(pool.pids)
        assert pool.counters["episodes"] == 2 and pool.counters["steps"] == 3

    with_pool(job, workers=2)


def test_every_form_of_a_step_is_taken_and_what_is_none_fails_its_episode_only():
    async def job(pool: EnvironmentPool) -> None:
        episode = pool.episode("p", "a")
        assert await episode.step("tuple") == Step("seen", False, 0.5)
        assert await episode.step("dict") == Step(None, False, 1.0, {"a": 2.0})
        for text, reason in {
            "raise": "error: ValueError: as told",
            "exit": "error: SystemExit: 3",
            "nan": "error: ValueError: reward is nan, expected a finite number",
            "unknown": "unknown key 'obs'; known: observation, done, reward, parts",
            "none": "returned NoneType; return a Step",
            "many": "40 named parts, at most 24",
        }.items():
            assert reason in str(await failure(episode, text))
        assert pool.counters["errors"] == 6 and pool.counters["crashes"] == 0
        # The same process goes on.
        assert (await pool.episode("p", "a").step("x")).reward == 1.0
        assert "no such prompt" in str(await failure(pool.episode("bad", "a"), "x"))
        assert "expected a JSON object" in str(await failure(pool.episode("p", "a", "[1]"), "x"))

    with_pool(job)


def test_what_an_environment_prints_is_no_reply(capfd):
    async def job(pool: EnvironmentPool) -> None:
        assert await pool.episode("p", "a").step("print") == Step("printed")

    with_pool(job)
    assert "noise" in capfd.readouterr().err


def test_a_call_that_hangs_ends_the_episodes_of_its_worker_and_no_others():
    async def job(pool: EnvironmentPool) -> None:
        good, hangs = pool.episode("p", "a"), pool.episode("p", "a")
        pool.episode("p", "a")  # on the first worker
        mate = pool.episode("p", "a")  # on that of the one that hangs
        for episode in (good, hangs, mate):
            assert (await episode.step("x")).observation == "x"
        hanging = asyncio.create_task(failure(hangs, "hang"))
        while not pool._workers[1]._waiting:
            await asyncio.sleep(0.01)
        lost, error = await failure(mate, "x"), await hanging
        assert error.timed_out and "timeout: step() gave no answer within 5 s" in str(error)
        assert not lost.timed_out and "another episode overran its deadline" in str(lost)
        assert (await good.step("who")).observation is not None
        # The next episode there gets a new process.
        for episode in (hangs, mate):
            episode.close()
        fresh = pool.episode("p", "a")
        assert (await fresh.step("x")).observation == "x"
        assert pool.counters["timeouts"] == 1 and pool.counters["restarts"] == 1 and len(pool.pids) == 2

    with_pool(job, workers=2, timeout_s=5)


def test_a_worker_that_dies_is_replaced():
    async def job(pool: EnvironmentPool) -> None:
        episode = pool.episode("p", "a")
        assert "crash: the worker died (exit status 7)" in str(await failure(episode, "die"))
        assert "crash" in str(await failure(episode, "x"))
        episode.close()
        assert (await pool.episode("p", "a").step("x")).observation == "x"
        assert pool.counters["crashes"] == 1 and pool.counters["restarts"] == 1

    with_pool(job)


def test_memory_is_bounded():
    async def job(pool: EnvironmentPool) -> None:
        assert "MemoryError" in str(await failure(pool.episode("p", "a"), "memory"))
        assert (await pool.episode("p", "a").step("x")).observation == "x"

    with_pool(job)


def test_the_time_of_a_call_begins_when_the_worker_turns_to_it():
    """Twelve calls of 0.4 s one after the other, on one worker, with a deadline of 4 s each."""

    async def job(pool: EnvironmentPool) -> None:
        episodes = [pool.episode("p", "a") for _ in range(12)]
        steps = await asyncio.gather(*(episode.step("x") for episode in episodes))
        assert [s.observation for s in steps] == ["x"] * 12 and pool.counters["timeouts"] == 0

    with_pool(job, environment="tests.tasks.test_environments:Slow", timeout_s=4)


class Slow:
    def __init__(self, prompt: str, answer: str, extra: dict[str, Any]) -> None:
        pass

    def step(self, text: str) -> Step:
        time.sleep(0.4)
        return Step(text)


def test_asynchronous_steps_of_one_worker_run_together():
    async def job(pool: EnvironmentPool) -> None:
        steps = await asyncio.gather(*(pool.episode("p", "a").step("x") for _ in range(3)))
        assert [s.observation for s in steps] == ["together"] * 3

    with_pool(job, environment="tests.tasks.odd_environments:Waiting")


def test_a_cancelled_step_leaves_the_worker_to_the_others():
    async def job(pool: EnvironmentPool) -> None:
        episode = pool.episode("p", "a")
        await episode.step("x")
        task = asyncio.create_task(episode.step("x"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        episode.close()
        assert (await pool.episode("p", "a").step("who")).observation is not None
        assert pool.counters["restarts"] == 0

    with_pool(job)


def test_closing_an_episode_closes_its_environment(tmp_path):
    async def job(pool: EnvironmentPool) -> None:
        episode = pool.episode(str(tmp_path / "file"), "a")
        await episode.step("x")
        episode.close()
        while not (tmp_path / "file").exists():
            await asyncio.sleep(0.01)
        episode.close()

    with_pool(job, environment="tests.tasks.odd_environments:Closing")


def test_a_closed_pool_leaves_no_process_and_ends_what_waits():
    async def job() -> None:
        pool = EnvironmentPool(ODD, 1, LONG, MEMORY)
        episode = pool.episode("p", "a")
        await episode.step("x")
        (pid,) = pool.pids
        waits = asyncio.create_task(failure(episode, "hang"))
        while pool.counters["steps"] < 1 or not pool._workers[0]._waiting:
            await asyncio.sleep(0.01)
        pool.close()
        assert "the pool of environments was closed" in str(await waits)
        assert pool.pids == [] and not Path(f"/proc/{pid}").exists()
        with pytest.raises(TaskError, match="closed"):
            pool.episode("p", "a")

    asyncio.run(job())


def test_a_worker_that_cannot_import_says_why():
    async def job(pool: EnvironmentPool) -> None:
        with pytest.raises(TaskError, match="no class 'Gone'"):
            await pool.episode("p", "a").step("x")

    with_pool(job, environment="tests.tasks.odd_environments:Gone")


def test_pools_refuse_settings_that_cannot_work():
    with pytest.raises(TaskError, match="workers >= 1"):
        EnvironmentPool(ODD, 0, 1.0, MEMORY)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ("tests.tasks.odd_environments:Gone", "has no class 'Gone'"),
        ("tests.tasks.odd_environments:function", "has no class 'function'"),
        ("tests.tasks.odd_environments:NoStep", r"class 'NoStep' has no method step\(text\)"),
        (
            "tests.tasks.odd_environments:NoConstructor",
            r"class 'NoConstructor' takes \(\), and is called with prompt, answer, extra, by name or else by position; "
            r"declare __init__\(self, prompt, answer, extra\)",
        ),
        ("tests.tasks.odd_environments:TakesMore", r"class 'TakesMore' takes \(prompt: .*, budget: "),
        (
            "tests.tasks.import_needs_memory:Odd",
            r"MemoryError: .*needs more than generator\.reward_memory_bytes; raise",
        ),
        ("tests.tasks.no_such_module:Odd", "importing 'tests.tasks.no_such_module' failed with ModuleNotFoundError"),
        ("tests.tasks.import_fails:Odd", "failed with ImportError: a library is missing"),
        ("tests.tasks.import_dies:Odd", r"the process that imported it died \(exit status 9\)"),
    ],
)
def test_the_check_names_key_value_and_reason(environment, reason):
    with pytest.raises(TaskError, match=rf"^task\.environment={environment}: .*{reason}"):
        check(environment, MEMORY)


def test_the_check_passes_what_works_and_has_a_deadline():
    check(ODD, MEMORY)
    with pytest.raises(TaskError, match=r"importing it took more than 0\.001 s"):
        check(ODD, MEMORY, timeout_s=0.001)


@pytest.mark.parametrize(
    ("name", "said"), [("OtherOrder", "p|a|{'k': 1}|3"), ("OtherNames", "p|a|{'k': 1}")], ids=["by name", "by position"]
)
def test_an_environment_takes_the_prompt_by_name_or_by_position(name, said):
    async def job(pool: EnvironmentPool) -> None:
        assert (await pool.episode("p", "a", '{"k": 1}').step("x")).observation == said

    check(f"tests.tasks.odd_environments:{name}", MEMORY)
    with_pool(job, f"tests.tasks.odd_environments:{name}")


def test_parts_of_an_episode_are_summed():
    assert add_parts({"a": 1.0}, {"a": 2.0, "b": 0.5}) == {"a": 3.0, "b": 0.5}
    with pytest.raises(ValueError, match="25 named parts"):
        add_parts({f"p{i}": 1.0 for i in range(24)}, {"one more": 1.0})
    with pytest.raises(ValueError, match="observation is int"):
        step_of((3, False))
    with pytest.raises(ValueError, match="a part is named 'a/b'; use up to 64 letters"):
        step_of({"parts": {"a/b": 1}})
