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
from asyncrl.transport import meter, sockets
from asyncrl.transport.address import parse
from asyncrl.transport.sockets import AsyncClient, Client, Server


@pytest.fixture
def server():
    s = Server("tcp://127.0.0.1:*")
    yield s
    s.close()


def receive(server, count=1, timeout_s=20.0):
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
    assert client.recv(20.0) == [b"msg", b"", big]
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
    deadline = time.monotonic() + 20
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
        assert new.recv(20.0) == [b"for the new one"]
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
    client.leave()


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
        assert await client.recv(20.0) == [b"one"]
        # A receive that is cancelled takes nothing with it.
        waiting = asyncio.create_task(client.recv(10.0))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        server.send(b"g1", [b"two", b"x" * 100_000])
        assert await client.recv(20.0) == [b"two", b"x" * 100_000]
        await client.close()

    asyncio.run(talk())


def test_asyncio_send_to_nobody_raises_in_time():
    async def flood():
        client = AsyncClient("127.0.0.1:9", b"g1")
        with pytest.raises(TransportError, match="no room"):
            for _ in range(100_000):
                await client.send([b"x"], timeout_s=0.05)
        client.leave()

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
    deadline = time.monotonic() + 20
    while descriptors() > before + 5 and time.monotonic() < deadline:
        server.poll(0.01)
    assert descriptors() <= before + 5


