"""The pool against verifiers that hang, crash, raise and lie. Real processes, no wall times asserted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl import wire
from asyncrl.errors import TaskError
from asyncrl.tasks.pool import RewardPool, Score

ODD = "tests.tasks.odd_verifiers:score"
GOOD = ("chain_sum", "+1=2#2", "2")
WRONG = ("chain_sum", "+1=3#3", "2")
LOOP = ("loop", "", "")


def run(work: Coroutine[Any, Any, Any], limit_s: float = 90.0) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(limit_s):
            return await work

    return asyncio.run(bounded())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_gone(pids: list[int]) -> None:
    for _ in range(600):
        if all(gone(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {[pid for pid in pids if not gone(pid)]}")


def test_rewards_come_back_in_order_from_light_processes() -> None:
    with RewardPool(1, 30.0, ODD) as pool:
        assert run(pool.score_many([GOOD, WRONG, GOOD, ("chain_sum", None, "2")])) == [
            Score(1.0, extracted="2"),
            Score(0.0, extracted="3"),
            Score(1.0, extracted="2"),
            Score(0.0),
        ]
        assert run(pool.score_many([])) == []
        assert run(pool.score(*GOOD)) == 1.0
        assert run(pool.score("heavy", "", "")) == 0.0
        assert run(pool.score("alarm", "", "")) == 1.0  # field case B62
        assert run(pool.score("chatty", "", "")) == 1.0
        assert os.getpid() not in pool.pids
        assert pool.counters["scored"] == 8
        assert pool.counters["restarts"] == 0


def test_a_million_characters_and_odd_ones_pass() -> None:
    long = "(" * 500_000 + "9" * 500_000
    with RewardPool(1, 30.0) as pool:
        texts = [long + "#2", long, "\ud800\x00\n#2", "\u221e#2"]
        outcomes = run(pool.score_many([("chain_sum", text, "2") for text in texts]))
        assert [o.reward for o in outcomes] == [1.0, 0.0, 1.0, 1.0]


def test_half_of_a_surrogate_pair_in_what_a_verifier_says_reaches_replay() -> None:
    """JSON can hold it and no message can: a model that writes it must not end its generator."""
    pair, half = '{"a": "\\ud83d\\ude00"}', '{"a": "\\ud83d"}'
    with RewardPool(1, 30.0, ODD) as pool:
        said = [("json_schema", text, '{"type": "object"}') for text in (pair, half)]
        whole, broken, failed = run(pool.score_many([*said, ("half", "", "")]))
    assert (whole.extracted, broken.extracted) == ('{"a":"\U0001f600"}', '{"a":"?"}')
    assert failed == Score(None, "error: ValueError: no character: ?")
    answer = wire.EvalAnswer("p", 0, False, 1.0, 9, "stop", broken.extracted)
    assert wire.decode(wire.encode(wire.EvalResult("0.1", (0, 1), [answer]))).answers == [answer]
    assert wire.decode(wire.encode(wire.Failed("l", "g", failed.error))).reason == failed.error


def test_endless_answers_cost_only_themselves() -> None:
    """Field case B63: 3 answers that never finish and 10 good ones on 2 workers."""

    async def storm(pool: RewardPool) -> list[Any]:
        calls = [LOOP, ("power", "9", ""), LOOP, *[GOOD] * 10]
        return await asyncio.gather(*(pool.score(*call) for call in calls), return_exceptions=True)

    with RewardPool(2, 1.0, ODD) as pool:
        first = pool.pids
        outcomes = run(storm(pool))
        assert outcomes[3:] == [1.0] * 10
        for outcome in outcomes[:3]:
            assert isinstance(outcome, TaskError)
            assert "timeout" in str(outcome)
        assert pool.counters["timeouts"] == 3
        assert pool.counters["scored"] == 10
        assert [run(pool.score(*GOOD)) for _ in range(2)] == [1.0, 1.0]
        assert len(pool.pids) == 2
        assert all(gone(pid) for pid in set(first) - set(pool.pids))


def memory_of(pids: list[int]) -> int:
    return max(psutil.Process(pid).memory_info().rss for pid in pids)


def test_odd_answers_in_one_group_cost_only_themselves() -> None:
    """Field case B63, by the verifier math and as one group: towers of powers, 400 brackets, a megabyte of digits."""
    good, tower = ("math", "\\boxed{7}", "7"), ("math", "\\boxed{9^{9^{9^{9}}}}", "7")
    odd = [("math", f"\\boxed{{{'(' * 400}1{')' * 400}}}", "7"), ("math", "9" * 2**20, "7")]
    endless = [LOOP, ("power", "9", ""), LOOP]
    limit_s = 2.0
    with RewardPool(2, limit_s, ODD) as pool:
        run(pool.score_many([("math", "\\boxed{\\sqrt{49}}", "7")] * 8))
        before = memory_of(pool.pids)
        outcomes = run(pool.score_many([*endless, *[good] * 10, *odd, tower]), 4 * limit_s + 60.0)
        assert [o.reward for o in outcomes[3:13]] == [1.0] * 10
        assert [o.timed_out for o in outcomes[:3]] == [True] * 3
        assert [o.reward for o in outcomes[13:15]] == [0.0, 0.0]
        # The library gives the tower up, or the pool does; either way it has no reward of 0.
        assert outcomes[15].reward is None
        assert pool.counters["timeouts"] >= 3
        assert [o.reward for o in run(pool.score_many([good, good]))] == [1.0, 1.0]
        wait_until(lambda: len(pool.pids) == 2)
        assert memory_of(pool.pids) < before + 2**26


def test_a_worker_that_runs_out_of_memory_is_replaced() -> None:
    with RewardPool(1, 60.0, ODD, memory_bytes=2**29) as pool:
        assert run(pool.score(*GOOD)) == 1.0
        before = memory_of(pool.pids)
        outcomes = run(pool.score_many([GOOD, ("hoard", "", ""), WRONG, ("hoard", "", ""), GOOD]))
        assert [o.reward for o in outcomes] == [1.0, None, 0.0, None, 1.0]
        assert outcomes[1].error.startswith("error: MemoryError")
        assert (pool.counters["errors"], pool.counters["crashes"], pool.counters["restarts"]) == (2, 0, 2)
        assert memory_of(pool.pids) < before + 2**26


def test_a_group_is_spread_over_free_workers_and_keeps_its_order() -> None:
    with RewardPool(2, 60.0, ODD) as pool:
        for _ in range(2):  # one after the other, until both have started
            assert run(pool.score(*GOOD)) == 1.0
        outcomes = run(pool.score_many([("pid", "0.2", "")] * 2))  # too slow for one to take both
        assert {o.parts["pid"] for o in outcomes} == set(map(float, pool.pids))
        assert [o.extracted for o in outcomes] == ["x" * 300] * 2
        assert [o.reward for o in run(pool.score_many([GOOD, WRONG] * 20))] == [1.0, 0.0] * 20


def test_a_call_that_ends_before_its_helpers_begin_keeps_all_workers() -> None:
    with RewardPool(2, 60.0, ODD) as pool:
        for _ in range(2):  # one after the other, until both have started
            assert run(pool.score(*GOOD)) == 1.0
        bad: Any = ("chain_sum", "#2", b"no text")  # raises in the first lane, at once
        with pytest.raises(TypeError):
            run(pool.score_many([bad] * 4))
        for _ in range(2):
            assert run(pool.score(*GOOD)) == 1.0
        outcomes = run(pool.score_many([("pid", "0.2", "")] * 2))  # too slow for one to take both
        assert {o.parts["pid"] for o in outcomes} == set(map(float, pool.pids))


def test_calls_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are being scored are bounded: later calls wait, and one that is larger than the bound goes alone."""
    monkeypatch.setattr("asyncrl.tasks.pool.MAX_PENDING_CHARS", 100)
    seen: list[int] = []

    async def crowd(pool: RewardPool) -> list[Any]:
        async def one(size: int) -> list[Score]:
            found = await pool.score_many([("chain_sum", "1" * size + "#2", "2")])
            seen.append(pool._pending)
            return found

        calls = [asyncio.create_task(one(size)) for size in (60, 60, 500, 10)]
        cancelled = asyncio.create_task(one(90))
        await asyncio.sleep(0)
        cancelled.cancel()
        return await asyncio.gather(*calls)

    with RewardPool(2, 60.0) as pool:
        assert [o[0].reward for o in run(crowd(pool))] == [1.0] * 4
        assert pool._pending == 0 and max(seen) <= 100


