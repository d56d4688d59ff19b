"""`asyncrl status` against a real replay, over real sockets: one look, JSON, keys, and a replay that is killed."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl import wire
from asyncrl.config import save_config, validate
from asyncrl.errors import ConfigError, NoAnswer
from asyncrl.models.describe import describe
from asyncrl.replay.server import run as serve
from asyncrl.resume import own
from asyncrl.transport import keys
from asyncrl.transport.rendezvous import wait_for_address
from asyncrl.transport.sockets import Client
from asyncrl.watch.client import find
from asyncrl.watch.show import show, watch
from tests.replay.test_process import make_config

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


class Replay:
    """A replay process of a run folder, and peers that speak to it."""

    def __init__(self, config):
        self.config, self.clients = config, []
        config.run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, config.run_dir / "config.yaml")
        self.start()

    def start(self):
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(self.config, self.config.run_dir), daemon=True)
        self.process.start()
        r = self.config.replay
        self.keys = keys.client_keys(r.security, r.keys, r.client)

    @property
    def address(self):
        return wait_for_address(self.config.run_dir / "replay.address", 180.0)

    def kill(self):
        """As a crash would: its address stays behind."""
        self.process.kill()
        self.process.join(10)

    def join(self, role, name):
        client = Client(self.address, name.encode(), self.keys)
        self.clients.append(client)
        i = describe(self.config.model.path)
        hello = (list(i.layers), i.num_experts, i.top_k, i.vocab_size, i.fingerprint)
        ask(client, wire.Hello(wire.SCHEMA, role, name, "b", *hello), wire.Welcome)
        return client

    def end(self):
        for client in self.clients:
            client.leave()
        self.kill()
        self.process.close()


def ask(client, message, answer):
    """Send once; the answer of that kind, within 20 s."""
    client.send(wire.encode(message))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        frames = client.recv(0.5)
        reply = wire.decode(frames) if frames is not None else None
        if isinstance(reply, answer):
            return reply
    raise AssertionError(f"no {answer.__name__} came")


@pytest.fixture
def make_replay(tmp_path):
    started = []

    def make(evaluates=True, **settings):
        # Peers say nothing while a slow host starts a command.
        config = make_config(tmp_path, **({"heartbeat_timeout_s": 290} | settings))
        if not evaluates:
            config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 0})})
        started.append(Replay(config))
        assert started[-1].address
        return started[-1]

    yield make
    for replay in started:
        replay.end()


def command(*arguments):
    return [sys.executable, "-m", "asyncrl", "status", *map(str, arguments)]


def status(*arguments):
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=90, check=False,
        env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip


def look(target, as_json=True):
    out = io.StringIO()
    assert show(target, as_json, 20.0, Console(file=out, width=100)) == 0
    return json.loads(out.getvalue()) if as_json else out.getvalue()


def tell(replay, learner, update, **values):
    alarm = wire.AlarmMsg("f_2", 3, "F(2) is 0.2", "lower learner.lr")
    named = {k.replace("__", "/"): v for k, v in values.items()}
    ask(learner, wire.Report(update, named, [alarm], seq=update + 1), wire.Ack)


def test_a_look_shows_what_the_roles_said(make_replay):
    replay = make_replay()
    target = find(str(replay.config.run_dir))
    assert look(target)["derived"]["phase"] == "waiting for the learner"
    learner = replay.join("learner", "learner-0")
    assert look(target)["derived"]["phase"] == "starting: no version is published yet"
    ask(learner, wire.Published(0, 0, "/w/0.0", seq=1), wire.Ack)
    assert look(target)["derived"]["phase"] == "waiting for the first generator"
    generator = replay.join("generator", "g0")
    generator.send(wire.encode(wire.Heartbeat((0, 0), {"tokens": 10.0, "time": 1.0, "in_flight": 4.0})))
    # The evaluation of version 0 takes 16 of them.
    ask(generator, wire.LeaseRequest((0, 0), 18), wire.Leases)
    tell(replay, learner, 0, policy__reward=0.25, mismatch__f_2=float("nan"), generator__g0__tokens_per_s=7.0)
    found = look(target)
    assert found["run"] == str(replay.config.run_dir) and found["address"] == replay.address
    state, derived = found["state"], found["derived"]
    assert (state["run"], state["newest"], state["leased"], state["restarts"]) == ("r", [0, 0], 2, 0)
    assert (state["total_updates"], state["max_lag"], state["learner"]["ranks"]) == (120, 8, 1)
    assert state["report"]["values"]["policy/reward"] == 0.25 and "busy" not in state["generators"]["g0"]
    assert derived["phase"] == "running" and derived["learning"]["reward"] == 0.25
    assert derived["learning"]["f_2"] is None, "JSON knows no NaN"
    assert derived["alarms"] == [{"name": "f_2", "since": 3, "text": "F(2) is 0.2", "remedy": "lower learner.lr"}]
    g0 = derived["generators"]["g0"]
    assert (g0["version"], g0["behind"], g0["in_flight"], g0["tokens_per_s"]) == ([0, 0], 0, 4.0, 7.0)
    text = " ".join(look(target, as_json=False).split())
    assert "reward 0.25" in text and "alarm f_2: F(2) is 0.2 (since update 3) to do: lower learner.lr" in text
    # And the command as a user gives it.
    done = status(replay.config.run_dir)
    assert done.returncode == 0 and done.stderr == "" and "generators 1 of 1 alive, 7 tok/s" in done.stdout, done


def test_only_a_key_that_is_allowed_sees_the_run(make_replay, tmp_path):
    folder, stranger = tmp_path / "keys", tmp_path / "stranger"
    keys.new(folder, ["client", "watcher", "former"])
    keys.revoke(folder, "former")
    keys.new(stranger, ["client"], folder / "server.pub")
    replay = make_replay(security="curve", keys=str(folder))
    replay.join("learner", "learner-0")
    address = replay.address
    for target in (find(str(replay.config.run_dir)), find(address, folder, "watcher")):
        assert look(target)["state"]["learner"]["ranks"] == 1
    for target in (find(address, folder, "former"), find(address, stranger)):
        with pytest.raises(NoAnswer, match="is not on its allow-list"):
            show(target, False, 1.0)
    with pytest.raises(NoAnswer, match="it wants keys: --keys DIR"):
        show(find(address), False, 1.0)
    with pytest.raises(ConfigError, match="no key pair of client 'nobody'"):
        find(address, folder, "nobody")
    # And the command as a user gives it, who is told why at once.
    done = status(address, "--keys", folder, "--client", "former", "--timeout", "1")
    assert done.returncode == 1 and "the key of this client is not allowed there" in done.stderr, done
    assert "perhaps this key ('former') is not on its allow-list" in done.stderr and done.stdout == "", done


class Watching:
    """`asyncrl status --watch` as a process; its output as it comes."""

    def __init__(self, *arguments, stdout=subprocess.PIPE):
        self.process = subprocess.Popen(command(*arguments, "--watch"), cwd=ROOT, stdout=stdout, text=True)

    def next(self, condition):
        """The first JSON line from here on for which condition is true; the test's timeout ends the wait."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if condition(found := json.loads(line)):
                return found
        raise AssertionError(f"ended with {self.process.wait()}")

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def test_watching_outlives_a_replay_that_is_killed_and_started_again(make_replay):
    replay = make_replay()
    folder = replay.config.run_dir
    # As `asyncrl run` does, which starts it again.
    with own(folder), Watching(folder, "--json", "--interval", "0.3") as watching:
        learner = replay.join("learner", "learner-0")
        ask(learner, wire.Published(0, 0, "/w/0.0", seq=1), wire.Ack)
        assert watching.next(lambda x: x["state"]["newest"] == [0, 0])["state"]["restarts"] == 0
        replay.kill()
        assert "replay is silent for" in watching.next(lambda x: "silent" in x)["silent"]
        replay.start()
        back = watching.next(lambda x: "state" in x)
        assert (back["state"]["restarts"], back["state"]["newest"]) == (1, [0, 0])
        assert watching.interrupt() == 0