def endless(raw, num_bytes):
    """Send empty frames of one message that never ends; False when the connection was ended meanwhile."""
    chunk = b"\x01\x00" * 2**15
    try:
        for _ in range(num_bytes // len(chunk)):
            raw.sendall(chunk)
    except (ConnectionResetError, BrokenPipeError, TimeoutError):
        return False
    return True


def test_a_message_without_end_is_ended(monkeypatch):
    # libzmq keeps every frame of it, at 32 times the bytes on the wire, and has no limit for that.
    monkeypatch.setattr(meter, "LOOK_S", 0.01)
    server = Server("127.0.0.1", max_bytes=2**20)
    client = Client(server.address, b"g0")
    with socket.create_connection(("127.0.0.1", parse(server.address).port)) as raw:
        shake_hands(raw)
        deadline = time.monotonic() + 30
        while endless(raw, 2**18) and time.monotonic() < deadline:
            client.send([b"hi"])
            assert receive(server) == [(b"g0", [b"hi"])]
    assert server.refused == {"refused_unfinished": 1}
    client.send([b"still here"])
    assert receive(server) == [(b"g0", [b"still here"])]
    client.close()
    server.close()


def test_a_busy_peer_is_not_taken_for_a_message_without_end(monkeypatch):
    # Far more than the limit between two looks, all of it in whole messages.
    monkeypatch.setattr(meter, "LOOK_S", 0.0)
    server = Server("127.0.0.1", max_bytes=2**16)
    client = Client(server.address, b"g0")
    for _ in range(100):
        client.send([b"x" * 2**15, b"y" * 2**15])
    assert len(receive(server, 100, 20.0)) == 100 and not server.refused
    client.close()
    server.close()


def test_a_frame_above_the_limit_ends_the_connection():
    server = Server("127.0.0.1", max_bytes=2**16)
    with socket.create_connection(("127.0.0.1", parse(server.address).port)) as raw:
        shake_hands(raw)
        raw.sendall(b"\x02" + struct.pack(">Q", 2**30) + b"x" * 1000)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(4096) == b""
    server.close()


def test_a_message_of_too_many_frames_is_dropped_and_counted():
    server = Server("127.0.0.1", max_frames=40)
    client = Client(server.address, b"g0")
    client.send([b"x"] * 100_000)
    client.send([b"y"] * 40)
    assert receive(server) == [(b"g0", [b"y"] * 40)]
    client.send([b"z"] * 41)
    client.send([b"end"])
    assert receive(server) == [(b"g0", [b"end"])]
    assert server.refused == {"refused_frames": 2}
    client.close()
    server.close()


def test_connections_beyond_the_limit_are_ended_unless_they_were_heard(server, monkeypatch):
    monkeypatch.setattr(meter, "LOOK_S", 0.0)
    server._meter.max_connections = 20
    client = Client(server.address, b"g0")
    client.send([b"hi"])
    receive(server)
    with contextlib.ExitStack() as stack:
        port = parse(server.address).port
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        deadline = time.monotonic() + 20
        while server.refused["refused_connections"] < 41 and time.monotonic() < deadline:
            server.poll(0.02)
        assert server.refused["refused_connections"] >= 41 and len(opened) == 60
        client.send([b"still here"])
        assert receive(server) == [(b"g0", [b"still here"])]
    client.close()


def use_inherited(server, client, results):
    """In a forked child: what every call on the parent's sockets says."""
    for use in (lambda: server.poll(1.0), lambda: server.send(b"g0", [b"x"]), lambda: client.recv(1.0),
                lambda: client.send([b"x"])):  # fmt: skip
        try:
            results.put(repr(use()))
        except TransportError as exc:
            results.put(str(exc))
    client.close()
    server.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_that_touches_an_inherited_socket_gets_an_error(server):
    # B50: libzmq's threads do not live in the child; a receive would never return.
    client = Client(server.address, b"g0")
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    child = fork.Process(target=use_inherited, args=(server, client, results), daemon=True)
    child.start()
    try:
        said = []
        for _ in range(4):
            assert results._reader.poll(30), "the child hangs"
            said.append(results.get())
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join(10)
    assert all(f"belongs to process {os.getpid()}" in text for text in said)
    client.send([b"unharmed"])
    assert receive(server) == [(b"g0", [b"unharmed"])]
    client.close()


def test_leaving_does_not_wait_and_still_delivers(server, monkeypatch):
    client = Client(server.address, b"x")
    for i in range(20):
        client.send([b"%d" % i, b"y" * 100_000])
    client.leave()
    assert [frames[0] for _, frames in receive(server, 20)] == [b"%d" % i for i in range(20)]
    # Nobody is there: close would take all of this time.
    monkeypatch.setattr(sockets, "LINGER_S", 600.0)
    gone = Client("127.0.0.1:9", b"x")
    gone.send([b"unsent"])
    gone.leave()


def break_off(address, go):
    """A sender that leaves in mid-message while its connection breaks."""
    client = Client(address, b"g0")
    with contextlib.suppress(TransportError):
        while not go.is_set():
            client.send([b"x" * 2_000_000] * 8, 1.0)
    client.leave()
    time.sleep(0.1)


@pytest.mark.timeout(120)
def test_a_connection_that_breaks_while_its_socket_leaves_aborts_nothing():
    # With linger 0, libzmq 4.3.5 aborted the process in 1 of 40 such ends.
    spawn = multiprocessing.get_context("spawn")
    for _ in range(3):
        server, go = Server("127.0.0.1"), spawn.Event()
        process = spawn.Process(target=break_off, args=(server.address, go), daemon=True)
        process.start()
        receive(server, 3, 30.0)
        go.set()
        server.close()
        process.join(30)
        assert process.exitcode == 0


def test_closing_delivers_while_the_event_loop_goes_on(server):
    async def talk():
        client = AsyncClient(server.address, b"g1")
        for i in range(20):
            await client.send([b"%d" % i, b"y" * 100_000])
        await client.close()

    asyncio.run(talk())
    assert [frames[0] for _, frames in receive(server, 20)] == [b"%d" % i for i in range(20)]

    async def talk_to_nobody():
        client, turns = AsyncClient("127.0.0.1:9", b"g1"), 0
        await client.send([b"unsent"])
        closing = asyncio.create_task(client.close())
        while not closing.done():
            turns += 1
            await asyncio.sleep(0.01)
        return turns

    assert asyncio.run(talk_to_nobody()) > 5


def test_every_form_of_address_binds_or_says_why():
    # B49: this host's own name too, where it can be bound; a fixed port on IPv6.
    server = Server(socket.gethostname(), "none")
    client = Client(server.address, b"x")
    client.send([b"hi"])
    assert receive(server) == [(b"x", [b"hi"])]
    client.close()
    server.close()
    probe = Server("[::1]:*")
    port = parse(probe.address).port
    probe.close()
    fixed = Server(f"[::1]:{port}")
    assert fixed.address == f"tcp://[::1]:{port}"
    fixed.close()


def test_no_socket_asks_libzmq_for_heartbeats():
    # One that is due on a broken connection with unread messages above the high-water mark aborts the process.
    server = Server("tcp://127.0.0.1:*")
    client = Client(server.address, b"c")
    assert server._socket.heartbeat_ivl == client._socket.heartbeat_ivl == 0
    assert server._socket.tcp_keepalive == client._socket.tcp_keepalive == 1
    client.close()
    server.close()
