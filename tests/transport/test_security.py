"""replay.security from the settings to a whole exchange with the replay process (B47)."""

import asyncio
import logging
import multiprocessing
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl import wire
from asyncrl.cli import app
from asyncrl.errors import ConfigError, TransportError
from asyncrl.generator.link import Link
from asyncrl.learner.client import Limit, ReplayClient
from asyncrl.models.describe import describe
from asyncrl.preflight import preflight
from asyncrl.replay.server import run
from asyncrl.transport import keys
from asyncrl.transport.address import parse
from asyncrl.transport.rendezvous import wait_for_address
from asyncrl.transport.sockets import Client
from tests.replay.test_process import make_config


def cli(*arguments):
    done = CliRunner().invoke(app, ["keys", *map(str, arguments)])
    if isinstance(done.exception, ConfigError):
        return 2, str(done.exception)
    return done.exit_code, done.output


# --- the command ------------------------------------------------------------------------------------


def test_keys_are_made_added_listed_and_revoked(tmp_path):
    folder, far = tmp_path / "keys", tmp_path / "far"
    status, text = cli("new", folder, "--client", "g0", "--client", "learner")
    assert status == 0
    assert [Path(line).relative_to(folder).as_posix() for line in text.split()] == [
        "server.pub", "server.key", "clients/g0.key", "clients/g0.pub", "allowed/g0.pub",
        "clients/learner.key", "clients/learner.pub", "allowed/learner.pub",
    ]  # fmt: skip
    assert cli("new", folder, "--client", "g0")[0] == 2
    assert cli("new", far, "--client", "g9", "--server", folder / "server.pub")[0] == 0
    assert cli("add", folder, far / "clients" / "g9.pub", "--name", "host-9") == (0, f"{folder}/allowed/host-9.pub\n")
    assert cli("revoke", folder, "g0") == (0, "")
    status, text = cli("list", folder)
    assert [line.split()[1] for line in text.splitlines()] == ["host-9", "learner"]
    assert text.split()[0] == keys.client_keys("curve", far, "g9").public.decode()
    status, text = cli("revoke", folder, "g0")
    assert status == 2 and "allowed are: host-9, learner" in text
    secrets = [f.read_text().split()[1] for f in [*folder.rglob("*.key"), *far.rglob("*.key")]]
    assert len(secrets) == 4 and not any(s in cli("list", folder)[1] for s in secrets)


# --- the settings -----------------------------------------------------------------------------------


def test_security_and_keys_belong_together(settings):
    with pytest.raises(ConfigError, match=r"replay\.security=curve needs replay\.keys; .*asyncrl keys new DIR"):
        settings(security="curve")
    with pytest.raises(ConfigError, match=r"replay\.keys='k' would not be used with replay\.security=loopback"):
        settings(keys="k")


@pytest.fixture
def settings(tmp_path):
    """Makes a config whose model folder passes preflight."""

    def make(**replay):
        home = tmp_path / f"home-{len(list(tmp_path.glob('home-*')))}"
        home.mkdir()
        config = make_config(home, **replay)
        return config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_new_tokens": 8})})

    return make


@pytest.fixture
def folder(tmp_path):
    keys.new(tmp_path / "keys", ["client", "g1"])
    return tmp_path / "keys"


def test_preflight_reads_the_keys(settings, folder):
    preflight(settings(security="curve", keys=str(folder), bind="tcp://*:*"))
    with pytest.raises(ConfigError, match=r"replay\.keys='/nowhere' is no folder"):
        preflight(settings(security="curve", keys="/nowhere"))
    (folder / "clients" / "g1.key").chmod(0o644)
    preflight(settings(security="curve", keys=str(folder)))
    with pytest.raises(ConfigError, match=r"g1\.key' can be read by other users; chmod 600"):
        preflight(settings(security="curve", keys=str(folder), client="g1"))


@pytest.mark.parametrize(("bind", "who"), [("tcp://*:*", "anyone on the network"), ("localhost", "every user of")])
def test_security_none_warns(settings, caplog, bind, who):
    preflight(settings(bind=bind, security="none"))
    (record,) = [r for r in caplog.records if "replay.security=none" in r.message]
    assert record.levelno == logging.WARNING and who in record.message and "curve" in record.message
    caplog.clear()
    preflight(settings())
    assert not caplog.records


# --- the whole exchange -----------------------------------------------------------------------------


@pytest.fixture
def role(settings, folder):
    config = settings(security="curve", keys=str(folder), bind="tcp://*:*")
    process = multiprocessing.get_context("spawn").Process(target=run, args=(config, config.run_dir), daemon=True)
    process.start()
    wait_for_address(config.run_dir / "replay.address", 60.0)
    yield config
    process.kill()
    process.join(10)
    process.close()


def hello_from(info, name):
    return wire.Hello(
        wire.SCHEMA, "generator", name, "boot", list(info.layers), info.num_experts, info.top_k, info.vocab_size,
        info.fingerprint,
    )  # fmt: skip


def knock(config, name, pair, seconds):
    """A generator's link: True when it was welcomed in time."""

    async def go():
        info = describe(config.model.path)
        link = Link(config.run_dir / "replay.address", name.encode(), lambda: hello_from(info, name), 60.0, pair)
        await link.hello()
        deadline = time.monotonic() + seconds
        try:
            while not link.welcomed and time.monotonic() < deadline:
                await link.next()
            return link.welcomed
        finally:
            link._client.leave()

    return asyncio.run(go())


def test_generators_and_the_learner_meet_replay_with_keys_only(role, folder, tmp_path):
    file = role.run_dir / "replay.address"
    assert parse(file.read_text()).host not in ("*", "::", "0.0.0.0")
    r = role.replay
    pair = keys.client_keys(r.security, r.keys, r.client)
    learner = ReplayClient(file, 0, describe(role.model.path), 60.0, pair)
    assert (learner.welcome.epoch, learner.welcome.update) == (0, 0)
    assert knock(role, "g1", keys.client_keys("curve", folder, "g1"), 60.0)
    # Plaintext, and a key that nobody allowed.
    assert not knock(role, "plain", None, 3.0)
    keys.new(tmp_path / "outside", ["evil"], folder / "server.pub")
    assert not knock(role, "evil", keys.client_keys("curve", tmp_path / "outside", "evil"), 3.0)
    state, deadline = learner.status(), time.monotonic() + 60
    while not {"refused_handshake", "refused_unknown_key"} <= set(state["counters"]) and time.monotonic() < deadline:
        state = learner.status()  # they are counted when the server's thread comes to it
    assert state["counters"]["refused_handshake"] >= 1 and state["counters"]["refused_unknown_key"] >= 1
    assert "no_hello" not in state["counters"] and "malformed" not in state["counters"]
    # Revoked while connected: nothing that it asks is answered any more.
    keys.revoke(folder, "client")
    with pytest.raises(TransportError, match="did not answer Status"):
        deadline = time.monotonic() + 120
        # Long enough to ask twice: the first may meet the change between question and answer.
        learner._answer = Limit(5.0, "the test")
        while time.monotonic() < deadline:
            learner.status()
    learner._socket.leave()
    # Replay goes on serving those who may.
    assert knock(role, "g1", keys.client_keys("curve", folder, "g1"), 60.0)
    client = Client(file.read_text().strip(), b"watch", keys.client_keys("curve", folder, "g1"))
    client.send(wire.encode(wire.Status()))
    reply = wire.decode(client.recv(60.0))
    assert isinstance(reply, wire.StatusReply) and reply.state["counters"]["refused_revoked_key"] >= 1
    client.close()
