"""The generator's link to replay: real sockets, a replay that moves, is silent or never was."""

import asyncio
import time

import pytest

from asyncrl import wire
from asyncrl.errors import TransportError
from asyncrl.generator import link as module
from asyncrl.generator.link import Link
from asyncrl.transport.rendezvous import publish_address
from asyncrl.transport.sockets import Server


def hello():
    return wire.Hello(wire.SCHEMA, "generator", "g0", "boot", [0], 4, 2, 10, "f", (0, 3))


def serve_once(server, seconds=30.0):
    """Answer the first Hello with a Welcome; returns the kinds of messages that came."""
    kinds = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for peer, frames in server.poll(0.05):
            message = wire.decode(frames)
            kinds.append(type(message).__name__)
            if isinstance(message, wire.Hello):
                server.send(peer, wire.encode(wire.Welcome(0, 0, None)))
                return kinds
    return kinds


async def until(link, condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        await link.next()
    return condition()


def test_a_stale_address_is_left_for_the_one_that_replay_publishes(tmp_path):
    file = tmp_path / "replay.address"
    publish_address(file, "tcp://127.0.0.1:9")  # nobody serves the discard port here
    server = Server("tcp://127.0.0.1:*")

    async def go():
        link = Link(file, b"g0", hello, 30.0)
        await link.hello()
        publish_address(file, server.address)
        serving = asyncio.create_task(asyncio.to_thread(serve_once, server))
        assert await until(link, lambda: link.welcomed)
        await serving
        await link.close()

    try:
        asyncio.run(go())
    finally:
        server.close()


def test_a_replay_that_never_answers_is_an_error_that_names_the_address(tmp_path):
    file = tmp_path / "replay.address"
    publish_address(file, "tcp://127.0.0.1:9")

    async def go():
        link = Link(file, b"g0", hello, 1.5)
        try:
            with pytest.raises(TransportError, match=r"127\.0\.0\.1:9 was silent"):
                await until(link, lambda: False)
        finally:
            await link.close()

    asyncio.run(go())


def test_a_full_pipe_costs_the_message_and_not_the_generator(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "SEND_S", 0.1)

    async def go():
        link = Link("tcp://127.0.0.1:9", b"g0", hello, 30.0)  # nobody serves the discard port here
        try:
            for _ in range(5000):
                await link.send(wire.encode(wire.Heartbeat((0, 3), {})))
                if "no room to send" in caplog.text:
                    return
            raise AssertionError("there was always room")
        finally:
            link.leave()

    asyncio.run(go())


def test_hello_is_said_now_and_then_though_replay_answers(monkeypatch):
    monkeypatch.setattr(module, "REMIND_S", 0.5)
    server = Server("tcp://127.0.0.1:*")
    heard = []

    def answer():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and heard.count("Hello") < 4:
            for peer, frames in server.poll(0.05):
                heard.append(type(wire.decode(frames)).__name__)
                server.send(peer, wire.encode(wire.Welcome(0, 0, None)))

    async def go():
        link = Link(server.address, b"g0", hello, 60.0)
        await link.hello()
        serving = asyncio.create_task(asyncio.to_thread(answer))
        while not serving.done():
            # Something arrives all the time, so that there is no silence.
            await link.send(wire.encode(wire.Heartbeat((0, 3), {})))
            await link.next()
        await serving
        await link.close()

    try:
        asyncio.run(go())
    finally:
        server.close()
    assert heard.count("Hello") == 4 and heard.count("Heartbeat") > 4


def test_silence_is_met_with_a_ping_and_then_with_hello(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PING_S", 0.5)
    monkeypatch.setattr(module, "SILENCE_S", 6.0)
    file = tmp_path / "replay.address"
    server = Server("tcp://127.0.0.1:*")
    publish_address(file, server.address)
    heard = []

    def listen():
        serve_once(server)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and "Hello" not in heard:
            heard.extend(type(wire.decode(frames)).__name__ for _, frames in server.poll(0.05))

    async def go():
        link = Link(file, b"g0", hello, 30.0)
        await link.hello()
        serving = asyncio.create_task(asyncio.to_thread(listen))
        assert await until(link, lambda: link.welcomed)
        assert await until(link, lambda: not link.welcomed)
        await serving
        await link.close()

    try:
        asyncio.run(go())
    finally:
        server.close()
    assert heard[0] == "LeaseRequest"
    assert heard[-1] == "Hello"


def test_a_fixed_address_is_connected_to_without_a_file_and_before_anybody_serves_it():
    server = Server("tcp://127.0.0.1:*")
    address = server.address
    server.close()

    async def go():
        link = Link(address, b"g0", hello, 30.0)
        await link.hello()
        server = Server(address)  # a replay that comes up, or comes back, at its fixed port
        serving = asyncio.create_task(asyncio.to_thread(serve_once, server))
        try:
            assert await until(link, lambda: link.welcomed)
            await serving
        finally:
            await link.close()
            server.close()

    asyncio.run(go())


def test_a_replay_that_was_started_again_at_the_same_address_hears_hello_at_once(tmp_path):
    file = tmp_path / "replay.address"
    server = Server("tcp://127.0.0.1:*")
    publish_address(file, server.address)
    heard = []

    def forgetful():
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and heard.count("Hello") < 2:
            for peer, frames in server.poll(0.05):
                heard.append(type(wire.decode(frames)).__name__)
                known = heard[-1] == "Hello"
                server.send(peer, wire.encode(wire.Welcome(0, 0, None, str(len(heard))) if known else wire.Rejoin()))

    async def go():
        link = Link(file, b"g0", hello, 30.0)
        await link.hello()
        serving = asyncio.create_task(asyncio.to_thread(forgetful))
        assert await until(link, lambda: link.welcomed)
        for _ in range(3):
            await link.send(wire.encode(wire.Heartbeat((0, 3), {})))
        assert await until(link, lambda: heard.count("Hello") == 2)
        assert await until(link, lambda: link.welcomed)
        await serving
        await link.close()

    try:
        asyncio.run(go())
    finally:
        server.close()
    # Three messages were answered with Rejoin, one Hello is enough.
    assert heard == ["Hello", "Heartbeat", "Heartbeat", "Heartbeat", "Hello"]
