"""Replay as a process that is killed again and again, with the real links of two generators and of the learner."""

import asyncio
import json
import multiprocessing
import threading
import time
from collections import Counter

import pytest

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.loop import Generator
from asyncrl.learner.client import ReplayClient
from asyncrl.models.describe import describe
from asyncrl.replay.server import run
from asyncrl.replay.untune import FILE, order
from asyncrl.transport.sockets import Server
from asyncrl.types import Group, Version
from tests.replay.support import response
from tests.replay.test_process import make_config

SPAWN = multiprocessing.get_context("spawn")


class Replay:
    """The process, which can be killed and started again."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.start()

    def start(self) -> None:
        self.process = SPAWN.Process(target=run, args=(self.config, self.config.run_dir), daemon=True)
        self.process.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.process.close()


class Engine:
    """Holds the version that it is told to."""

    def stats(self):
        return {"busy_s": 0.0, "tokens": 0.0}

    async def load(self, version, reader):
        self.version = version


class Sampler:
    """Answers every lease after a moment, under the version that the engine holds."""

    def __init__(self, name, info):
        self.name, self.info, self.engine, self.sampled = name, info, Engine(), []
        self.counters = Counter()

    def gauges(self):
        return {}

    async def group(self, lease):
        update = self.engine.version.update
        await asyncio.sleep(0.02)
        self.sampled.append(lease.group_id)
        responses = tuple(response(f"{lease.lease_id}.{i}", [(update, 4)], float(i)) for i in range(2))
        return Group(lease.group_id, wire.prompt_from_msg(lease.prompt), self.name, lease.attempt, 1.0, responses)

    async def evaluation(self, lease):
        await asyncio.sleep(0.02)
        answer = wire.EvalAnswer(lease.prompt.prompt_id, lease.sample, lease.greedy, 1.0, 4, "stop")
        return wire.EvalResult(lease.eval_id, tuple(self.engine.version), [answer])


class Role(threading.Thread):
    """One generator on a loop of its own."""

    def __init__(self, config, info, name, place=None):
        super().__init__(daemon=True)
        self.config, self.sampler = config, Sampler(name, info)
        self.place = place or config.run_dir / "replay.address"
        self.generator, self.error = None, None
        self.start()

    def run(self):
        asyncio.run(self.serve())

    async def serve(self):
        self.generator = Generator(self.config, self.place, self.sampler, self.sampler.name)
        (self.error,) = await asyncio.gather(self.generator.run(), return_exceptions=True)
        await self.generator.link.close()


@pytest.fixture
def parts(tmp_path):
    config = make_config(tmp_path, 40)
    info = describe(config.model.path)
    replay = Replay(config)
    fleet = [Role(config, info, name) for name in ("g0", "g1")]
    client = ReplayClient(config.run_dir / "replay.address", 0, info, 60.0)
    yield config, replay, fleet, client
    client.close()
    replay.kill()


def train(client: ReplayClient, update: int) -> list[str]:
    """One update: take, commit, publish."""
    shard = client.take(update, update, 0, 1, 120.0)
    ids = [g.group_id for g in shard.batches[0]]
    client.commit(update, update + 1, "trained", ids)
    if (update + 1) % 4 == 0:
        client.published(Version(0, update + 1), f"/w/{update + 1}")
    return ids


def test_replay_behind_a_fixed_address_is_followed_without_a_file(tmp_path):
    # Bound once to learn a free port: the restarts must get the very same one although connections to it linger.
    probe = Server("tcp://127.0.0.1:*")
    probe.close()
    fixed = {"bind": probe.address, "connect": probe.address}
    base = make_config(tmp_path, 12)
    config = base.model_copy(update={"replay": base.replay.model_copy(update=fixed)})
    info = describe(config.model.path)
    replay = Replay(config)
    elsewhere = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path / "elsewhere")})})
    fleet = [Role(elsewhere, info, name, probe.address) for name in ("g0", "g1")]
    client = ReplayClient(probe.address, 0, info, 60.0)
    client.published(Version(0, 0), "/w/0")
    trained: list[str] = []
    for update in range(12):
        if update in (3, 7):
            replay.kill()
            replay.start()
        trained += train(client, update)
    assert client.status()["restarts"] == 2
    assert len(set(trained)) == len(trained) == 12 * base.algorithm.groups_per_update
    client.done(12)
    while not client.status()["finished"]:
        time.sleep(0.05)
    for role in fleet:
        role.join(120)
        assert not role.is_alive() and role.error is None
    client.close()
    replay.kill()


def test_three_kills_with_a_backlog_lose_nothing_and_train_nothing_twice(parts):
    config, replay, fleet, client = parts
    client.published(Version(0, 0), "/w/0")
    trained: list[str] = []
    for update in range(40):
        if update in (6, 15, 16):
            deadline = time.monotonic() + 60
            # max_lag 8 and G 4: up to 36 groups may wait.
            while client.status()["queue_depth"] < 12 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert sum(len(role.generator.outbox) for role in fleet) >= 12
            replay.kill()
            replay.start()
        trained += train(client, update)
    state = client.status()
    assert (state["restarts"], state["update"]) == (3, 40)
    client.done(40)
    while not client.status()["finished"]:
        time.sleep(0.05)
    for role in fleet:
        role.join(120)
        assert not role.is_alive() and role.error is None
    assert len(trained) == len(set(trained)) == 160
    # The first two data epochs of 64 prompts are over, each prompt trained once.
    assert sum(i.startswith("0/") for i in trained) == sum(i.startswith("1/") for i in trained) == 64
    # No finished group was sampled a second time: what was acknowledged came back from its generator.
    sampled = [i for role in fleet for i in role.sampler.sampled]
    assert len(sampled) == len(set(sampled))
    lines = [json.loads(x) for x in (config.run_dir / "committed.jsonl").read_text().splitlines()]
    assert [x["group_id"] for x in lines] == trained
    assert [x["update"] for x in lines] == [u for u in range(40) for _ in range(4)]


def test_what_a_resume_named_is_that_of_the_config_again_once(tmp_path):
    config = make_config(tmp_path)
    lag = "staleness.max_lag"
    replay = Replay(config)
    client = ReplayClient(config.run_dir / "replay.address", 0, describe(config.model.path), 60.0)
    client.tune({lag: 16, "learner.lr": 0.5}, "me")
    replay.kill()
    order(config.run_dir, [lag])
    replay.start()
    assert client.tuned().values == {"learner.lr": "0.5"}
    assert not (config.run_dir / FILE).exists()
    client.tune({lag: 12}, "me")
    replay.kill()
    replay.start()
    assert client.tuned().values == {"learner.lr": "0.5", lag: "12"}, "it was an order to one start"
    client.close()
    replay.kill()


def test_a_snapshot_of_another_run_is_refused(tmp_path):
    config = make_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "replay.snapshot").write_bytes(b"\x93\x01\xa4else\x00")
    with pytest.raises(ConfigError, match=r"replay\.snapshot is of a run with another model.*run\.name"):
        run(config, config.run_dir)
    (config.run_dir / "replay.snapshot").write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"replay\.snapshot is damaged"):
        run(config, config.run_dir)