def test_on_a_terminal_the_screen_is_drawn_in_place_until_the_run_is_over(make_replay):
    replay = make_replay()
    ours, theirs = pty.openpty()
    with Watching(replay.config.run_dir, "--interval", "0.2", stdout=theirs) as watching:
        os.close(theirs)
        seen = ""
        while seen.count("waiting for the learner") < 3:
            seen += os.read(ours, 4096).decode(errors="replace")
        assert "\x1b[1A" in seen, "the cursor goes up before the next look"
        replay.process.terminate()
        with contextlib.suppress(OSError):  # EIO: it ended
            while chunk := os.read(ours, 4096).decode(errors="replace"):
                seen += chunk
        assert watching.process.wait(20) == 1
    os.close(ours)
    shown, last = seen.rpartition("\x1b[?25h")[::2]
    assert "waiting for the learner" in shown and "Traceback" not in seen
    assert "is not running: 0 of 120 updates were made" in last, "after the cursor was given back"


def test_watching_by_address_ends_when_a_replay_falls_silent_that_called_the_run_finished(make_replay):
    replay = make_replay(evaluates=False)
    learner, out = replay.join("learner", "learner-0"), io.StringIO()
    ask(learner, wire.Published(0, 120, "/w/0.120", seq=1), wire.Ack)
    ask(learner, wire.Done(120, 2), wire.Ack)
    ask(learner, wire.Status(), wire.StatusReply)  # after which replay ends
    assert watch(find(replay.address), True, 0.2, Console(file=out, width=100)) == 0
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert said[0]["derived"]["phase"] == "finished" and "silent" in said[-1]