@pytest.mark.parametrize(
    ("request_", "reason", "counter"),
    [
        (("exit", "", ""), "error: SystemExit: 3", "errors"),
        (("late", "", ""), "timeout: TimeoutError: it took too long", "timeouts"),
    ],
)
def test_a_verifier_that_ends_itself_or_gives_up(request_: tuple[str, str, str], reason: str, counter: str) -> None:
    with RewardPool(1, 60.0, ODD) as pool:
        bad, good = run(pool.score_many([request_, GOOD]))
        assert bad == Score(None, reason, timed_out=counter == "timeouts") and good.reward == 1.0
        assert pool.counters[counter] == 1 and pool.counters["restarts"] == 0


def test_loading_a_library_takes_none_of_the_time_of_an_item() -> None:
    with RewardPool(1, 2.0, ODD) as pool:
        assert [o.reward for o in run(pool.score_many([("slow to load", "", ""), GOOD]))] == [1.0, 1.0]
        assert pool.counters["timeouts"] == 0


def test_a_right_answer_scores_1_in_a_process_of_the_pool() -> None:
    """Field case B62: by the library, whose time limit works in a main thread only."""
    with RewardPool(1, 60.0) as pool:
        assert run(pool.score("math", r"\boxed{2\sqrt{3}}", r"\sqrt{12}")) == 1.0


