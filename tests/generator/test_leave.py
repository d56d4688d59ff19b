"""A generator that leaves with groups of which replay has not said that it has them (B48), over real sockets."""

import asyncio

import pytest

from asyncrl import wire
from asyncrl.generator import leave
from asyncrl.generator.link import Link
from asyncrl.generator.outbox import Outbox
from tests.generator.test_link import hello
from tests.helpers.scripted_replay import Replay


def confirms(message):
    """What replay answers: it welcomes, and then confirms every message."""
    if isinstance(message, wire.Hello):
        return [wire.Welcome(0, 0, None)]
    return [wire.Ack([message.group_id], [])]


def deaf(message):
    """It welcomes, and then says nothing."""
    return confirms(message) if isinstance(message, wire.Hello) else []


def told(replay):
    """What it heard besides Hello."""
    return [m for m in replay.heard if not isinstance(m, wire.Hello)]


async def leaving(file, outbox, work):
    """Connect, read answers into the outbox as the generator does, do `work(link, receiving)`, close."""
    link = Link(file, b"g0|boot", hello, 30.0)

    async def receive():
        while True:
            message = await link.next()
            if isinstance(message, wire.Ack):
                outbox.admitted(message.admitted)

    await link.hello()
    receiving = asyncio.create_task(receive())
    async with asyncio.timeout(60):
        while not link.welcomed:
            await asyncio.sleep(0.01)
    await work(link, receiving)
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    await link.close()


def unsent(count=20):
    outbox = Outbox()
    for i in range(count):
        outbox.add(f"0/{i}", f"0/{i}#1", wire.encode(wire.Failed("x", f"0/{i}", "stands for a group")), 0.0)
    return outbox


@pytest.fixture
def start(tmp_path):
    replays = []

    def begin(answers=confirms):
        replays.append(Replay(tmp_path / "replay.address", answers))
        return replays[-1], tmp_path / "replay.address"

    yield begin
    for replay in replays:
        replay.end()


def test_all_groups_arrive_when_replay_lives(start, caplog, monkeypatch):
    monkeypatch.setattr(leave, "QUIET_S", 30.0)
    monkeypatch.setattr(leave, "LEAVE_S", 60.0)
    replay, file = start()
    outbox = unsent()
    asyncio.run(leaving(file, outbox, lambda link, receiving: leave.settle(link, outbox, receiving)))
    assert outbox.unconfirmed == [] and len(outbox) == 20
    assert [m.group_id for m in told(replay)] == [f"0/{i}" for i in range(20)]
    assert caplog.text == ""


def test_a_replay_that_is_silent_is_not_waited_for_and_the_loss_is_counted(start, caplog):
    _, file = start(deaf)
    outbox = unsent()
    asyncio.run(leaving(file, outbox, lambda link, receiving: leave.settle(link, outbox, receiving)))
    assert "20 groups were not confirmed by replay" in caplog.text


def test_the_reason_of_a_failure_reaches_replay(start):
    replay, file = start()
    outbox = Outbox()

    async def work(link, receiving):
        await leave.say(link, ValueError("the tokenizer is broken"))
        async with asyncio.timeout(60):
            while not told(replay):
                await asyncio.sleep(0.01)

    asyncio.run(leaving(file, outbox, work))
    assert told(replay) == [wire.Failed("", "", "ValueError: the tokenizer is broken")]