def test_nobody_at_an_address_is_said_in_time():
    with pytest.raises(NoAnswer, match=r"replay at tcp://127\.0\.0\.1:9 did not answer Status within 0\.5 s"):
        show(find("tcp://127.0.0.1:9"), False, 0.5)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no run folder"):
        find(str(tmp_path))


def make_folder(tmp_path, updates=3):
    config = validate({"run": {"dir": str(tmp_path), "name": "r"}, "model": {"path": "m"}, "learner": {"updates": 6}})
    folder = tmp_path / "r"
    folder.mkdir()
    save_config(config, folder / "config.yaml")
    lines = [json.dumps({"update": u, "policy/reward": 0.5}) for u in range(updates)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"update": 9, "pol']))
    return folder


def told(folder):
    """What is printed of a run that is not there, in one line; nobody is waited for."""
    out = io.StringIO()
    assert show(find(str(folder)), False, 60.0, Console(file=out, width=200)) == 1
    return " ".join(out.getvalue().split())


def test_a_run_that_is_over_says_what_its_folder_has(tmp_path):
    folder = make_folder(tmp_path)
    resume = f"asyncrl run {folder / 'config.yaml'} --resume"
    assert told(folder) == (
        f"{folder} is not running: 3 of 6 updates were made it has neither a checkpoint nor a snapshot of replay: "
        "begin a new run"
    )
    (folder / "replay.snapshot").write_bytes(b"x")
    assert told(folder).endswith(f"go on from its start model (no checkpoint): {resume}")
    (folder / "logs").mkdir()
    log = "2026-01-01 00:00:00,000 learner-0 ERROR asyncrl: TrainingError: 5 updates in a row were skipped\nTraceback\n"
    (folder / "logs" / "learner.log").write_text(log)
    (folder / "replay.address").write_text("tcp://127.0.0.1:9\n")  # a killed replay leaves it
    assert "last error in logs/learner.log: TrainingError: 5 updates in a row were skipped go on" in told(folder)
    (folder / "replay.snapshot").unlink()
    (folder / "model").mkdir()
    assert told(folder).startswith(f"{folder} is finished: 3 of 6 updates its model: {folder / 'model'}")


def test_a_run_whose_replay_is_being_started_is_not_over(tmp_path):
    folder = make_folder(tmp_path)
    out = io.StringIO()
    with own(folder):
        assert show(find(str(folder)), True, 0.3, Console(file=out, width=200)) == 1
    assert json.loads(out.getvalue())["folder"]["running"] is True