def test_one_endless_answer_in_a_batch_spares_the_others() -> None:
    with RewardPool(1, 1.0, ODD) as pool:
        outcomes = run(pool.score_many([GOOD, LOOP, WRONG, GOOD]))
        assert [o.reward for o in outcomes] == [1.0, None, 0.0, 1.0]
        assert outcomes[1] == Score(None, "timeout: no answer within 1.0 s", timed_out=True)
        assert dict(pool.counters) == {"scored": 3, "errors": 0, "timeouts": 1, "crashes": 0, "restarts": 1}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (("unknown", "x", "y"), "TaskError: no verifier for source 'unknown'"),
        (("eval", "(" * 400 + "1" + ")" * 400, ""), "too many nested parentheses"),
        (("eval", "int('9' * 1_000_000)", ""), "ValueError"),
        (("nan", "", ""), "returned nan"),
        (("two", "", ""), "returned 2.0"),
    ],
)
def test_an_error_inside_a_verifier_is_never_a_reward(request_: tuple[str, str, str], reason: str) -> None:
    with RewardPool(1, 30.0, ODD) as pool:
        worker = pool.pids
        bad, good = run(pool.score_many([request_, GOOD]))
        assert bad.reward is None
        assert bad.error.startswith("error: ")
        assert reason in bad.error
        assert good == Score(1.0, extracted="2")
        with pytest.raises(TaskError, match=f"no reward for a response of source {request_[0]!r}"):
            run(pool.score(*request_))
        assert pool.pids == worker  # the worker survives its verifier
        assert (pool.counters["errors"], pool.counters["scored"]) == (2, 1)


def test_a_crash_is_counted_and_the_worker_replaced() -> None:
    with RewardPool(1, 30.0, ODD) as pool:
        bad, good = run(pool.score_many([("crash", "", ""), GOOD]))
        assert bad == Score(None, "crash: the worker died (exit status -9)")
        assert good == Score(1.0, extracted="2")
        assert (pool.counters["crashes"], pool.counters["restarts"]) == (1, 1)


def test_a_cancelled_call_leaves_no_stale_answer() -> None:
    async def cancelled(pool: RewardPool) -> list[Score]:
        call = asyncio.create_task(pool.score_many([LOOP, WRONG]))
        await pool.score_many([GOOD])  # the second worker; the first is inside the loop by now
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return await pool.score_many([GOOD, WRONG]) + await pool.score_many([WRONG, GOOD])

    with RewardPool(2, 30.0, ODD) as pool:
        assert [o.reward for o in run(cancelled(pool))] == [1.0, 0.0, 0.0, 1.0]
        assert pool.counters["timeouts"] == 0
        assert len(pool.pids) == 2


def test_interrupts_from_the_terminal_do_not_reach_workers() -> None:
    with RewardPool(1, 30.0) as pool:
        assert run(pool.score(*GOOD)) == 1.0
        before = pool.pids
        os.kill(before[0], signal.SIGINT)
        assert run(pool.score(*GOOD)) == 1.0
        assert pool.pids == before


@pytest.mark.parametrize("wait_s", [0.0, 0.5])  # while the workers start, and later
def test_close_ends_every_process_and_every_call(wait_s: float) -> None:
    async def closing(pool: RewardPool) -> list[Any]:
        calls = [asyncio.create_task(pool.score(*LOOP)) for _ in range(3)]
        await asyncio.sleep(wait_s)
        pool.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    pool = RewardPool(2, 60.0, ODD)
    pids = pool.pids
    outcomes = run(closing(pool))
    assert [type(o) for o in outcomes] == [TaskError] * 3
    assert all("closed" in str(o) for o in outcomes)
    assert pool.pids == []
    assert all(gone(pid) for pid in pids)
    pool.close()
    with pytest.raises(TaskError, match="closed"):
        run(pool.score(*GOOD))


@pytest.mark.parametrize("scorer", ["no.such.module:score", "asyncrl.tasks.rewards:missing"])
def test_workers_that_cannot_start_say_so(scorer: str) -> None:
    with RewardPool(1, 30.0, scorer) as pool:
        for _ in range(2):
            with pytest.raises(TaskError, match="did not start"):
                run(pool.score(*GOOD))


@pytest.mark.parametrize(("workers", "timeout_s"), [(0, 1.0), (1, 0.0)])
def test_bad_sizes_are_refused(workers: int, timeout_s: float) -> None:
    with pytest.raises(TaskError, match="workers >= 1"):
        RewardPool(workers, timeout_s)


def test_busy_workers_die_with_a_killed_parent() -> None:
    script = f"""
import asyncio, os, signal
from asyncrl.tasks.pool import RewardPool

async def main():
    pool = RewardPool(2, 600.0, {ODD!r})
    await pool.score_many([{GOOD!r}])
    await pool.score_many([{GOOD!r}])
    calls = [asyncio.create_task(pool.score("power", "9", "")) for _ in range(1)]
    await asyncio.sleep(0.2)
    print(*pool.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until_gone(pids)
