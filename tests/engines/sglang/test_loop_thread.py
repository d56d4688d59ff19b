"""Coroutines in the loop of another thread: their results, errors, cancellation and the end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrl.engines.sglang.loop_thread import LoopThread
from asyncrl.errors import EngineError


async def nothing():
    pass


def test_results_and_errors_come_back_to_any_loop():
    thread = LoopThread("t")

    async def name():
        return threading.current_thread().name

    async def fails():
        raise EngineError("no")

    async def caller():
        assert await thread.run(name) == "t"
        with pytest.raises(EngineError, match="no"):
            await thread.run(fails)

    for _ in range(2):
        asyncio.run(caller())
    thread.close(nothing, 5.0)


def test_cancelling_the_caller_cancels_the_job():
    thread, began, ended = LoopThread("t"), threading.Event(), threading.Event()

    async def job():
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def caller():
        work = asyncio.ensure_future(thread.run(job))
        assert await asyncio.to_thread(began.wait, 10)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(caller())
    assert ended.wait(10)
    thread.close(nothing, 5.0)


def test_closing_ends_what_runs_and_refuses_what_comes():
    thread, began, last = LoopThread("t"), threading.Event(), []

    async def job():
        began.set()
        await asyncio.sleep(60)

    async def farewell():
        last.append(threading.current_thread().name)

    async def caller():
        work = asyncio.ensure_future(thread.run(job))
        assert await asyncio.to_thread(began.wait, 10)
        await asyncio.to_thread(thread.close, farewell, 5.0)
        with pytest.raises(EngineError, match="was closed"):
            await work
        with pytest.raises(EngineError, match="is closed"):
            await thread.run(nothing)

    asyncio.run(caller())
    assert last == ["t"]
    thread.call(lambda: last.append("late"))
    thread.close(farewell, 5.0)
    assert last == ["t"]


def test_a_last_job_that_hangs_is_left_behind():
    thread, ended = LoopThread("t"), threading.Event()

    async def hangs():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    thread.close(hangs, 0.2)
    assert ended.wait(10)
