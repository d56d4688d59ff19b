"""The carrier with real senders and real receivers over gloo: hung, killed, late and replaced ones (B33, B44)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from asyncrl.engines.gate import Gate
from asyncrl.errors import VersionGone, WeightSyncError
from asyncrl.transport import keys
from asyncrl.transport.sockets import Client
from asyncrl.types import Version
from asyncrl.weights import flat
from asyncrl.weights.collective.client import Groups as Engines
from asyncrl.weights.collective.client import Sending, Source
from asyncrl.weights.collective.publisher import Groups, Publisher
from asyncrl.weights.engine_checksums import expected
from tests.weights.collective.receiver import Receiver, end_spare

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
HUGE = 2**23
"""Elements of a float32 tensor that no socket buffer holds: who sends it waits for who takes it."""

SOON_S = 3.0
"""weights.timeout_s where a test waits for it to pass."""


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {
        "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3) + value,
        "b.weight": torch.full((5,), value, dtype=torch.bfloat16),
        "c.weight": torch.full((3, 3), value).to(torch.float8_e4m3fn),
        "c.scale": torch.tensor([value / 3]),
        "d.mask": torch.tensor([True, False, True]),
        "e.empty": torch.zeros(0, 4),
        "f.double": torch.tensor(value / 3, dtype=torch.float64),
        "g.weight": torch.full((300,), value),
    }


def huge(value: float = 1.0) -> dict[str, Tensor]:
    return {"a": torch.full((HUGE,), value), "b": torch.full((HUGE,), -value)}


def sums(tensors: dict[str, Tensor]) -> dict[str, str]:
    raw = {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}
    return {name: hashlib.sha256(data).hexdigest() for name, data in raw.items()}


def publish(publisher: Publisher, version: Version, tensors: dict[str, Tensor]) -> str:
    return publisher.publish(version, iter(tensors.items()))


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.02)


def at_rest(receiver: Receiver, rest_s: float = 1.0, timeout_s: float = 60.0) -> None:
    """Waits until the receiver's main thread wants no processor for rest_s, however busy the host is."""
    begun = since = time.monotonic()
    while time.monotonic() < since + rest_s:
        assert time.monotonic() < begun + timeout_s, "the receiver never rests"
        if any(psutil.Process(rank.process.pid).status() != psutil.STATUS_SLEEPING for rank in receiver.ranks):
            since = time.monotonic()
        time.sleep(0.02)


def begin_to_take(receiver: Receiver, sending: Sending, bucket: int) -> None:
    """Have the receiver wait in a broadcast.

    gloo forgets a receive that is posted in the very moment when it learns that the connection is closed, so nothing
    may be killed until this one is surely there.
    """
    receiver.begin("update", group=sending.group, tensors=sending.buckets[bucket])
    at_rest(receiver)


