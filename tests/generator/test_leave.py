"""A generator that leaves with groups of which replay has not said that it has them (B48), over real sockets."""

import asyncio
import threading

import pytest

from asyncrl import wire
from asyncrl.generator import leave
from asyncrl.generator.link import Link
from asyncrl.generator.outbox import Outbox
from asyncrl.transport.rendezvous import publish_address
from asyncrl.transport.sockets import Server
from tests.generator.test_link import hello


class Replay(threading.Thread):
    """Welcomes; then confirms messages, or (deaf) says nothing."""

    def __init__(self, file, deaf):
        super().__init__(daemon=True)
        self.server, self.deaf, self.heard, self.over = Server("tcp://127.0.0.1:*"), deaf, [], False
        publish_address(file, self.server.address)
        self.start()

    def run(self):
        while not self.over:
            for peer, frames in self.server.poll(0.02):
                message = wire.decode(frames)
                if isinstance(message, wire.Hello):
                    self.server.send(peer, wire.encode(wire.Welcome(0, 0, None)))
                elif not self.deaf:
                    self.heard.append(message)
                    self.server.send(peer, wire.encode(wire.Ack([message.group_id], [])))
        self.server.close()


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

    def begin(deaf=False):
        replays.append(Replay(tmp_path / "replay.address", deaf))
        return replays[-1], tmp_path / "replay.address"

    yield begin
    for replay in replays:
        replay.over = True
        replay.join(20)


def test_all_groups_arrive_when_replay_lives(start, caplog, monkeypatch):
    monkeypatch.setattr(leave, "QUIET_S", 30.0)
    monkeypatch.setattr(leave, "LEAVE_S", 60.0)
    replay, file = start()
    outbox = unsent()
    asyncio.run(leaving(file, outbox, lambda link, receiving: leave.settle(link, outbox, receiving)))
    assert outbox.unconfirmed == [] and len(outbox) == 20
    assert [m.group_id for m in replay.heard] == [f"0/{i}" for i in range(20)]
    assert caplog.text == ""


def test_a_replay_that_is_silent_is_not_waited_for_and_the_loss_is_counted(start, caplog):
    _, file = start(deaf=True)
    outbox = unsent()
    asyncio.run(leaving(file, outbox, lambda link, receiving: leave.settle(link, outbox, receiving)))
    assert "20 groups were not confirmed by replay" in caplog.text


def test_the_reason_of_a_failure_reaches_replay(start):
    replay, file = start()
    outbox = Outbox()

    async def work(link, receiving):
        await leave.say(link, ValueError("the tokenizer is broken"))
        async with asyncio.timeout(60):
            while not replay.heard:
                await asyncio.sleep(0.01)

    asyncio.run(leaving(file, outbox, work))
    assert replay.heard == [wire.Failed("", "", "ValueError: the tokenizer is broken")]
