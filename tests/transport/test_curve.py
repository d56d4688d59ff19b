"""CURVE over real sockets: who has a key gets in; everybody else is refused, counted, logged once (B47)."""

import asyncio
import logging
import socket
import time
from collections import Counter

import pytest
import zmq

from asyncrl.errors import ConfigError, TransportError
from asyncrl.transport import curve, keys
from asyncrl.transport.address import is_loopback, parse
from asyncrl.transport.sockets import AsyncClient, Client, Server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(curve, "RELOAD_S", 0.05)
    monkeypatch.setattr(curve, "REDIAL_S", 0.2)


@pytest.fixture
def folder(tmp_path):
    keys.new(tmp_path / "keys", ["g0", "g1"])
    return tmp_path / "keys"


@pytest.fixture
def server(folder):
    s = Server("tcp://127.0.0.1:*", "curve", keys=folder)
    yield s
    s.close()


@pytest.fixture
def connect(server, folder):
    """Makes clients that are closed at once at the end, with what they could not send."""
    clients = []

    def make(name="g0", identity=b"x", keyring=None, address=None):
        pair = keys.client_keys("curve", keyring or folder, name) if name else None
        clients.append(Client(address or server.address, identity, pair))
        return clients[-1]

    yield make
    for client in clients:
        client.leave()


def until(server, condition, seconds=30.0, client=None):
    """Serve until the condition holds; returns what was received."""
    got, deadline = [], time.monotonic() + seconds
    while not condition(got) and time.monotonic() < deadline:
        got += server.poll(0.02)
        if client is not None:
            client.recv(0)
    assert condition(got), (got, server.refused)
    return got


def exchange(server, client, words=b"hi"):
    client.send([words])
    ((peer, frames),) = until(server, len)
    assert frames == [words] and server.send(peer, [b"re: " + words])
    assert client.recv(20.0) == [b"re: " + words]


def still_serves(server, connect):
    exchange(server, connect("g1", b"witness"), b"still serving")


def outsider(tmp_path, server_pub, name="evil"):
    """A client's folder with a key that nobody allowed."""
    keys.new(tmp_path / "outside", [name], server_pub)
    return tmp_path / "outside"


def test_frames_go_both_ways(server, connect):
    client = connect()
    big = bytes(range(256)) * 4096
    client.send([b"msg", b"", big])
    ((peer, frames),) = until(server, len)
    assert peer == b"x" and frames == [b"msg", b"", big]
    assert server.send(peer, [b"msg", big])
    assert client.recv(20.0) == [b"msg", big]
    assert server.refused == {}