def stop(pid: int) -> None:
    """SIGSTOP, and wait for it to work."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


@pytest.fixture(scope="module", autouse=True)
def spare_receivers() -> Iterator[None]:
    yield
    end_spare()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def begin(timeout_s: float = 60.0, bucket_bytes: int = 2**29, name: str = "weights", **rest: object) -> Publisher:
        groups = Groups(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        made.append(Publisher(tmp_path / name, groups=groups, **rest))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for publisher in made:
        publisher.close()
        # On a busy host killed senders take longer to end than a learner waits for.
        publisher._thread.join(60)
        for sender in (*publisher._senders.values(), *publisher._ended):
            sender.reap(60)


def test_every_version_reaches_every_rank_bit_for_bit_over_one_group(make):
    publisher, engines = make(), Engines()
    with Receiver(2) as receiver:
        sending = Source(engines, publish(publisher, V0, weights()), V0).broadcast("g0", 2)
        assert sending.is_new and sending.backend == "gloo" and sending.address[0] == "127.0.0.1"
        assert sending.group.startswith("asyncrl-g0-1-")
        assert receiver.load(sending) == sums(weights())
        (pid,) = publisher.pids.values()
        for version, value in ((V1, 2.0), (V2, 3.0)):
            again = Source(engines, publish(publisher, version, weights(value)), version).broadcast("g0", 2)
            assert (again.group, again.is_new) == (sending.group, False)
            assert receiver.load(again) == sums(weights(value))
        assert publisher.pids == {"g0": pid}
    wait_until(lambda: publisher.counters["sent"] == 3, "three versions sent")
    assert publisher.counters["failed"] == publisher.counters["killed"] == 0


@pytest.mark.parametrize("bucket_bytes, num_buckets", [(2**29, 1), (1200, 2), (1, 7)])
def test_the_setting_makes_one_bucket_or_many(make, bucket_bytes, num_buckets):
    publisher = make(bucket_bytes=bucket_bytes)
    with Receiver() as receiver:
        sending = Source(Engines(), publish(publisher, V0, weights()), V0).broadcast("g0", 1)
        assert len(sending.buckets) == num_buckets
        assert receiver.load(sending) == sums(weights())


def test_an_engine_that_never_joins_holds_up_neither_the_learner_nor_others(make):
    publisher, engines = make(timeout_s=SOON_S), Engines()
    source = publish(publisher, V0, weights())
    with Receiver() as receiver:
        hung = Source(engines, source, V0).broadcast("hung", 1)
        assert receiver.load(Source(engines, source, V0).broadcast("g0", 1)) == sums(weights())
        source = publish(publisher, V1, weights(2.0))
        assert receiver.load(Source(engines, source, V1).broadcast("g0", 1)) == sums(weights(2.0))
        wait_until(lambda: "hung" not in publisher.pids, "the sender of the hung engine is ended")
        assert publisher.counters["failed"] == publisher.counters["killed"] == 1
        assert "g0" in publisher.pids
        # It may come back at any time, to a new group.
        late = Source(engines, source, V1).broadcast("hung", 1)
        assert late.is_new and late.group != hung.group
        with Receiver() as other:
            assert other.load(late) == sums(weights(2.0))


def test_a_bucket_that_is_not_taken_ends_the_sending_and_frees_the_engine(make):
    publisher, engines = make(timeout_s=SOON_S, bucket_bytes=1), Engines()
    source = publish(publisher, V0, huge())
    with Receiver() as receiver:
        sending = Source(engines, source, V0).broadcast("g0", 1)
        assert receiver.join(sending) == [{}]
        assert "sums" in receiver.take(sending, sending.buckets[0])[0]
        pid = publisher.pids["g0"]
        wait_until(lambda: is_gone(pid), "the sender is gone")
        time.sleep(1)  # gloo may not have heard of it, see begin_to_take
        (answer,) = receiver.take(sending, sending.buckets[1])
        assert "error" in answer
        again = Source(engines, source, V0).broadcast("g0", 1)
        assert again.is_new and again.group != sending.group
        assert receiver.load(again) == sums(huge())


def test_a_killed_engine_joins_again_under_another_name(make):
    publisher, engines = make(), Engines()
    source = publish(publisher, V0, weights())
    with Receiver() as receiver:
        first = Source(engines, source, V0).broadcast("g0", 1)
        receiver.load(first)
        receiver.kill()
    with Receiver() as receiver:
        # The generator sees its engine fail, and leaves.
        s = Source(engines, publish(publisher, V1, weights(2.0)), V1)
        assert not s.broadcast("g0", 1).is_new
        s.leave("g0")
        second = s.broadcast("g0", 1)
        assert second.is_new and second.group != first.group
        assert receiver.load(second) == sums(weights(2.0))


def test_a_generator_that_is_started_again_gets_a_new_group(make):
    publisher = make()
    source = publish(publisher, V0, weights())
    with Receiver() as receiver:
        old, new = Engines(), Engines()
        first = Source(old, source, V0).broadcast("g0", 1)
        receiver.load(first)
        pid = publisher.pids["g0"]
        second = Source(new, source, V0).broadcast("g0", 1)
        assert second.is_new and second.group != first.group
        assert receiver.load(second) == sums(weights())
        wait_until(lambda: is_gone(pid), "the old sender is gone")
        # What the old one says about its group is not about the new one.
        Source(old, source, V0).leave("g0")
        assert "g0" in publisher.pids


def test_an_engine_with_other_ranks_gets_a_new_group(make):
    publisher, engines = make(), Engines()
    source = publish(publisher, V0, weights())
    with Receiver(1) as one, Receiver(2) as two:
        assert one.load(Source(engines, source, V0).broadcast("g0", 1)) == sums(weights())
        sending = Source(engines, source, V0).broadcast("g0", 2)
        assert sending.is_new
        assert two.load(sending) == sums(weights())


def test_a_newer_request_of_an_engine_ends_an_older_one(make):
    publisher, engines = make(), Engines()
    source = publish(publisher, V0, weights())
    with ThreadPoolExecutor(1) as pool:
        older = pool.submit(Source(engines, source, V0).broadcast, "g0", 1)
        wait_until(lambda: "g0" in publisher.pids, "the first sender is started")
        newer = Source(engines, source, V0).broadcast("g0", 1)
        with pytest.raises(WeightSyncError, match="a newer request of the same engine came"):
            older.result(60)
    with Receiver() as receiver:
        assert receiver.load(newer) == sums(weights())


def test_leaving_frees_an_engine_in_the_middle(make):
    publisher, engines = make(bucket_bytes=1), Engines()
    s = Source(engines, publish(publisher, V0, weights()), V0)
    with Receiver(2) as receiver:
        sending = s.broadcast("g0", 2)
        receiver.load(sending)
        # One broadcast more than the sender has.
        begin_to_take(receiver, sending, 0)
        pid = publisher.pids["g0"]
        s.leave("g0")
        assert all("error" in answer for answer in receiver.end())
        wait_until(lambda: is_gone(pid), "the sender is gone")
        s.leave("g0")
        s.leave("unknown")
        assert publisher.counters["killed"] == 1


def test_a_stopped_sender_is_killed_and_the_engine_is_freed(make):
    publisher, engines = make(timeout_s=SOON_S, bucket_bytes=1), Engines()
    source = publish(publisher, V0, huge())
    with Receiver() as receiver:
        sending = Source(engines, source, V0).broadcast("g0", 1)
        receiver.join(sending)
        receiver.take(sending, sending.buckets[0])
        stop(publisher.pids["g0"])
        (answer,) = receiver.take(sending, sending.buckets[1])
        assert "error" in answer
        assert receiver.load(Source(engines, source, V0).broadcast("g0", 1)) == sums(huge())
    assert publisher.counters["killed"] == 1


def test_a_stopped_sender_holds_up_no_other_one(make):
    publisher, engines = make(), Engines()
    source = publish(publisher, V0, weights())
    with Receiver() as receiver, Receiver() as other:
        receiver.load(Source(engines, source, V0).broadcast("g0", 1))
        stopped = publisher.pids["g0"]
        stop(stopped)
        with ThreadPoolExecutor(1) as pool:
            s = Source(engines, source, V0)
            s._engine = "g0"
            # More than a pipe holds.
            waiting = pool.submit(s.checksums, [f"{i:0100}" for i in range(2000)], 1)
            try:
                assert other.load(Source(engines, source, V0).broadcast("g1", 1)) == sums(weights())
                assert not waiting.done()
            finally:
                os.kill(stopped, signal.SIGCONT)
            assert waiting.result(60) == {}


def test_a_sender_that_dies_is_noticed_and_replaced(make):
    publisher, engines = make(bucket_bytes=1), Engines()
    source = publish(publisher, V0, huge())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Source(engines, source, V0).broadcast, "g0", 1)
        wait_until(lambda: "g0" in publisher.pids, "a sender is started")
        os.kill(publisher.pids["g0"], signal.SIGKILL)
        with pytest.raises(WeightSyncError, match="ended with status -9"):
            waiting.result(60)
    with Receiver() as receiver:
        sending = Source(engines, source, V0).broadcast("g0", 1)
        receiver.join(sending)
        receiver.take(sending, sending.buckets[0])
        stop(publisher.pids["g0"])
        begin_to_take(receiver, sending, 1)
        os.kill(publisher.pids["g0"], signal.SIGKILL)
        assert "error" in receiver.end()[0]
        wait_until(lambda: not publisher.pids, "its end is noticed")
        assert receiver.load(Source(engines, source, V0).broadcast("g0", 1)) == sums(huge())
    assert publisher.counters["failed"] == 2


LEARNER = """
import sys, time
import torch
from asyncrl.types import Version
from asyncrl.weights.collective.publisher import Groups, Publisher

