"""`asyncrl tune` against a replay process of its own: by the run folder, over the network with a key, and without."""

import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from asyncrl import wire
from asyncrl.config import save_config
from asyncrl.errors import ConfigError, NoAnswer, TransportError
from asyncrl.replay.server import run
from asyncrl.transport import keys
from asyncrl.transport.rendezvous import wait_for_address
from asyncrl.watch.client import Operator, find
from asyncrl.watch.tune import num_undone, request, tune
from tests.helpers.scripted_replay import Replay
from tests.replay.test_process import make_config

WAIT_S = 60.0


def cli(*arguments):
    command = [sys.executable, "-m", "asyncrl", "tune", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.fixture
def serve(tmp_path):
    """Start the replay of a run folder; its config and process."""
    started = []

    def start(**replay):
        config = make_config(tmp_path, **replay)
        config.run_dir.mkdir(parents=True)
        save_config(config, config.run_dir / "config.yaml")
        return config, again(config)

    def again(config):
        process = multiprocessing.get_context("spawn").Process(target=run, args=(config, config.run_dir), daemon=True)
        process.start()
        started.append(process)
        wait_for_address(config.run_dir / "replay.address", WAIT_S)
        return process

    start.again = again
    yield start
    for process in started:
        process.kill()
        process.join(10)


def test_a_key_is_all_that_is_needed_from_elsewhere(serve, tmp_path):
    keys.new(tmp_path / "keys", ["client", "ops"])
    config, _ = serve(security="curve", keys=str(tmp_path / "keys"))
    address = wait_for_address(config.run_dir / "replay.address", WAIT_S)
    done = cli(address, "--keys", tmp_path / "keys", "--client", "ops", "staleness.max_lag=4", "algorithm.rdc.mode=off")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "staleness.max_lag: 8 -> 4",
        'algorithm.rdc.mode: "filter" -> "off"',
        "change 1: from update 0 on, whose take is the next",
    ]
    refused = cli(config.run_dir, "staleness.max_lag=two")
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith("refused: staleness.max_lag='two': ")
    line = json.loads((config.run_dir / "tune.jsonl").read_text())
    assert (line["seq"], line["changes"]["staleness.max_lag"]) == (1, [8, 4])
    # Without a key, and with one that is not allowed.
    with pytest.raises(
        NoAnswer, match=r"did not answer Tune within 1 s: is the run .* alive.*it wants keys: --keys DIR"
    ):
        tune(find(address), [], timeout_s=1.0)
    keys.new(tmp_path / "other", server=tmp_path / "keys" / "server.pub")
    with pytest.raises(TransportError, match=r"'client'\) is not on its allow-list.*may have been done all the same"):
        tune(find(address, tmp_path / "other"), ["staleness.max_lag=3"], timeout_s=1.0)


def test_fifty_changes_of_two_operators_while_replay_is_killed(serve, capsys):
    config, process = serve()
    target = find(str(config.run_dir))
    seqs: list[int] = []

    def ask(name, values):
        with Operator(target) as operator:
            for value in values:
                reply = request(operator, [f"{name}={value}"], timeout_s=WAIT_S)
                assert reply.ok, reply.text
                seqs.append(reply.tuned.seq)
                if len(seqs) == 20:
                    process.kill()
                    process.join(10)
                    serve.again(config)

    lr, q = [1e-4 + i * 1e-6 for i in range(25)], [0.1 + i / 100 for i in range(25)]
    threads = [threading.Thread(target=ask, args=a) for a in (("learner.lr", lr), ("algorithm.rdc.q", q))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    lines = [json.loads(line) for line in (config.run_dir / "tune.jsonl").read_text().splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, 51)), "none is lost, none is done twice"
    assert sorted(seqs)[-1] == 50
    by_key = [(key, new) for line in lines for key, (_, new) in line["changes"].items()]
    assert [v for k, v in by_key if k == "learner.lr"] == lr and [v for k, v in by_key if k == "algorithm.rdc.q"] == q
    assert tune(target, [], undo=50) == 0
    assert tune(target, [], undo=1) == 2
    assert "refused: --undo 1: nothing is tuned" in capsys.readouterr().err
    assert tune(target, []) == 0
    assert "nothing is tuned" in capsys.readouterr().out


def test_a_run_that_is_not_there_says_what_to_do(tmp_path, capsys):
    with pytest.raises(ConfigError, match="no run folder"):
        find(str(tmp_path))
    config = make_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    save_config(config, config.run_dir / "config.yaml")
    assert tune(find(str(config.run_dir)), ["learner.lr=1e-4"], timeout_s=0.3) == 1
    assert "is not running: 0 of 120 updates were made" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"has no key pair of client 'ops'"):
        find("tcp://127.0.0.1:1", tmp_path, "ops")
    with pytest.raises(ConfigError, match="not both"):
        tune(find(str(config.run_dir)), ["learner.lr=1e-4"], undo=1)
    with pytest.raises(ConfigError, match="is not key=value"):
        tune(find(str(config.run_dir)), ["learner.lr"])


@pytest.fixture
def replay(tmp_path):
    """A replay that answers by a script, and where it is."""
    started = []

    def start(answers):
        started.append(Replay(tmp_path / "replay.address", answers))
        return started[-1], find(started[-1].server.address)

    yield start
    for each in started:
        each.end()


def test_a_request_without_an_answer_is_sent_again_with_its_key(replay):
    heard = []

    def answers(message):
        heard.append(message)
        late = wire.TuneReply(True, "of another request", wire.Tuned(), "old")
        return [late, wire.TuneReply(True, "done", wire.Tuned(1), message.key)] if len(heard) > 1 else [late]

    _, target = replay(answers)
    with Operator(target) as operator:
        assert request(operator, ["learner.lr=1e-4"], timeout_s=WAIT_S).text == "done"
    assert len(heard) == 2 and heard[0] == heard[1] and heard[0].values == {"learner.lr": "0.0001"}


def test_a_refusal_ends_the_wait(replay):
    _, target = replay(lambda _: [wire.Refused("wire schema 4 against schema 5 of replay")])
    with pytest.raises(TransportError, match="refused: wire schema 4"):
        tune(target, [], timeout_s=WAIT_S)


def test_a_run_folder_in_another_place_is_found(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    save_config(config, config.run_dir / "config.yaml")
    monkeypatch.chdir(config.run_dir.parent)
    target = find("r")
    assert target.place == Path("r/replay.address") and target.keys is None


@pytest.mark.parametrize(("arguments", "count"), [([], 1), (["3"], 3)])
def test_undo_takes_back_one_change_or_as_many_as_it_says(arguments, count):
    assert num_undone(arguments) == count


@pytest.mark.parametrize("arguments", [["0"], ["-1"], ["x"], ["1", "2"], ["learner.lr=1"]])
def test_undo_of_what_is_no_number_is_refused(arguments):
    with pytest.raises(ConfigError, match="--undo takes one number from 1 on"):
        num_undone(arguments)


def test_a_key_given_twice_and_a_value_without_end_are_refused_before_anything_is_sent():
    operator = Operator(find("tcp://127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"staleness\.max_lag is given more than once"):
        request(operator, ["staleness.max_lag=2", "staleness.max_lag=9"])
    with pytest.raises(ConfigError, match=r"algorithm\.rdc\.mode: a value of 5002 characters is too long"):
        request(operator, ["algorithm.rdc.mode=" + "a" * 5000])
