"""The bad network of tools/chaos.py: bytes are late or held, never lost; what passes is read along."""

import itertools
import socket
import time

import pytest
import zmq
from chaos_lib.proxy import Network, Proxy
from chaos_lib.tap import read
from chaos_lib.zmtp import Message, Witness

from asyncrl import wire


class Pair:
    """A DEALER that reaches a ROUTER through a proxy."""

    def __init__(self):
        self.seen = []
        self.context = zmq.Context()
        self.router, self.dealer = self.context.socket(zmq.ROUTER), self.context.socket(zmq.DEALER)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.network = Network()
        number = itertools.count(1)
        self.proxy = Proxy(
            self.network, self.port, tag=lambda: (3, next(number)), witness=lambda *event: self.seen.append(event)
        )
        for each in (self.router, self.dealer):
            each.linger = 0
            each.reconnect_ivl = 20
        self.dealer.routing_id = b"d"
        self.dealer.connect(f"tcp://127.0.0.1:{self.proxy.port}")

    def up(self, *frames, timeout_ms=20_000):
        """Send to the ROUTER and return what arrives, None after the timeout."""
        self.dealer.send_multipart(frames)
        return self.arrived(timeout_ms)

    def arrived(self, timeout_ms=20_000):
        return self.router.recv_multipart()[1:] if self.router.poll(timeout_ms) else None

    def close(self):
        self.proxy.close()
        self.network.close()
        self.context.destroy(0)


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def test_messages_pass_whole_and_are_read_along_in_both_directions(pair):
    large = bytes(300) + b"x" * 200_000
    assert pair.up(b"msg", b"head", large) == [b"msg", b"head", large]
    pair.router.send_multipart([b"d", b"msg", b"back"])
    assert pair.dealer.poll(20_000) and pair.dealer.recv_multipart() == [b"msg", b"back"]
    assert pair.seen == [((3, 1), Message([b"msg", b"head"], 200_307)), ((3, 1), Message([b"msg", b"back"], 7))]


def test_a_one_way_partition_holds_its_direction_until_it_is_over(pair):
    assert pair.up(b"a", b"1") is not None
    pair.proxy.up.held_until = time.monotonic() + 3600
    assert pair.up(b"a", b"2", timeout_ms=200) is None
    pair.router.send_multipart([b"d", b"down"])
    assert pair.dealer.poll(20_000)
    pair.proxy.calm()
    assert pair.arrived() == [b"a", b"2"]


def test_latency_is_at_least_what_was_asked_for(pair):
    assert pair.up(b"a", b"1") is not None
    pair.proxy.up.latency_s = 0.3
    started = time.monotonic()
    assert pair.up(b"a", b"2") == [b"a", b"2"]
    assert time.monotonic() - started >= 0.3


def test_a_narrow_link_takes_its_time(pair):
    assert pair.up(b"a", b"1") is not None
    pair.proxy.up.rate = 400_000
    started = time.monotonic()
    assert pair.up(b"a", bytes(200_000)) is not None
    # The last part may still be paid for when it has arrived.
    assert time.monotonic() - started >= 0.2


def test_a_reset_ends_the_connection_and_the_peers_find_each_other_again(pair):
    assert pair.up(b"a", b"1") is not None
    pair.proxy.reset()
    # What is sent into the dying connection is lost, as on any network.
    for _ in range(100):
        if pair.up(b"a", b"2", timeout_ms=200) and pair.seen[-1][0] == (3, 2):
            return
    raise AssertionError(f"no second connection: {pair.seen}")


def test_closing_leaves_no_connection_and_no_port(pair):
    assert pair.up(b"a", b"1") is not None
    port = pair.proxy.port
    pair.proxy.close()
    assert pair.proxy.num_connections == 0
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))


def test_a_stream_cut_anywhere_gives_the_same_messages():
    head = bytes(64)
    short, long = bytes([1, 3]) + b"msg", bytes([2, *(300).to_bytes(8)]) + bytes(300)
    command = bytes([4, 5]) + b"READY"
    stream = head + command + short + long + command + bytes([0, 2]) + b"ab"
    want = [Message([b"msg", bytes(300)], 303), Message([b"ab"], 2)]
    for cut in range(1, len(stream)):
        witness = Witness()
        assert witness.feed(stream[:cut]) + witness.feed(stream[cut:]) == want


def test_the_tap_reads_acknowledgements_leases_and_commits():
    def events(message):
        return list(read(Message([bytes(f) for f in wire.encode(message)], 0)))

    assert events(wire.Ack(["0/a"], ["0/b"])) == [{"kind": "ack", "admitted": ["0/a"], "resolved": ["0/b"]}]
    prompt = wire.PromptMsg("a", [1], "", "", "")
    leases = [wire.LeaseMsg("0/a#2", "0/a", 2, prompt, 1.0), wire.LeaseMsg("e", "e", 1, prompt, 1.0, "1.4")]
    assert events(wire.Leases(leases)) == [{"kind": "leases", "given": [["0/a", 2]]}]
    commit = {"kind": "commit", "update": 4, "outcome": "trained", "ids": ["0/a"], "take": 3}
    assert events(wire.Commit(3, 4, "trained", ["0/a"])) == [commit]
    assert events(wire.Published(1, 8, "x", 1, 9)) == [{"kind": "published", "version": [1, 8], "batches": 9}]
    assert events(wire.Status()) == []