publisher = Publisher(sys.argv[1], groups=Groups(bucket_bytes=1))
value = torch.ones(2**23)
print(publisher.publish(Version(0, 0), iter({"a": value, "b": value}.items())), flush=True)
while True:
    sys.stdin.readline()
    print(*publisher.pids.values(), flush=True)
"""


def test_a_killed_learner_frees_its_engines_and_leaves_no_process(tmp_path, make):
    learner = subprocess.Popen(
        [sys.executable, "-c", LEARNER, tmp_path / "weights"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert learner.stdin is not None and learner.stdout is not None
    engines = Engines()
    with learner, Receiver() as receiver:
        try:
            source = learner.stdout.readline().strip()
            sending = Source(engines, source, V0).broadcast("g0", 1)
            receiver.join(sending)
            receiver.take(sending, sending.buckets[0])
            Source(engines, source, V0).broadcast("g1", 1)
            print(file=learner.stdin, flush=True)
            pids = [int(pid) for pid in learner.stdout.readline().split()]
            assert len(pids) == 2
            stop(pids[0])
            begin_to_take(receiver, sending, 1)
        finally:
            learner.kill()
        assert "error" in receiver.end()[0]
        wait_until(lambda: all(map(is_gone, pids)), "the senders are gone")
        with pytest.raises(VersionGone, match="said nothing for"):
            Source(engines, source, V0).broadcast("g0", 1)
        # The next learner of the run knows nothing of the old groups.
        source = publish(make(), V1, weights())
        again = Source(engines, source, V1).broadcast("g0", 1)
        assert again.is_new and again.group != sending.group
        assert receiver.load(again) == sums(weights())


def test_a_publisher_that_is_closed_frees_its_engines(make):
    publisher = make()
    s = Source(Engines(), publish(publisher, V0, weights()), V0)
    with Receiver() as receiver:
        sending = s.broadcast("g0", 1)
        receiver.load(sending)
        begin_to_take(receiver, sending, 0)
        (pid,) = publisher.pids.values()
        publisher.close()
        publisher.close()
        assert "error" in receiver.end()[0]
        wait_until(lambda: is_gone(pid), "the sender is gone")
    with pytest.raises(WeightSyncError, match="has ended"):
        publish(publisher, V1, weights())


def test_a_version_that_was_dropped_is_gone_and_the_group_stays(make):
    publisher, engines = make(keep=1), Engines()
    source = publish(publisher, V0, weights())
    with Receiver() as receiver:
        first = Source(engines, source, V0).broadcast("g0", 1)
        receiver.load(first)
        publish(publisher, V1, weights(2.0))
        with pytest.raises(VersionGone, match=r"has no version 0\.0; it has 0\.1"):
            Source(engines, source, V0).broadcast("g0", 1)
        sending = Source(engines, source, V1).broadcast("g0", 1)
        assert receiver.load(sending) == sums(weights(2.0))


def test_a_version_that_is_dropped_before_it_is_read_is_gone(make):
    publisher = make()
    source = publish(publisher, V0, weights())
    for file in publisher._shm.directory.glob("*.weights"):
        file.unlink()
    with pytest.raises(VersionGone, match=r"has no version 0\.0"):
        Source(Engines(), source, V0).broadcast("g0", 1)


def test_damaged_memory_is_not_sent(make):
    publisher = make()
    source = publish(publisher, V0, weights())
    (file,) = publisher._shm.directory.glob("*.weights")
    with open(file, "r+b") as damaged:
        damaged.write(b"\xff")
    with pytest.raises(WeightSyncError, match="checksum"):
        Source(Engines(), source, V0).broadcast("g0", 1)


def test_checksums_are_those_of_the_version_that_was_sent(make):
    publisher, engines = make(), Engines()
    named = {"model.norm.weight": torch.ones(8), "model.embed_tokens.weight": torch.arange(64.0).view(8, 8)}
    s = Source(engines, publish(publisher, V0, named), V0)
    with pytest.raises(WeightSyncError, match="ask for its broadcast first"):
        s.checksums(["model.norm.weight"], 1)
    with Receiver() as receiver:
        receiver.load(s.broadcast("g0", 1))
        found = s.checksums([*named, "unknown.weight"], 1)
        assert found == expected(named, list(named), 1) and set(found) == set(named)
        publish(publisher, V1, {**named, "model.norm.weight": torch.zeros(8)})
        assert s.checksums(["model.norm.weight"], 1) == expected(named, ["model.norm.weight"], 1)
        other = Source(engines, publisher.source, V1)
        other._engine = "g0"
        with pytest.raises(WeightSyncError, match=r"version 0\.0 was sent to this engine, not 0\.1"):
            other.checksums(["model.norm.weight"], 1)


def test_a_source_says_whether_its_version_is_there_without_a_sender(make):
    publisher, engines = make(keep=2), Engines()
    first = Source(engines, publish(publisher, V0, weights()), V0)
    assert first.checksums((), 1) == {}
    publish(publisher, V1, weights())
    publish(publisher, V2, weights())
    with pytest.raises(VersionGone, match=r"has no .*0\.0"):
        first.checksums((), 1)
    assert publisher.pids == {}


def test_a_sender_whose_first_version_was_gone_serves_the_next_try(make):
    """A process takes seconds to start: with versions that live shorter every try would come too late."""
    publisher, engines = make(keep=2), Engines()
    first = Source(engines, publish(publisher, V0, weights()), V0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.broadcast, "g0", 1)
        wait_until(lambda: "g0" in publisher.pids, "a sender")
        pid = publisher.pids["g0"]
        for version in (V1, V2):
            publish(publisher, version, weights(2.0))
        with pytest.raises(VersionGone):
            waiting.result(60)
    first.leave("g0")
    assert publisher.pids == {"g0": pid}
    with Receiver() as receiver:
        receiver.load(Source(engines, publisher.source, V2).broadcast("g0", 1))
        assert publisher.pids == {"g0": pid}


@pytest.mark.parametrize("mode", ["abort", "drain"])
def test_behind_a_gate_a_version_is_asked_for_before_anything_is_stopped(make, mode):
    """Gate with the real source: a version that is there is loaded, one that is gone stops nothing."""
    publisher, engines = make(keep=2), Engines()
    loaded = []

    class Silent:
        version = V0

        def stats(self):
            return {}

        async def load(self, version, source):
            loaded.append((version, source.kind))

    async def run():
        gate = Gate(Silent(), mode)
        source = publish(publisher, V0, weights())
        await gate.load(V0, Source(engines, source, V0), 30)
        publish(publisher, V1, weights())
        publish(publisher, V2, weights())
        with pytest.raises(VersionGone):
            await gate.load(V0, Source(engines, source, V0), 30)
        assert gate.is_open

    asyncio.run(run())
    assert loaded == [(V0, "broadcast")]


def test_an_engine_needs_a_name_that_can_travel(make):
    source = Source(Engines(), publish(make(), V0, weights()), V0)
    with pytest.raises(WeightSyncError, match="cannot name an engine"):
        source.broadcast("rack1:g 0", 1)


def test_everything_listens_on_the_loopback_only(make):
    publisher = make()
    with Receiver() as receiver:
        receiver.load(Source(Engines(), publish(publisher, V0, weights()), V0).broadcast("g0", 1))
        listening = {
            c.laddr.ip
            for pid in (os.getpid(), *publisher.pids.values())
            for c in psutil.Process(pid).net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_an_idle_sender_lets_go_of_the_version_and_later_ends(make):
    publisher, engines = make(hold_s=0.2), Engines()
    s = Source(engines, publish(publisher, V0, weights()), V0)

    def maps() -> str:
        return Path(f"/proc/{publisher.pids['g0']}/maps").read_text()

    with Receiver() as receiver:
        sending = s.broadcast("g0", 1)
        assert ".weights" in maps()
        receiver.load(sending)
        wait_until(lambda: ".weights" not in maps(), "the version is let go")
        assert s.checksums(["a.weight"], 1) is not None
        again = Source(engines, s._source, V0).broadcast("g0", 1)
        assert not again.is_new and receiver.load(again) == sums(weights())
        publisher._idle_s = 0.2
        wait_until(lambda: not publisher.pids, "the sender is ended")


def test_who_has_no_key_gets_nothing(tmp_path, make):
    keys.new(tmp_path / "keys", ["client"])
    pair = keys.client_keys("curve", str(tmp_path / "keys"), "client")
    publisher = make(security="curve", keys=tmp_path / "keys")
    source = publish(publisher, V0, weights())
    with Receiver() as receiver:
        assert receiver.load(Source(Engines(pair), source, V0).broadcast("g0", 1)) == sums(weights())
    with pytest.raises(VersionGone, match="said nothing"):
        Source(Engines(), source, V0).broadcast("g1", 1)
    assert set(publisher.pids) <= {"g0"}


def test_what_is_no_request_is_counted(make):
    publisher = make()
    with contextlib.closing(Client(publisher.source.removeprefix("collective://"), b"x")) as client:
        client.send([b"what?"])
        wait_until(lambda: publisher.counters["refused"] == 1, "it is counted")
    assert not publisher.pids


def test_what_cannot_be_published_is_not_visible(make):
    publisher = make()
    with pytest.raises(WeightSyncError, match="non-finite"):
        publish(publisher, V0, {"a": torch.tensor([float("nan")])})
    with pytest.raises(VersionGone, match="it has none yet"):
        Source(Engines(), publisher.source, V0).broadcast("g0", 1)


def test_ways_that_the_carrier_does_not_have_say_so(make):
    publisher = make()
    s = Source(Engines(), publish(publisher, V0, weights()), V0)
    with pytest.raises(WeightSyncError, match="another carrier"):
        s.tensors()
    with pytest.raises(WeightSyncError, match=r"weights\.carrier=disk"):
        s.folder()
    with pytest.raises(WeightSyncError, match="not a source of the collective carrier"):
        Source(Engines(), "zmq://127.0.0.1:1", V0)
    assert "float8_e4m3fn" in flat.DTYPES
