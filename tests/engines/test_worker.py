import asyncio
import threading
import time
import weakref
from functools import partial

import pytest

from asyncrl.engines.worker import Worker, in_thread
from asyncrl.errors import EngineError


class Counter:
    """Makes `todo` steps, in whatever thread runs it."""

    def __init__(self, todo: int = 0) -> None:
        self.todo = todo
        self.threads: set[str] = set()

    def busy(self) -> bool:
        return self.todo > 0

    def step(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.todo -= 1


def make(counter: Counter) -> Worker:
    return Worker("counter", lambda: None, counter.busy, counter.step)


async def ask(worker: Worker, value: int) -> int:
    reply = worker.reply()
    worker.send(lambda: worker.settle(reply, value))
    answer: int = await asyncio.wait_for(reply.future, 10)
    return answer


def test_jobs_and_steps_run_in_one_thread_in_order():
    counter, seen = Counter(), list[int]()
    worker = make(counter)
    for i in range(3):
        worker.send(partial(seen.append, i))
    worker.send(lambda: setattr(counter, "todo", 2))
    assert asyncio.run(ask(worker, 5)) == 5
    worker.close()
    assert seen == [0, 1, 2] and counter.todo <= 1 and counter.threads <= {"counter"}


def test_several_event_loops_share_one_worker():
    worker = make(Counter())
    answers = []
    threads = [threading.Thread(target=lambda i=i: answers.append(asyncio.run(ask(worker, i)))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    worker.close()
    assert sorted(answers) == [0, 1, 2, 3]


def test_close_fails_who_waits_and_who_comes_later():
    async def wait(worker):
        reply = worker.reply()
        threading.Timer(0.05, worker.close).start()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(reply.future, 10)

    worker = make(Counter())
    asyncio.run(wait(worker))
    with pytest.raises(EngineError, match="closed"):
        worker.send(lambda: None)
    worker.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_fails_who_waits_and_who_comes_later():
    def broken() -> None:
        raise ZeroDivisionError("no such step")

    async def wait(worker):
        first, second = worker.reply(), worker.reply()
        worker.send(broken)
        for reply in (first, second):
            with pytest.raises(EngineError, match="ZeroDivisionError: no such step"):
                await asyncio.wait_for(reply.future, 10)

    worker = make(Counter())
    asyncio.run(wait(worker))
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        worker.send(lambda: None)
    worker.close()


def test_an_answer_to_a_loop_that_is_gone_is_dropped():
    async def leave(worker):
        return worker.reply()

    worker = make(Counter())
    reply = asyncio.run(leave(worker))
    worker.settle(reply, 1)
    assert asyncio.run(ask(worker, 2)) == 2
    worker.close()


def test_an_idle_worker_wakes_at_once():
    worker = make(Counter())
    time.sleep(0.05)
    assert asyncio.run(ask(worker, 1)) == 1
    worker.close()


def test_a_done_job_holds_no_memory():
    """A load holds a whole version of the weights, whose memory the publisher wants back."""

    class Weights:
        pass

    async def scenario() -> None:
        worker = make(Counter())
        reply, weights = worker.reply(), Weights()
        gone = weakref.ref(weights)
        worker.send(partial(lambda held, answer: worker.settle(answer, id(held)), weights, reply))
        del weights
        await reply.future
        for _ in range(500):  # the thread may not have left the job yet
            if gone() is None:
                break
            await asyncio.sleep(0.01)
        assert gone() is None
        worker.close()

    asyncio.run(scenario())


def test_a_loop_ends_without_a_thread_that_hangs():
    hangs, stopped = threading.Event(), threading.Event()

    async def main() -> None:
        assert await in_thread(lambda: 3) == 3
        with pytest.raises(KeyError):
            await in_thread(lambda: {}["x"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await in_thread(hangs.wait)

    def run() -> None:
        asyncio.run(main())
        stopped.set()

    threading.Thread(target=run, daemon=True).start()
    assert stopped.wait(60) and not hangs.is_set()
    hangs.set()