def test_the_bytes_on_the_wire_are_encrypted(server, folder):
    """A relay between client and server sees the handshake and no plain text."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        relay.settimeout(5)
        port = relay.getsockname()[1]
        client = Client(f"127.0.0.1:{port}", b"x", keys.client_keys("curve", folder, "g0"))
        client.send([b"a very secret prompt" * 50])
        seen = b""
        near, _ = relay.accept()
        with near, socket.create_connection(("127.0.0.1", parse(server.address).port)) as far:
            near.settimeout(0.05)
            far.settimeout(0.05)
            got, deadline = [], time.monotonic() + 30
            while not got and time.monotonic() < deadline:
                for here, there in ((near, far), (far, near)):
                    try:
                        part = here.recv(65536)
                    except TimeoutError:
                        continue
                    seen += part
                    there.sendall(part)
                got += server.poll(0.01)
        client.close()
    assert [frames for _, frames in got] == [[b"a very secret prompt" * 50]]
    assert b"CURVE" in seen and len(seen) > 1000 and b"secret" not in seen


def test_an_unknown_client_is_refused_until_its_key_is_added(server, connect, folder, tmp_path, caplog):
    there = outsider(tmp_path, folder / "server.pub")
    client = connect("evil", b"e", there)
    client.send([b"let me in"])
    # It tries again and again: counted each time, logged once by either side.
    until(server, lambda _: server.refused["refused_unknown_key"] >= 3, client=client)
    public = keys.client_keys("curve", there, "evil").public.decode()
    assert caplog.text.count(f"no client with the public key {public} is allowed (from 127.0.0.1)") == 1
    assert caplog.text.count("the key of this client is not allowed there") == 1
    still_serves(server, connect)
    keys.add(folder, there / "clients" / "evil.pub")
    deadline = time.monotonic() + 30
    got = []
    while not got and time.monotonic() < deadline:
        client.send([b"now?"])
        client.recv(0)
        got = server.poll(0.05)
    assert got[0] == (b"e", [b"now?"])


def test_a_wrong_server_key_is_refused(server, connect, tmp_path, caplog):
    # The client expects another server than the one it meets, as in an attack from the middle.
    keys.new(tmp_path / "other", ["g0"])
    client = connect("g0", b"x", tmp_path / "other")
    client.send([b"a secret"])
    until(server, lambda _: server.refused["refused_handshake"] >= 3, client=client)
    assert caplog.text.count("a client pins another server key") == 1
    until(server, lambda _: "not the server.pub pinned here" in caplog.text, client=client)
    still_serves(server, connect)


def test_a_plaintext_client_is_refused(server, connect, caplog):
    client = connect(None)
    client.send([b"hello in the clear"])
    until(server, lambda _: "uses no keys (plaintext)" in caplog.text, client=client)
    until(server, lambda _: "it demands keys (security=curve)" in caplog.text, client=client)
    assert server.refused["refused_handshake"] >= 2
    assert caplog.text.count("uses no keys (plaintext)") == 1
    still_serves(server, connect)


def test_a_client_with_keys_does_not_talk_to_a_server_without(folder, connect, caplog):
    plain = Server("127.0.0.1")
    client = connect("g0", b"x", address=plain.address)
    client.send([b"a secret"])
    until(plain, lambda _: "runs without security=curve" in caplog.text, client=client)
    assert plain.poll(0.1) == []
    plain.close()


def test_a_revoked_client_is_cut_off_and_stays_out(server, connect, folder, caplog):
    client, witness = connect("g0", b"a"), connect("g1", b"b")
    exchange(server, client)
    exchange(server, witness)
    keys.revoke(folder, "g0")
    time.sleep(curve.RELOAD_S)
    # Nothing is sent to it any more, nothing that it sends arrives, and its connection ends.
    assert server.send(b"a", [b"prompts"]) is False
    client.send([b"poison"])
    until(server, lambda _: server.refused["refused_revoked_key"] >= 3, client=client)
    assert server.poll(0.1) == []
    assert caplog.text.count("client 'g0' was revoked: its connection is ended") <= 1
    assert caplog.text.count("'g0'") <= 3 and "was revoked" in caplog.text
    assert client.recv(0.05) is None
    exchange(server, witness)
    # Allowed again, it comes back by itself.
    keys.add(folder, folder / "clients" / "g0.pub")
    deadline, got = time.monotonic() + 30, []
    while not got and time.monotonic() < deadline:
        client.send([b"back"])
        client.recv(0)
        got = server.poll(0.05)
    assert got[0] == (b"a", [b"back"])


def test_another_client_under_the_name_of_a_revoked_one_is_heard(server, connect, folder):
    old = connect("g0", b"same")
    exchange(server, old)
    keys.revoke(folder, "g0")
    exchange(server, connect("g1", b"same"))


def test_without_its_handler_the_server_lets_nobody_in(server, connect):
    server._poller.unregister(server._guard.zap)
    server._guard.zap.close()
    server._guard.zap = server._context.socket(zmq.REP)
    server._poller.register(server._guard.zap, zmq.POLLIN)
    client = connect()
    client.send([b"hi"])
    assert until(server, lambda _: server.refused["refused_handshake"] >= 1) == []


def test_garbage_and_cut_handshakes_do_no_harm(server, connect):
    port = parse(server.address).port
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    hello = b"\x05HELLO\x01\x00" + bytes(72) + bytes(32) + bytes(8) + bytes(80)
    for data in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        greeting,
        greeting + b"\x04" + bytes([len(hello)]) + hello,
        greeting + b"\x04\x05\x04HELO",
        greeting + b"\x06" + (2**40).to_bytes(8, "big") + b"x" * 1000,
    ):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(data)
            assert server.poll(0.05) == []
    until(server, lambda _: server.refused["refused_handshake"] >= 2)
    still_serves(server, connect)


def test_a_flood_of_broken_handshakes_while_nobody_polls_blocks_nothing(server, connect):
    # More than the 2000 events that a queue with libzmq's default limits holds.
    port = parse(server.address).port
    broken = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    for _ in range(25):
        some = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        for raw in some:
            raw.sendall(broken)
        for raw in some:
            raw.close()
    until(server, lambda _: server.refused["refused_handshake"] >= 2500, 30.0)
    still_serves(server, connect)


def test_asyncio_clients_too(server, folder, tmp_path):
    async def talk():
        client = AsyncClient(server.address, b"g0", keys.client_keys("curve", folder, "g0"))
        await client.send([b"a", b"x" * 100_000])
        while not (got := server.poll(0)):
            await asyncio.sleep(0.01)
        assert got == [(b"g0", [b"a", b"x" * 100_000])]
        server.send(b"g0", [b"one"])
        assert await client.recv(20.0) == [b"one"]
        await client.close()
        # Refused first, allowed later: it keeps trying.
        there = outsider(tmp_path, folder / "server.pub", "late")
        late = AsyncClient(server.address, b"late", keys.client_keys("curve", there, "late"))
        await late.send([b"hi"])
        deadline = time.monotonic() + 30
        while not server.refused["refused_unknown_key"] and time.monotonic() < deadline:
            server.poll(0)
            await late.recv(0.01)
        keys.add(folder, there / "clients" / "late.pub")
        got = []
        while not got and time.monotonic() < deadline:
            # Waits for room, which there is once it was let in, and so tends the connection.
            sending = asyncio.create_task(late.send([b"again"]))
            while not sending.done() and time.monotonic() < deadline:
                server.poll(0)
                await asyncio.sleep(0.01)
            await sending
            for _ in range(20):
                got += server.poll(0.01)
        assert got[0][0] == b"late"
        await late.close()

    asyncio.run(talk())


def test_close_delivers_what_was_sent(server, folder):
    # B48. The server must be served meanwhile: it answers the handshake.
    client = Client(server.address, b"x", keys.client_keys("curve", folder, "g0"))
    exchange(server, client)
    for i in range(20):
        client.send([b"%d" % i, b"y" * 100_000])
    client.close()
    got = until(server, lambda got: len(got) == 20)
    assert [frames[0] for _, frames in got] == [b"%d" % i for i in range(20)]


@pytest.mark.timeout(30)
def test_close_of_a_refused_client_has_an_end(server, folder, tmp_path):
    # B48: what it could not send does not hold it.
    there = outsider(tmp_path, folder / "server.pub")
    client = Client(server.address, b"e", keys.client_keys("curve", there, "evil"))
    client.send([b"unsent"])
    until(server, lambda _: server.refused["refused_unknown_key"] >= 1)
    client.close()


def test_wrong_settings_are_named(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"replay\.security=curve needs replay\.keys"):
        Server("127.0.0.1", "curve")
    with pytest.raises(ConfigError, match=r"weights\.keys=.* is no folder"):
        Server("127.0.0.1", "curve", keys=tmp_path / "none", setting="weights.bind")
    taken = Server("127.0.0.1", "curve", keys=folder)
    with pytest.raises(TransportError, match=r"port \d+ of replay\.bind=.*taken"):
        Server(taken.address, "curve", keys=folder)
    taken.close()


def test_curve_opens_other_addresses(folder, connect):
    refused = Counter(other=1)
    server = Server("tcp://*:*", "curve", keys=folder, refused=refused)
    host = parse(server.address).host
    assert host != "*" and (not is_loopback(host) or host == "127.0.0.1")
    exchange(server, connect(address=server.address))
    connect(None, address=server.address).send([b"x"])
    until(server, lambda _: refused["refused_handshake"] >= 1)
    assert refused["other"] == 1
    server.close()


def test_no_secret_is_ever_logged(folder, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    server = Server("127.0.0.1", "curve", keys=folder)
    there = outsider(tmp_path, folder / "server.pub")
    clients = [
        Client(server.address, b"a", keys.client_keys("curve", folder, "g0")),
        Client(server.address, b"b", keys.client_keys("curve", there, "evil")),
    ]
    for client in clients:
        client.send([b"x"])
    until(server, lambda got: got and server.refused["refused_unknown_key"], client=clients[1])
    keys.revoke(folder, "g0")
    time.sleep(curve.RELOAD_S)
    clients[0].send([b"y"])
    until(server, lambda _: server.refused["refused_revoked_key"], client=clients[0])
    for client in clients:
        client.leave()
    server.close()
    files = [folder / "server.key", *folder.glob("clients/*.key"), *there.glob("clients/*.key")]
    secrets = [f.read_text().split()[1] for f in files]
    assert len(secrets) == 4 and "revoked" in caplog.text
    assert not any(secret in caplog.text for secret in secrets)
