"""Real sockets on loopback: identity, size, refusal, absence, closing (B44, B47, B48, B49)."""

import asyncio
import contextlib
import multiprocessing
import os
import socket
import struct
import time

import pytest

from asyncrl.errors import ConfigError, TransportError
from asyncrl.transport import sockets
from asyncrl.transport.address import parse
from asyncrl.transport.sockets import AsyncClient, Client, Server


@pytest.fixture
def server():
    s = Server("tcp://127.0.0.1:*")
    yield s
    s.close()


def receive(server, count=1, timeout_s=5.0):
    out, deadline = [], time.monotonic() + timeout_s
    while len(out) < count and time.monotonic() < deadline:
        out += server.poll(0.1)
    return out


def test_frames_go_both_ways(server):
    client = Client(server.address, b"g0")
    big = os.urandom(sockets.LARGE_FRAME_BYTES + 1)
    client.send([b"msg", b"", big])
    ((peer, frames),) = receive(server)
    assert peer == b"g0" and frames == [b"msg", b"", big]
    # Small frames are copied out of the shared receive buffer, large ones stay where they are.
    assert [type(f) for f in frames] == [bytes, bytes, memoryview]
    assert server.send(peer, frames)
    assert client.recv(5.0) == [b"msg", b"", big]
    assert client.recv(0.01) is None
    client.close()


def test_a_received_frame_outlives_the_socket():
    server = Server("127.0.0.1")
    client = Client(server.address, b"g0")
    client.send([b"a", b"\x07" * 200_000])
    ((_, frames),) = receive(server)
    client.close()
    server.close()
    assert bytes(frames[1]) == b"\x07" * 200_000


def test_absent_peers_are_reported(server):
    assert server.send(b"nobody", [b"x"]) is False
    client = Client(server.address, b"g0")
    client.send([b"hi"])
    receive(server)
    client.close()
    deadline = time.monotonic() + 5
    while server.send(b"g0", [b"x"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.send(b"g0", [b"x"]) is False


def test_a_slow_peer_loses_nothing_silently(server):
    # B44: every message is either delivered or reported as not sent.
    client = Client(server.address, b"slow")
    client.send([b"hi"])
    receive(server)
    sent = sum(server.send(b"slow", [b"%d" % i, b"x" * 1000]) for i in range(30_000))
    assert 1000 <= sent < 30_000
    got = 0
    while client.recv(0.5) is not None:
        got += 1
    assert got == sent
    client.close()


def test_messages_sent_before_the_server_exists_arrive():
    probe = Server("127.0.0.1")
    address = probe.address
    probe.close()
    client = Client(address, b"early")
    client.send([b"hello"])
    server = Server(address)
    assert receive(server) == [(b"early", [b"hello"])]
    client.close()
    server.close()


def shake_hands(raw, identity=b""):
    """Speak ZMTP 3.1 (NULL) by hand, as a DEALER: a peer that neither reconnects nor says goodbye."""
    raw.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    properties = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    ready = b"\x05READY" + b"".join(bytes([len(k)]) + k + struct.pack(">I", len(v)) + v for k, v in properties)
    raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
    raw.settimeout(5)
    heard = b""
    while b"READY" not in heard:
        part = raw.recv(4096)
        assert part, "the server closed the connection in the handshake"
        heard += part


def test_a_restarted_peer_takes_over_its_name(server):
    # The old connection of a host that vanished still looks alive; the same name must work at once.
    with socket.create_connection(("127.0.0.1", parse(server.address).port)) as vanished:
        shake_hands(vanished, b"g0")
        vanished.sendall(b"\x00\x03old")
        assert receive(server) == [(b"g0", [b"old"])]
        new = Client(server.address, b"g0")
        new.send([b"new"])
        assert receive(server) == [(b"g0", [b"new"])]
        assert server.send(b"g0", [b"for the new one"])
        assert new.recv(5.0) == [b"for the new one"]
        new.close()


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "localhost:*", "tcp://[::1]:*", "::1"])
def test_binds_and_connects(bind):
    server = Server(bind)
    client = Client(server.address, b"x")
    client.send([b"hi"])
    assert parse(server.address).port and receive(server) == [(b"x", [b"hi"])]
    client.close()
    server.close()


def test_other_addresses_need_consent():
    for bind in ("tcp://*:*", "tcp://0.0.0.0:*", "tcp://192.0.2.1:5555"):
        with pytest.raises(ConfigError, match=r"replay\.bind=.*tcp://127\.0\.0\.1:\*.*replay\.security=none"):
            Server(bind)
    server = Server("tcp://*:*", "none")
    client = Client(f"127.0.0.1:{parse(server.address).port}", b"x")
    client.send([b"hi"])
    assert receive(server) == [(b"x", [b"hi"])]
    client.close()
    server.close()


