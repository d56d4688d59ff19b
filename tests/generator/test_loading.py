"""Three generators load new weights; the second one cannot (B33): the others go on, its label stays."""

import asyncio
import contextlib
import queue
import threading
from types import SimpleNamespace

import pytest
import torch

from asyncrl import wire
from asyncrl.config import validate
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.generator import beats, loop
from asyncrl.generator.loop import Generator
from asyncrl.transport.rendezvous import publish_address
from asyncrl.transport.sockets import Server
from asyncrl.types import ModelInfo, Version
from asyncrl.weights.shm import Publisher

INFO = ModelInfo((0, 1), 8, 2, 32, "f00d")
CONFIG = validate({"model": {"path": "x"}})
V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)
NAMES = ("g0", "g1", "g2")


class Engine:
    """Reads what it is told to load; `fault` is what happens instead, from version 2 on."""

    def __init__(self):
        self.version, self.fault, self.tries = Version(0, -1), "", 0

    async def load(self, version, source):
        self.tries += 1
        weights = await asyncio.to_thread(source.tensors)
        if self.fault == "fails" and version >= V2:
            raise WeightSyncError("tensor a is not finite")
        if self.fault == "hangs" and version >= V2:
            await asyncio.Event().wait()
        if self.fault == "dies" and version >= V2:
            raise EngineError("the thread torch-engine died")
        assert float(weights["a"]) == version.update
        self.version = version

    def stats(self):
        return {"tokens": 0.0, "busy_s": 0.0}


class Replay(threading.Thread):
    """Tells everybody the newest version and keeps what it heard, by generator."""

    def __init__(self, file):
        super().__init__(daemon=True)
        self.server, self.over, self.newest, self.peers = Server("tcp://127.0.0.1:*"), False, None, {}
        self.beats, self.wanted = {}, {}
        # A socket belongs to one thread: what a test says goes out from here.
        self.outgoing = queue.SimpleQueue()
        publish_address(file, self.server.address)
        self.start()

    def run(self):
        told = None
        while not self.over:
            for peer, frames in self.server.poll(0.02):
                self.answer(peer, wire.decode(frames))
            while not self.outgoing.empty():
                name, message = self.outgoing.get()
                for peer in [p for p, known in self.peers.items() if known == name]:
                    self.server.send(peer, wire.encode(message))
            if self.newest is not None and self.newest != told:
                told = self.newest
                for peer in self.peers:
                    self.server.send(peer, wire.encode(wire.NewVersion(*told[0], told[1])))
        self.server.close()

    def answer(self, peer, message):
        match message:
            case wire.Hello(peer_id=name):
                self.peers[peer] = name
                newest = None if self.newest is None else (*self.newest[0], self.newest[1])
                self.server.send(peer, wire.encode(wire.Welcome(0, 0, newest, "b")))
            case wire.Heartbeat(held=held, gauges=gauges):
                self.beats[self.peers[peer]] = (Version(*held), gauges)
            case wire.LeaseRequest(held=held):
                self.wanted.setdefault(self.peers[peer], []).append(Version(*held))
                self.server.send(peer, wire.encode(wire.Leases([], "ahead_full")))

    def say(self, name, message):
        """Send a message to the generator of that name."""
        self.outgoing.put((name, message))

    def end(self):
        self.over = True
        self.join(10)


