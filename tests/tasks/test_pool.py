"""The pool against verifiers that hang, crash, raise and lie. Real processes, no wall times asserted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks.pool import RewardPool, Score

ODD = "tests.tasks.odd_verifiers:score"
GOOD = ("chain_sum", "+1=2#2", "2")
WRONG = ("chain_sum", "+1=3#3", "2")
LOOP = ("loop", "", "")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(90.0):
            return await work

    return asyncio.run(bounded())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: list[int]) -> None:
    for _ in range(600):
        if all(gone(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {[pid for pid in pids if not gone(pid)]}")


def test_rewards_come_back_in_order_from_light_processes() -> None:
    with RewardPool(1, 30.0, ODD) as pool:
        assert run(pool.score_many([GOOD, WRONG, GOOD, ("chain_sum", None, "2")])) == [
            Score(1.0),
            Score(0.0),
            Score(1.0),
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
        assert good == Score(1.0)
        with pytest.raises(TaskError, match=f"no reward for a response of source {request_[0]!r}"):
            run(pool.score(*request_))
        assert pool.pids == worker  # the worker survives its verifier
        assert (pool.counters["errors"], pool.counters["scored"]) == (2, 1)


def test_a_crash_is_counted_and_the_worker_replaced() -> None:
    with RewardPool(1, 30.0, ODD) as pool:
        bad, good = run(pool.score_many([("crash", "", ""), GOOD]))
        assert bad == Score(None, "crash: the worker died (exit status -9)")
        assert good == Score(1.0)
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
