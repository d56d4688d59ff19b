"""How a generator leaves in order: it says why, and waits a little for replay to confirm what it finished."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable

from asyncrl import wire
from asyncrl.errors import TransportError
from asyncrl.generator.failures import visible
from asyncrl.generator.link import Link
from asyncrl.generator.outbox import Outbox

log = logging.getLogger(__name__)

LEAVE_S = 3.0
"""Longest wait for replay to confirm finished groups."""
QUIET_S = 1.0
"""The same since it last confirmed one; a replay that lives answers in milliseconds."""
AGAIN_S = 0.5
"""What is not confirmed by then is sent once more: it may have been cut off in the middle of being sent."""
SAY_S = 1.0
POLL_S = 0.02


async def cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_signal(job: Awaitable[int]) -> int:
    """The status of the job, or 128 + n after SIGTERM or SIGINT, which cancels it once; its end may take its time."""
    loop, task, signals = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
    assert task is not None

    def stop(number: int) -> None:
        signals.append(number)
        if len(signals) == 1:  # a second one must not cut the end short
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        return await job
    except asyncio.CancelledError:
        if not signals:
            raise
        return 128 + signals[0]


async def say(link: Link, exc: BaseException) -> None:
    """Tell replay why this generator fails, so that the run's first cause can name it. Gives up after SAY_S."""
    with contextlib.suppress(TimeoutError, TransportError):
        async with asyncio.timeout(SAY_S):
            await link.send(wire.encode(wire.Failed("", "", visible(f"{type(exc).__name__}: {exc}")[:500])))


async def settle(link: Link, outbox: Outbox, receiving: asyncio.Task[None]) -> None:
    """Wait until replay has confirmed every group, at most LEAVE_S; logs how many it did not.

    receiving: the task that reads replay's answers into the outbox.
    """
    started = heard = time.monotonic()
    resent, left = False, len(outbox.unconfirmed)
    while left and link.welcomed and not receiving.done():
        now = time.monotonic()
        if now - started >= LEAVE_S or now - heard >= QUIET_S:
            break
        if not resent and now - started >= AGAIN_S:
            resent = True
            with contextlib.suppress(TimeoutError, TransportError):
                async with asyncio.timeout(QUIET_S):
                    for frames in outbox.unconfirmed:
                        await link.send(frames)
        await asyncio.sleep(POLL_S)
        if len(outbox.unconfirmed) < left:
            left, heard = len(outbox.unconfirmed), time.monotonic()
    if left:
        log.warning("%d groups were not confirmed by replay; it leases them again", left)