def test_a_taken_port_is_named(server):
    port = parse(server.address).port
    with pytest.raises(TransportError, match=rf"port {port} of replay\.bind=.*taken"):
        Server(f"127.0.0.1:{port}")
    with pytest.raises(TransportError, match=r"replay\.bind='192\.0\.2\.1:5555' cannot be bound"):
        Server("192.0.2.1:5555", "none")
    with pytest.raises(TransportError, match="cannot be resolved"):
        Server("nobody.invalid", "none")


def bind_rounds(rounds, barrier, results):
    """Bind at the same instant as the others, again and again; hold the port until all have one."""
    for _ in range(rounds):
        barrier.wait(30)
        server = Server("tcp://*:*", "none")
        results.put(parse(server.address).port)
        barrier.wait(30)
        server.close()


@pytest.mark.timeout(120)
def test_eight_processes_that_bind_at_the_same_instant_never_clash():
    # B49: the kernel picks the port; a free one that was probed first could be taken by another.
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(8), spawn.SimpleQueue()
    processes = [spawn.Process(target=bind_rounds, args=(20, barrier, results), daemon=True) for _ in range(8)]
    for process in processes:
        process.start()
    rounds = []
    try:
        for _ in range(20):
            ports = []
            while len(ports) < 8:
                assert results._reader.poll(60), "no port was reported"
                ports.append(results.get())
            rounds.append(ports)
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    assert [process.exitcode for process in processes] == [0] * 8
    assert all(len(set(ports)) == 8 and all(ports) for ports in rounds)


@pytest.mark.parametrize("address", ["127.0.0.1", "tcp://*:5555", "ipc:///run/x", "nobody.invalid:1"])
def test_connecting_to_nothing_is_refused(address):
    with pytest.raises(TransportError):
        Client(address, b"x")


@pytest.mark.timeout(30)
def test_close_waits_no_longer_than_its_limit_for_an_absent_peer():
    # B48: without a limit this would hang for ever. 127.0.0.1:9 is the discard port; nobody listens.
    client = Client("127.0.0.1:9", b"x")
    client.send([b"unsent"])
    client.close()


def test_close_delivers_what_was_sent(server):
    client = Client(server.address, b"x")
    for i in range(20):
        client.send([b"%d" % i, b"y" * 100_000])
    client.close()
    assert [frames[0] for _, frames in receive(server, 20)] == [b"%d" % i for i in range(20)]


def test_a_full_socket_raises_in_time():
    client = Client("127.0.0.1:9", b"x")
    with pytest.raises(TransportError, match=r"no room to send to 127\.0\.0\.1:9"):
        for _ in range(100_000):
            client.send([b"x"], timeout_s=0.05)
    client._socket.linger = 0
    client.close()


def test_an_absurd_frame_length_ends_only_that_connection(server):
    # B47: a raw ZMTP 3.1 peer announces a frame of 1 TB.
    port = parse(server.address).port
    with socket.create_connection(("127.0.0.1", port)) as raw:
        shake_hands(raw)
        raw.sendall(b"\x02" + struct.pack(">Q", 2**40) + b"x" * 1000)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    assert server.poll(0.05) == []
    client = Client(server.address, b"g0")
    client.send([b"still serving"])
    assert receive(server) == [(b"g0", [b"still serving"])]
    client.close()


def test_garbage_on_the_port_is_ignored(server):
    with socket.create_connection(("127.0.0.1", parse(server.address).port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    client = Client(server.address, b"g0")
    client.send([b"hi"])
    assert receive(server) == [(b"g0", [b"hi"])]
    client.close()


def test_asyncio_client(server):
    async def talk():
        client = AsyncClient(server.address, b"g1")
        await client.send([b"a", b"b"])
        while not server.poll(0):
            await asyncio.sleep(0.01)
        assert await client.recv(0.01) is None
        server.send(b"g1", [b"one"])
        assert await client.recv(5.0) == [b"one"]
        # A receive that is cancelled takes nothing with it.
        waiting = asyncio.create_task(client.recv(10.0))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        server.send(b"g1", [b"two", b"x" * 100_000])
        assert await client.recv(5.0) == [b"two", b"x" * 100_000]
        client.close()

    asyncio.run(talk())


def test_asyncio_send_to_nobody_raises_in_time():
    async def flood():
        client = AsyncClient("127.0.0.1:9", b"g1")
        with pytest.raises(TransportError, match="no room"):
            for _ in range(100_000):
                await client.send([b"x"], timeout_s=0.05)
        client._socket.linger = 0
        client.close()

    asyncio.run(flood())


def test_a_thousand_reconnects_leave_no_descriptor_behind(server):
    # B50.
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def visit():
        client = Client(server.address, b"g0")
        client.send([b"hi"])
        receive(server)
        client.close()

    visit()
    before = descriptors()
    for _ in range(1000):
        visit()
    deadline = time.monotonic() + 5
    while descriptors() > before + 5 and time.monotonic() < deadline:
        server.poll(0.01)
    assert descriptors() <= before + 5
