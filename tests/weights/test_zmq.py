"""The zmq carrier on real sockets: slow, dead, late and replaced peers, damage (B33, B35, B44)."""

import contextlib
import logging
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError, TransportError, VersionGone, WeightSyncError
from asyncrl.transport import keys
from asyncrl.transport.address import parse
from asyncrl.transport.sockets import Client, Server
from asyncrl.types import Version
from asyncrl.weights import flat, messages
from asyncrl.weights.reader import Reader
from asyncrl.weights.shm import Publisher as ShmPublisher
from asyncrl.weights.zmq import SCHEME, Base, Publisher, newest, read

MB = 2**20
V1, V2, V3 = Version(0, 1), Version(0, 2), Version(1, 2)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {
        "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3) + value,
        "b.weight": torch.full((5,), value, dtype=torch.bfloat16),
        "c.count": torch.tensor(7),
        "d.mask": torch.tensor([True, False, True]),
        "e.empty": torch.zeros(0, 4),
        "f.double": torch.tensor([value / 3], dtype=torch.float64),
    }


def large(seed: int = 0, megabytes: int = 24) -> dict[str, Tensor]:
    """bf16 of 4 MB a tensor: about one chunk each."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-1000, 1000, (megabytes // 4, 2 * MB), generator=generator, dtype=torch.int16)
    return {f"layer.{i}": row.to(torch.bfloat16) for i, row in enumerate(raw)}


def stepped(old: dict[str, Tensor], part: float, seed: int = 1) -> dict[str, Tensor]:
    """The neighbouring bf16 for this part of the elements."""
    generator = torch.Generator().manual_seed(seed)
    hit = {k: torch.rand(v.shape, generator=generator) < part for k, v in old.items()}
    return {k: torch.where(hit[k], (v.view(torch.int16) + 1).view(v.dtype), v) for k, v in old.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


class Relay:
    """A TCP relay in front of a publisher that stops, cuts or damages what flows to the readers.

    hold_after: bytes to readers after which it stops reading from the publisher, until release().
    flips: positions of bytes to readers, counted over all connections, whose lowest bit is flipped.
    """

    def __init__(self, source: str, hold_after: int | None = None, flips: tuple[int, ...] = ()) -> None:
        port = parse(source.removeprefix(SCHEME)).port
        assert port is not None
        self._target, self._hold_after, self._flips = ("127.0.0.1", port), hold_after, set(flips)
        self.held, self._stop, self._released = threading.Event(), threading.Event(), threading.Event()
        self.passed = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.source = f"{SCHEME}tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def release(self) -> None:
        self._released.set()

    def cut(self) -> None:
        """End the connections there are; new ones are taken."""
        for s in self._sockets:
            s.close()
        self._sockets.clear()

    def close(self) -> None:
        self._stop.set()
        self.release()
        for thread in self._threads:
            thread.join(5)
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            try:
                far = socket.create_connection(self._target, 2)
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for one, other, damage in ((near, far, False), (far, near, True)):
                one.settimeout(0.05)
                thread = threading.Thread(target=self._pump, args=(one, other, damage))
                self._threads.append(thread)
                thread.start()

    def _pump(self, one: socket.socket, other: socket.socket, to_reader: bool) -> None:
        while not self._stop.is_set():
            try:
                data = bytearray(one.recv(65536))
                if not data:
                    break
                if to_reader:
                    self._touch(data)
                self._send(other, data)
            except TimeoutError:
                continue
            except OSError:
                break
        one.close()
        other.close()

    def _send(self, other: socket.socket, data: bytearray) -> None:
        left = memoryview(data)
        while left and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                left = left[other.send(left) :]

    def _touch(self, data: bytearray) -> None:
        for position in [p for p in self._flips if self.passed <= p < self.passed + len(data)]:
            data[position - self.passed] ^= 1
        self.passed += len(data)
        if self._hold_after is not None and self.passed >= self._hold_after:
            self.held.set()
            self._released.wait(30)


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    def make(source: str, **options: object) -> Relay:
        made.append(Relay(source, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


# --- what is published ------------------------------------------------------------------------------


def test_round_trip_keeps_names_dtypes_shapes_and_bits(publisher: Publisher):
    source = publisher.publish(V1, iter(weights().items()))
    assert source == publisher.source and source.startswith("zmq://tcp://127.0.0.1:")
    assert same(read(source, V1), weights())


def test_many_chunks_with_a_short_last_one(publisher: Publisher):
    sent = large(megabytes=40) | {"tail": torch.arange(1000)}
    source = publisher.publish(V1, sent.items())
    got = read(source, V1)
    assert same(got, sent)
    assert publisher.counters["chunks"] == 11 and publisher.counters["bytes"] == 40 * MB + 8000
    # The caller owns what it got.
    got["tail"].zero_()
    assert same(read(source, V1), sent)


def test_an_empty_version_has_no_chunks(publisher: Publisher):
    assert read(publisher.publish(V1, []), V1) == {}
    assert same(read(publisher.publish(V2, [("e", torch.zeros(0))]), V2), {"e": torch.zeros(0)})


def test_a_later_change_of_the_live_weights_is_not_seen(publisher: Publisher):
    live = weights(1.0)
    source = publisher.publish(V1, live.items())
    live["a.weight"].zero_()
    assert same(read(source, V1), weights(1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_not_published(publisher: Publisher, bad: float):
    source = publisher.publish(V1, weights().items())
    broken = weights(2.0)
    broken["b.weight"][3] = bad
    with pytest.raises(WeightSyncError, match=r"version 0\.2 not published: b\.weight has non-finite"):
        publisher.publish(V2, broken.items())
    assert newest(source) == V1
    with pytest.raises(WeightSyncError, match=r"version 0\.2 is not offered .* it has 0\.1"):
        read(source, V2)
    assert same(read(source, V1), weights())


def test_a_name_twice_and_a_strange_dtype_are_refused(publisher: Publisher):
    with pytest.raises(WeightSyncError, match="a comes twice"):
        publisher.publish(V1, [("a", torch.zeros(1)), ("a", torch.zeros(1))])
    with pytest.raises(WeightSyncError, match="complex64"):
        publisher.publish(V1, [("a", torch.zeros(1, dtype=torch.complex64))])
    assert newest(publisher.source) is None


def test_the_newest_versions_stay():
    with pytest.raises(WeightSyncError, match="keep 0"):
        Publisher(keep=0)
    publisher = Publisher(keep=2)
    for version in (V1, V2, V3):
        source = publisher.publish(version, weights(version.update).items())
    assert newest(source) == V3
    assert same(read(source, V2), weights(2.0))
    with pytest.raises(WeightSyncError, match=r"version 0\.1 is not offered by .*; it has 0\.2, 1\.2"):
        read(source, V1)
    # An older label published later (a resumed run) is the newest.
    publisher.publish(V1, weights(9.0).items())
    assert newest(source) == V1
    publisher.close()


def test_publishing_a_version_again_replaces_it(publisher: Publisher):
    source = publisher.publish(V1, large(0, 8).items())
    first = Base(V1, read(source, V1))
    again = stepped(dict(first.weights), 0.01)
    publisher.publish(V1, again.items())
    assert same(read(source, V1), again)
    # The label of the base now means other weights: nothing of it may survive.
    third = stepped(again, 0.01, seed=2)
    publisher.publish(V2, third.items())
    assert same(read(source, V2, first), third)


# --- addresses and security -------------------------------------------------------------------------


def test_other_machines_need_security_none():
    with pytest.raises(ConfigError, match=r"weights\.bind='tcp://\*:\*' .* weights\.security=none"):
        Publisher("tcp://*:*")
    publisher = Publisher("tcp://*:*", security="none")
    source = publisher.publish(V1, weights().items())
    port = parse(source.removeprefix(SCHEME)).port
    assert same(read(f"{SCHEME}tcp://127.0.0.1:{port}", V1), weights())
    publisher.close()


def test_weights_go_to_those_with_a_key_only(tmp_path: Path):
    keys.new(tmp_path / "keys", ["g0"])
    pair = keys.client_keys("curve", tmp_path / "keys", "g0")
    publisher = Publisher("tcp://127.0.0.1:*", security="curve", keys=tmp_path / "keys")
    sent = large(19, 8)
    source = publisher.publish(V1, sent.items())
    assert newest(source, keys=pair) == V1
    assert same(Reader(keys=pair).read(source, V1), sent)
    with pytest.raises(WeightSyncError, match="no progress"):
        read(source, V1, timeout_s=0.5)
    publisher.close()


def test_a_taken_port_is_said(publisher: Publisher):
    with pytest.raises(TransportError, match=r"port \d+ of weights\.bind=.* is taken"):
        Publisher(publisher.source.removeprefix(SCHEME))


@pytest.mark.parametrize(
    "source",
    ["/dev/shm/x", "tcp://127.0.0.1:1", "zmq://tcp://127.0.0.1", "zmq://ipc://x", "zmq://tcp://no.such.host.invalid:1"],
)
def test_what_is_no_source_is_refused(source: str):
    with pytest.raises(WeightSyncError, match=r"not a source|cannot connect"):
        read(source, V1)


def test_garbage_is_refused_and_counted(publisher: Publisher, caplog: pytest.LogCaptureFixture):
    source = publisher.publish(V1, weights().items())
    client = Client(source.removeprefix(SCHEME), b"junk")
    whole = messages.seal(messages.Get(1, 0, 0))
    junk = [
        [b""],
        [b"\0" * 8],
        [whole[:-1]],
        [whole[:9] + b"\xff" + whole[10:]],
        [whole, b"more"],
        [os.urandom(MB)],
        [pickle.dumps({"a": 1})],
        [messages.seal(messages.Chunk("boot", 1, 0, 0))],
    ]
    with caplog.at_level(logging.WARNING):
        for frames in junk:
            client.send(frames)
        wait_for(lambda: publisher.counters["refused"] == len(junk))
    assert len([r for r in caplog.records if "not a request" in r.message]) == 1
    # Well-formed requests for what is not there are answered.
    for request in (
        messages.Get(1, 0, -1),
        messages.Get(1, 0, 1),
        messages.Get(1, 1, 0),
        messages.Get(1, -1, 0),
        messages.Get(9, 0, 0),
    ):
        client.send([messages.seal(request)])
        reply = messages.open_reply(client.recv(60.0) or [])
        assert isinstance(reply, messages.Kept) and reply.token is None and reply.versions == ((0, 1),)
    client.close()
    assert same(read(source, V1), weights())


# --- slow and dead receivers ------------------------------------------------------------------------


def test_a_stalled_receiver_delays_nobody(publisher: Publisher, relay: Callable[..., Relay]):
    first, second = large(1, 40), large(2, 40)
    source = publisher.publish(V1, first.items())
    slow = relay(source, hold_after=6 * MB)
    with ThreadPoolExecutor(3) as pool:
        stalled = pool.submit(read, slow.source, V1)
        assert slow.held.wait(120)
        others = [pool.submit(read, source, V1) for _ in range(2)]
        assert all(same(other.result(120), first) for other in others)
        publisher.publish(V2, second.items())
        assert same(read(source, V2), second)
        assert not stalled.done()
        slow.release()
        # Two newer versions or not: what a reader is in the middle of stays.
        assert same(stalled.result(120), first)


READ = """
import sys
from asyncrl.types import Version
from asyncrl.weights.zmq import read
read(sys.argv[1], Version(0, 1))
"""


def test_a_receiver_killed_in_mid_transfer(publisher: Publisher, relay: Callable[..., Relay]):
    sent = large(3)
    source = publisher.publish(V1, sent.items())
    between = relay(source, hold_after=6 * MB)
    victim = subprocess.Popen([sys.executable, "-c", READ, between.source])
    try:
        wait_for(lambda: between.held.is_set() or victim.poll() is not None)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait(60)
    between.release()
    assert same(read(source, V1), sent)
    publisher.publish(V2, weights().items())
    assert same(read(source, V2), weights())


# --- lost, replaced, dropped ------------------------------------------------------------------------


def test_a_broken_connection_is_mended(publisher: Publisher, relay: Callable[..., Relay]):
    sent = large(4)
    between = relay(publisher.publish(V1, sent.items()), hold_after=6 * MB)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, between.source, V1)
        assert between.held.wait(120)
        between.cut()
        between.release()
        assert same(reading.result(120), sent)
    # What was on its way was lost, and only that was sent again.
    assert 6 < publisher.counters["chunks"] <= 6 + 6


def test_a_publisher_replaced_in_mid_transfer(relay: Callable[..., Relay]):
    first, second = large(5), large(6)
    before = Publisher()
    address = before.publish(V1, first.items()).removeprefix(SCHEME)
    between = relay(before.source, hold_after=6 * MB)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, between.source, V1)
        assert between.held.wait(120)
        between.cut()
        before.close()
        after = Publisher(address)
        # The label is the same, the weights are not: the two must not be mixed.
        after.publish(V1, second.items())
        between.release()
        with pytest.raises(WeightSyncError, match=r"was replaced after \d of 6 chunks of version 0\.1"):
            reading.result(120)
        assert same(read(between.source, V1), second)
    after.close()


@pytest.mark.parametrize("hold_s", [60.0, 0.0])
def test_a_version_dropped_in_mid_transfer(relay: Callable[..., Relay], hold_s: float):
    sent = large(7)
    publisher = Publisher(keep=1, hold_s=hold_s)
    between = relay(publisher.publish(V1, sent.items()), hold_after=6 * MB)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, between.source, V1)
        assert between.held.wait(120)
        for update in range(2, 7):
            publisher.publish(Version(0, update), weights(update).items())
        # The chunks that had been asked for are lost with the connection.
        between.cut()
        between.release()
        if hold_s:
            assert same(reading.result(120), sent)
        else:
            with pytest.raises(WeightSyncError, match=r"version dropped by .* after \d of 6 chunks.* it has 0\.6"):
                reading.result(120)
    assert newest(publisher.source) == Version(0, 6)
    publisher.close()


def test_readers_make_a_publisher_hold_two_versions_at_most():
    publisher = Publisher(keep=1, hold_s=60.0)
    for update in range(5):
        source = publisher.publish(Version(0, update), weights(update).items())
        read(source, Version(0, update))
    with pytest.raises(WeightSyncError, match=r"it has 0\.2, 0\.3, 0\.4"):
        read(source, Version(0, 1))
    publisher.close()


def test_silence_is_an_error_that_names_the_phase(
    publisher: Publisher, relay: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        source = f"{SCHEME}tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(WeightSyncError, match=r"no progress for 0\.2 s at the header of version 0\.1"):
            read(source, V1, timeout_s=0.2)
        with pytest.raises(WeightSyncError, match="at the list of versions"):
            newest(source, timeout_s=0.2)
        monkeypatch.setattr("asyncrl.weights.fetch.ANSWER_S", 0.3)
        with pytest.raises(VersionGone, match=r"no progress for 0\.3 s at the header"):
            read(source, V1, timeout_s=60.0)
    between = relay(publisher.publish(V1, large(8).items()), hold_after=6 * MB)
    with pytest.raises(WeightSyncError, match=r"no progress for 3 s at \d of 6 chunks of version 0\.1"):
        read(between.source, V1, timeout_s=3.0)


# --- damage -----------------------------------------------------------------------------------------


def test_a_flipped_byte_is_found_and_fetched_again(
    publisher: Publisher, relay: Callable[..., Relay], caplog: pytest.LogCaptureFixture
):
    sent = large(9)
    between = relay(publisher.publish(V1, sent.items()), flips=(6 * MB + 17,))
    with caplog.at_level(logging.WARNING):
        assert same(read(between.source, V1), sent)
    assert "chunk 1 of version 0.1" in caplog.text
    assert publisher.counters["chunks"] == 7


def test_bytes_that_stay_damaged_are_an_error(publisher: Publisher, relay: Callable[..., Relay]):
    # One flip in each megabyte from the first chunk on: every chunk is damaged each time it comes.
    flips = tuple(i * MB + MB // 2 for i in range(200))
    between = relay(publisher.publish(V1, large(10).items()), flips=flips)
    with pytest.raises(WeightSyncError, match=r"chunk \d of version 0\.1 from .* is damaged, 3 times"):
        read(between.source, V1)


def test_a_flip_in_any_message_is_harmless(publisher: Publisher, relay: Callable[..., Relay]):
    source = publisher.publish(V1, weights().items())
    # The greeting of the protocol takes about 200 bytes, the header and the only chunk follow.
    for position in range(230, 700, 47):
        between = relay(source, flips=(position,))
        assert same(read(between.source, V1), weights())


def head(**changes: object) -> messages.Head:
    packed = flat.pack(weights().items())
    values: dict[str, object] = {
        "boot": "b",
        "serial": 1,
        "version": (0, 1),
        "specs": tuple(e[:3] for e in packed.entries),
        "nbytes": packed.data.nbytes,
        "digests": packed.digests,
        "checksum": packed.checksum,
        "chain": (),
    }
    return messages.Head(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"nbytes": 2**40},
        {"digests": (1, 2)},
        {"checksum": 5},
        {"specs": (("a", "float32", (2**50,)),)},
        {"specs": (("a", "float32", (-1,)),)},
        {"specs": (("a", "object", (1,)),)},
        {"specs": (("a", "bool", (1,)), ("a", "bool", (1,)))},
        {"chain": (messages.Link((0, 0), 2**40, ()),)},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(changes: dict[str, object]):
    server, stop = Server("tcp://127.0.0.1:*"), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            for peer, _ in server.poll(0.05):
                server.send(peer, [messages.seal(head(**changes))])

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        try:
            with pytest.raises(WeightSyncError, match=r"contradicts itself|comes twice|dtype object|negative axis"):
                read(SCHEME + server.address, V1, timeout_s=20.0)
        finally:
            stop.set()
            serving.result(120)
    server.close()


# --- deltas -----------------------------------------------------------------------------------------


def test_a_receiver_with_the_last_version_gets_the_difference(publisher: Publisher):
    first = large(11, 8)
    second = stepped(first, 0.01)
    source = publisher.publish(V1, first.items())
    base = Base(V1, read(source, V1))
    publisher.publish(V2, second.items())
    sent = publisher.counters["bytes"]
    assert same(read(source, V2, base), second)
    # 1 % of 4 Mi elements, a gap byte and a code byte each, some escapes: 8 MB becomes less than 8 MB / 40.
    assert publisher.counters["bytes"] - sent < 8 * MB / 40
    assert same(dict(base.weights), first)


def test_a_receiver_two_versions_behind_gets_two_differences(publisher: Publisher):
    made = [large(12, 8)]
    for seed in range(3):
        made.append(stepped(made[-1], 0.01, seed))
    for update, tensors in enumerate(made):
        source = publisher.publish(Version(0, update), tensors.items())
    sent = publisher.counters["bytes"]
    # Version 0.1 itself is gone, the way from it is not.
    assert same(read(source, Version(0, 3), Base(Version(0, 1), made[1])), made[3])
    assert publisher.counters["bytes"] - sent < 2 * 8 * MB / 40


@pytest.mark.parametrize(
    "fault",
    ["other weights", "one element", "other names", "other shape", "other dtype", "one more", "unknown version"],
)
def test_a_base_that_is_not_what_it_says_is_never_used(publisher: Publisher, fault: str):
    first = large(13, 12)
    second = stepped(first, 0.01)
    publisher.publish(V1, first.items())
    source = publisher.publish(V2, second.items())
    held = {k: v.clone() for k, v in first.items()}
    version, chunks = V1, 3
    match fault:
        case "other weights":
            held, chunks = large(14, 12), 3 + 1
        case "one element":
            # In the second chunk; that chunk alone is fetched beside the delta.
            held["layer.1"][5] = 12345.0
            chunks = 1 + 1
        case "other names":
            held = {"x." + k: v for k, v in held.items()}
        case "other shape":
            held["layer.0"] = held["layer.0"].view(2, -1)
        case "other dtype":
            held["layer.0"] = held["layer.0"].float()
        case "one more":
            held["more"] = torch.ones(1)
        case "unknown version":
            version = Version(0, 9)
    assert same(read(source, V2, Base(version, held)), second)
    assert publisher.counters["chunks"] == chunks


def test_large_changes_and_other_tensors_have_no_delta(publisher: Publisher):
    for update, tensors in enumerate([large(15, 8), large(16, 8), weights(), weights(2.0)]):
        source = publisher.publish(Version(0, update), tensors.items())
        sent = publisher.counters["bytes"]
        base = Base(Version(0, update - 1), large(15, 8))
        assert same(read(source, Version(0, update), base), tensors)
        assert publisher.counters["bytes"] - sent == flat.pack(tensors.items()).data.nbytes


def test_the_reader_takes_either_carrier_and_keeps_its_base(publisher: Publisher, tmp_path: Path):
    shm = ShmPublisher(tmp_path / "weights")
    reader, whole = Reader(), Reader(with_delta=False)
    tensors = large(17, 8)
    for update in range(3):
        tensors = stepped(tensors, 0.01, update)
        version = Version(0, update)
        for source in (publisher.publish(version, tensors.items()), shm.publish(version, tensors.items())):
            assert same(reader.read(source, version), tensors)
        assert same(whole.read(publisher.source, version), tensors)
    shm.close()
    # Four whole reads of 2 chunks, two deltas of 1.
    assert publisher.counters["chunks"] == 4 * 2 + 2


# --- late and concurrent ----------------------------------------------------------------------------


def follow(source: str, last: Version, late_s: float) -> dict[str, Tensor]:
    """What a generator does: ask for the newest, read it, until `last` is there."""
    time.sleep(late_s)
    reader, held = Reader(), None
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        version = newest(source)
        if version is None or version == held:
            time.sleep(0.01)
            continue
        try:
            got = reader.read(source, version)
        except WeightSyncError as exc:
            # Overtaken between the two questions.
            assert "not offered" in str(exc) or "dropped" in str(exc)
            continue
        held = version
        assert float(got["b.weight"][0]) == version.update
        if held == last:
            return got
    raise AssertionError(f"{last} was never reached")


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(s, marks=pytest.mark.long) for s in range(10, 50))])
def test_any_start_order_reaches_the_newest_version(seed: int):
    rng = random.Random(seed)
    publisher = Publisher(keep=1)
    last = Version(0, 4)
    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(follow, publisher.source, last, rng.uniform(0, 0.1)) for _ in range(3)]
        for update in range(5):
            time.sleep(rng.uniform(0, 0.04))
            publisher.publish(Version(0, update), weights(update).items())
        assert all(same(reader.result(120), weights(4)) for reader in readers)
    publisher.close()


def test_a_late_joiner_does_not_wait_for_the_next_version(publisher: Publisher):
    source = publisher.publish(V1, weights(1.0).items())
    publisher.publish(V2, weights(2.0).items())
    assert newest(source) == V2
    assert same(read(source, V2), weights(2.0))


def test_publishing_while_others_read_never_mixes_versions():
    publisher = Publisher(keep=2)
    stop, reads = threading.Event(), Counter[int]()

    def constant(update: int) -> dict[str, Tensor]:
        return {f"layer.{i}": torch.full((2 * MB,), update, dtype=torch.int16) for i in range(3)}

    def watch(number: int) -> None:
        reader = Reader()
        while not stop.is_set():
            version = newest(publisher.source)
            assert version is not None
            try:
                got = reader.read(publisher.source, version)
            except WeightSyncError as exc:
                assert "not offered" in str(exc) or "dropped" in str(exc)
                continue
            assert all(bool((tensor == version.update).all()) for tensor in got.values())
            reads[number] += 1

    publisher.publish(Version(0, 0), constant(0).items())
    with ThreadPoolExecutor(4) as pool:
        watchers = [pool.submit(watch, number) for number in range(2)]
        # Two at a time: they are queued, never interleaved.
        published = [pool.submit(publisher.publish, Version(0, u), constant(u).items()) for u in range(1, 16)]
        for one in published:
            one.result(120)
        # Each of them may have been overtaken every time until now.
        wait_for(lambda: all(watcher.done() for watcher in watchers) or min(reads[0], reads[1]) > 0)
        stop.set()
        for watcher in watchers:
            watcher.result(120)
        assert min(reads[0], reads[1]) > 0
    publisher.close()


# --- the end ----------------------------------------------------------------------------------------


def test_close_ends_the_thread_and_the_sockets():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    Publisher().close()
    before = open_files()
    for _ in range(5):
        publisher = Publisher()
        source = publisher.publish(V1, weights().items())
        read(source, V1)
        with pytest.raises(WeightSyncError):
            read(source, V2)
        publisher.close()
        publisher.close()
    assert open_files() <= before
    assert [t.name for t in threading.enumerate() if t.name == "weights"] == []
    with pytest.raises(WeightSyncError, match="has ended"):
        publisher.publish(V2, weights().items())
    with pytest.raises(WeightSyncError, match="no progress"):
        read(source, V1, timeout_s=0.2)


def test_close_with_a_stalled_receiver_is_bounded(relay: Callable[..., Relay]):
    publisher = Publisher()
    between = relay(publisher.publish(V1, large(18, 40).items()), hold_after=2 * MB)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, between.source, V1, timeout_s=2.0)
        assert between.held.wait(120)
        publisher.close()
        wait_for(lambda: not [t for t in threading.enumerate() if t.name == "weights"])
        with pytest.raises(WeightSyncError, match="no progress"):
            reading.result(120)


def test_another_process_reads_the_version(publisher: Publisher):
    source = publisher.publish(V1, weights().items())
    code = READ.replace("read(sys", "print(float(read(sys") + "['a.weight'].sum()))"
    code = code.replace("\n['a.weight']", "['a.weight']")
    done = subprocess.run([sys.executable, "-c", code, source], check=True, timeout=60, capture_output=True, text=True)
    # 0 + 1 + ... + 5, each plus 1.
    assert float(done.stdout) == 21.0


def test_close_does_not_wait_for_chunks_that_nobody_takes(monkeypatch: pytest.MonkeyPatch):
    publisher, taken = Publisher(), threading.Event()
    end = publisher._server.close
    monkeypatch.setattr(publisher._server, "close", lambda: (taken.wait(), end()))
    publisher.close()
    assert not taken.is_set() and publisher._thread.is_alive()
    taken.set()
    publisher._thread.join(60)
