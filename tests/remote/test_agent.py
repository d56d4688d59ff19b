"""The agent with a real role: its lifeline, its signals, its keys, and that nothing outlives it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from asyncrl.config import to_yaml
from asyncrl.errors import ConfigError
from asyncrl.remote import agent as module
from asyncrl.remote.agent import Lifeline
from asyncrl.remote.job import Job, from_line, read_keys, write_keys
from asyncrl.remote.plan import changed
from asyncrl.restarts import LOST
from asyncrl.transport import keys
from asyncrl.transport.rendezvous import wait_for_address
from tests.replay.test_process import make_config

AGENT = [sys.executable, "-m", "asyncrl.remote.agent"]


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(job):
        process = subprocess.Popen(AGENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        started.append(process)
        process.stdin.write(job if isinstance(job, bytes) else job.to_line())
        process.stdin.flush()
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def replay_job(tmp_path, **changes):
    config = make_config(tmp_path)
    return config, Job(**({"role": "replay", "config": to_yaml(config)} | changes))


def curve_job(tmp_path):
    """Replay with keys that travel: its config names a folder that is not there."""
    made = tmp_path / "keys"
    keys.new(made, ["client", "other"])
    config = make_config(tmp_path, bind="tcp://127.0.0.1:*", security="curve", keys=str(made))
    elsewhere = changed(config, replay={"keys": "not-here"})
    return elsewhere, Job(role="replay", config=to_yaml(elsewhere), keys=read_keys(made, "client", serves=True))


def serving(config, process):
    """Wait for replay; its process."""
    wait_for_address(config.run_dir / "replay.address", 60.0)
    (role,) = psutil.Process(process.pid).children()
    return role


def private(process):
    """The private folders of an agent."""
    return list(Path("/dev/shm").glob(f"asyncrl-private-{os.getuid()}-{process.pid}-*"))


def ends(role, seconds=120.0):
    """True once the process is gone or a zombie that nobody reaps."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not role.is_running() or role.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_the_status_is_the_roles_and_nothing_stays(start, tmp_path):
    config, job = replay_job(tmp_path, role="config")
    process = start(job)
    out = process.stdout.read().decode()
    assert process.wait(60) == 0 and f"dir: {config.run.dir}" in out
    assert private(process) == []


def test_the_end_of_the_input_stops_the_role_in_order(start, tmp_path):
    config, job = replay_job(tmp_path)
    process = start(job)
    role = serving(config, process)
    process.stdin.close()
    assert process.wait(120) == LOST and ends(role)
    out = process.stdout.read().decode()
    assert "stopped: signal" in out and "the launcher is gone (standard input closed)" in out
    assert not (config.run_dir / "replay.address").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)])
def test_a_signal_to_the_agent_ends_the_role(start, tmp_path, number, status):
    config, job = replay_job(tmp_path)
    process = start(job)
    role = serving(config, process)
    process.send_signal(number)
    assert process.wait(120) == status and ends(role)


def test_a_silent_lifeline_is_told_from_one_that_beats(monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.5)
    inside, outside = os.pipe()
    line = Lifeline(inside)
    for _ in range(3):
        os.write(outside, b"\n")
        line.tend(0.3)
    assert line.state == "held"
    deadline = time.monotonic() + 10
    while line.state == "held" and time.monotonic() < deadline:
        line.tend(0.1)
    assert line.state == "silent"
    os.close(outside)
    os.close(inside)


def test_a_folder_with_a_run_in_it_is_left_alone(start, tmp_path):
    held = tmp_path / "metrics.jsonl"
    held.write_text("")
    _, job = replay_job(tmp_path, fresh=str(held))
    process = start(job)
    out = process.stdout.read().decode()
    assert process.wait(60) == 2 and "--resume" in out


def test_what_is_no_job_is_refused(start):
    process = start(b'{"role": "replay", "nonsense": 1}\n')
    assert b"same asyncrl on every host" in process.stdout.read()
    assert process.wait(60) == 2


def test_the_keys_travel_with_the_job_and_serve(start, tmp_path):
    config, job = curve_job(tmp_path)
    process = start(job)
    serving(config, process)
    (folder,) = private(process)
    assert {str(p.relative_to(folder / "keys")) for p in (folder / "keys").rglob("*") if p.is_file()} == {
        "server.key", "server.pub", "clients/client.key", "allowed/client.pub", "allowed/other.pub",
    }  # fmt: skip
    process.stdin.close()
    process.wait(120)
    assert not folder.exists()


def test_keys_that_a_killed_agent_left_go_away_with_the_next_agent(start, tmp_path):
    config, job = curve_job(tmp_path)
    process = start(job)
    role = serving(config, process)
    (folder,) = private(process)
    process.kill()
    process.wait(120)
    assert (folder / "keys/server.key").exists() and ends(role)
    assert start(Job(role="no-role", config="")).wait(120) == 2
    assert not folder.exists()


def test_beats_may_follow_the_job_at_once_and_the_job_may_come_in_pieces():
    job = Job(role="learn", config="x" * 2**17)
    inside, outside = os.pipe()
    with os.fdopen(outside, "wb") as out, ThreadPoolExecutor() as pool:
        line = pool.submit(Lifeline(inside).line, 60.0)
        out.write(job.to_line() + b"\n\n\n")
        out.flush()
        assert from_line(line.result()) == job
    assert Lifeline(inside).line(60.0) == b""
    os.close(inside)


def test_a_clients_host_gets_no_secret_but_its_own(tmp_path):
    made = tmp_path / "keys"
    keys.new(made, ["client", "other"])
    assert set(read_keys(made, "client", serves=False)) == {"server.pub", "clients/client.key"}
    with pytest.raises(ConfigError, match=r"cannot read .*nobody\.key"):
        read_keys(made, "nobody", serves=False)


def test_keys_stay_in_their_folder_and_jobs_survive_the_way(tmp_path):
    with pytest.raises(ConfigError, match="outside its folder"):
        write_keys({"../server.key": "x"}, tmp_path / "keys")
    job = Job(role="learn", config="a: 1\nb: 'x y'\n", words=["--id", "g0"], env={"A": "b c"}, fresh="runs/r")
    assert job.to_line().count(b"\n") == 1 and from_line(job.to_line() + b"\n\n") == job
    assert "server.key" not in repr(Job(role="replay", config="", keys={"server.key": "secret"}))