@pytest.fixture
def replay(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "LOAD_RETRY_S", 0.2)
    monkeypatch.setattr(loop, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(beats, "HEARTBEAT_S", 0.1)
    made = Replay(tmp_path / "replay.address")
    yield made
    made.end()


@pytest.fixture
def publisher(tmp_path):
    made = Publisher(tmp_path / "weights")
    yield made
    made.close()


async def until(condition, timeout_s=60.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def fleet(tmp_path):
    """Running generators and the tasks that run them, by name."""
    made = {
        n: Generator(CONFIG, tmp_path / "replay.address", SimpleNamespace(engine=Engine(), info=INFO, gauges=dict), n)
        for n in NAMES
    }
    tasks = {n: asyncio.create_task(g.run()) for n, g in made.items()}
    try:
        yield made, tasks
    finally:
        for generator in made.values():
            generator.over = True
            generator.stopped.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for generator in made.values():
            await generator.link.close()


def publish(replay, publisher, version):
    replay.newest = (version, publisher.publish(version, [("a", torch.tensor(float(version.update)))]))


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_two_go_on_when_the_third_cannot_load(replay, publisher, tmp_path, fault):
    async def scenario():
        async with fleet(tmp_path) as (made, tasks):
            await until(lambda: len(replay.peers) == 3)
            publish(replay, publisher, V1)
            await until(lambda: all(g.held == V1 for g in made.values()))
            if fault == "hangs":
                made["g1"].load_limit_s = 0.5
            made["g1"].engine.fault = fault
            publish(replay, publisher, V2)
            await until(lambda: made["g0"].held == made["g2"].held == V2)
            await until(lambda: replay.beats.get("g1", (V1, {}))[1].get("load_failures", 0) >= 1)
            # It still asks for work as what it is.
            assert replay.beats["g1"][0] == V1 == made["g1"].held == made["g1"].engine.version
            await until(tasks["g1"].done)
            with pytest.raises(WeightSyncError, match="not finite" if fault == "fails" else "took more than 0.5 s"):
                tasks["g1"].result()
            assert made["g1"].counters["load_failures"] == 3 == made["g1"].engine.tries - 1
            assert set(replay.wanted["g1"]) == {V1}
            publish(replay, publisher, V3)
            await until(lambda: made["g0"].held == made["g2"].held == V3)
            assert not tasks["g0"].done() and not tasks["g2"].done()
            assert all(made[n].counters["load_failures"] == 0 for n in ("g0", "g2"))

    asyncio.run(scenario())


def test_a_version_that_nobody_offers_is_waited_for(replay, publisher, tmp_path):
    """The learner was killed, and its files are gone: whoever comes meanwhile waits for the next one."""

    async def scenario():
        async with fleet(tmp_path) as (made, tasks):
            publish(replay, publisher, V1)
            (publisher.directory / f"{V1}.weights").unlink()
            await until(lambda: all(g.counters["load_failures"] > loop.MAX_LOAD_FAILURES for g in made.values()))
            assert not any(task.done() for task in tasks.values())
            assert all(g.held is None for g in made.values())
            publish(replay, publisher, V2)
            await until(lambda: all(g.held == V2 for g in made.values()))

    asyncio.run(scenario())


def test_an_engine_that_dies_in_a_load_ends_its_generator_only(replay, publisher, tmp_path):
    async def scenario():
        async with fleet(tmp_path) as (made, tasks):
            await until(lambda: len(replay.peers) == 3)
            publish(replay, publisher, V1)
            await until(lambda: all(g.held == V1 for g in made.values()))
            made["g1"].engine.fault = "dies"
            publish(replay, publisher, V2)
            await until(lambda: made["g0"].held == made["g2"].held == V2)
            await until(tasks["g1"].done)
            with pytest.raises(EngineError, match="torch-engine died"):
                tasks["g1"].result()
            assert made["g1"].held == V1

    asyncio.run(scenario())


def test_two_failures_are_forgotten_after_a_load_that_works(replay, publisher, tmp_path):
    async def scenario():
        async with fleet(tmp_path) as (made, tasks):
            await until(lambda: len(replay.peers) == 3)
            publish(replay, publisher, V1)
            await until(lambda: all(g.held == V1 for g in made.values()))
            for version in (V2, V3):
                made["g1"].engine.fault = "fails"
                publish(replay, publisher, version)
                await until(lambda: made["g1"].load_failures == 2)
                made["g1"].engine.fault = ""
                await until(lambda version=version: made["g1"].held == version)
            assert made["g1"].counters["load_failures"] == 4
            assert not tasks["g1"].done()

    asyncio.run(scenario())


def test_a_generator_that_comes_late_has_the_newest_version_before_its_first_lease(replay, publisher, tmp_path):
    for version in (V1, V2, V3):
        publish(replay, publisher, version)

    async def scenario():
        async with fleet(tmp_path) as (made, _):
            await until(lambda: all(g.held == V3 for g in made.values()))
            await until(lambda: len(replay.wanted) == 3)

    asyncio.run(scenario())
    assert {v for wanted in replay.wanted.values() for v in wanted} == {V3}


def test_a_resync_loads_the_held_version_again_whole_and_is_counted(replay, publisher, tmp_path):
    async def scenario():
        async with fleet(tmp_path) as (made, _):
            await until(lambda: len(replay.peers) == 3)
            publish(replay, publisher, V1)
            await until(lambda: all(g.held == V1 for g in made.values()))
            resync = wire.Resync(*V1, replay.newest[1])
            made["g1"].reader._base = "of a version in doubt"
            replay.say("g1", resync)
            await until(lambda: replay.beats.get("g1", (V1, {}))[1].get("resyncs") == 1.0)
            assert [made[n].engine.tries for n in NAMES] == [1, 2, 1]
            assert made["g1"].reader._base is None
            # One that fails is tried again as what it is; the next version after it is an ordinary load.
            made["g1"].engine.fault = "fails"
            publish(replay, publisher, V2)
            await until(lambda: made["g1"].load_failures == 1)
            replay.say("g1", wire.Resync(*V2, replay.newest[1]))
            await until(lambda: made["g1"].whole)
            made["g1"].engine.fault = ""
            await until(lambda: replay.beats["g1"][1]["resyncs"] == 2.0)
            publish(replay, publisher, V3)
            await until(lambda: all(g.held == V3 for g in made.values()))
            assert [made[n].counters["resyncs"] for n in NAMES] == [0, 2, 0]

    asyncio.run(scenario())
