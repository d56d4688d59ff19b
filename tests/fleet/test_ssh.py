"""launch/ssh.sh on three hosts without a shared run folder: real sshd, real CURVE keys, weights over the network."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.system.conftest import SMALL

ROOT = Path(__file__).parents[2]
GENERATORS = ("h1", "h2")
UPDATES = 80


class Launch:
    """A started launch/ssh.sh: replay and the learner on h0, a generator on h1 and h2."""

    def __init__(self, hosts, place, model, environment, name, **changes):
        self.hosts, self.logs = hosts, place / f"{name}-logs"
        self.folder = hosts.private / name
        settings = SMALL | {"model.path": model, "run.dir": hosts.private, "run.name": name} | changes
        (place / "base.yaml").write_text("{}\n")
        self.output = place / f"{name}.out"
        command = [
            "launch/ssh.sh", "--replay", "h0", "--learner", "h0", "--generators", " ".join(GENERATORS),
            "--ssh", hosts.ssh, "--python", sys.executable, "--logs", str(self.logs),
            str(place / "base.yaml"), *(f"{k}={v}" for k, v in settings.items()),
        ]  # fmt: skip
        with open(self.output, "w") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment | {"PYTHON": sys.executable}, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def text(self):
        files = [self.output, *sorted(self.logs.glob("*.log"))]
        return "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in files if f.exists())

    def wait_for(self, condition, what, timeout_s=120):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"{what}: the launcher ended\n{self.text()}"
            assert time.monotonic() < deadline, f"{what}: waited {timeout_s} s in vain\n{self.text()}"
            time.sleep(0.1)

    def wait(self, timeout_s=180):
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text()) from None

    def joined(self):
        return sorted(re.findall(r"(g\d) on \S+ joined", self.output.read_text()))

    def committed(self):
        file = self.hosts.hosts[0].path(self.folder / "committed.jsonl")
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def left(self):
        """Processes, and keys or weights in shared memory, by host."""
        found = {}
        for host in self.hosts.hosts:
            files = [p.name for p in host.path("/dev/shm").iterdir()]
            if some := [p.info["cmdline"] for p in host.sessions()] + files:
                found[host.name] = some
        return found


@pytest.fixture
def launch(hosts, place, char_model, environment):
    started = []

    def start(name, **changes):
        started.append(Launch(hosts, place, char_model, environment, name, **changes))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait(10)
    for host in hosts.hosts:
        for process in host.processes():
            process.kill()


@pytest.mark.timeout(400)
def test_a_run_over_three_hosts_survives_a_killed_replay_and_a_lost_connection(launch):
    run = launch("whole", **{"learner.updates": UPDATES, "eval.every": 20})
    h0, h1, _ = run.hosts.hosts
    run.wait_for(lambda: run.joined() == ["g0", "g1"], "both generators join")
    run.wait_for(lambda: len(run.committed()) >= 8, "two updates")
    # The connection to g0's host breaks: its agent ends it, the launcher starts it again.
    old = {p.pid for p in h1.roles("generate")}
    (connection,) = [p for p in psutil.Process(run.process.pid).children() if " h1 " in " ".join(p.cmdline())]
    connection.kill()
    run.wait_for(lambda: not old & {p.pid for p in h1.roles("generate")}, "the old generator ends")
    (replay,) = h0.roles("replay")
    replay.kill()
    run.wait_for(lambda: run.output.read_text().count("g0 on h1 joined") == 2, "g0 joins again")
    assert run.wait() == 0, run.text()
    updates = [line["update"] for line in run.committed()]
    assert updates == [u for u in range(UPDATES) for _ in range(4)]
    ids = [line["group_id"] for line in run.committed()]
    assert len(set(ids)) == len(ids)
    assert run.left() == {}
    # Nothing was shared: the generators' hosts have neither address nor metrics, the learner's host has all.
    assert h0.path(run.folder / "metrics.jsonl").exists() and h0.path(run.folder / "model").is_dir()
    assert sorted(p.name for p in h1.path(run.folder).iterdir()) == ["config.yaml"]
    config = h1.path(run.folder / "config.yaml").read_text()
    assert "security: curve" in config and "carrier: zmq" in config
    assert sorted(f.name for f in run.logs.iterdir()) == ["g0.log", "g1.log", "learner.log", "replay.log"]
    starts = re.findall(r"started (\w+)", run.output.read_text())
    assert starts[0] == "replay" and starts.count("replay") == 2 and starts.count("g0") == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_nothing_is_left_on_any_host_when_the_launcher_ends(launch, number):
    run = launch(f"ended-{number}", **{"learner.updates": 2000})
    run.wait_for(lambda: run.joined() == ["g0", "g1"], "both generators join")
    assert {h.name for h in run.hosts.hosts if h.sessions()} == {"h0", "h1", "h2"}
    os.kill(run.process.pid, number)
    status = run.wait(30)
    assert status == (-number if number == signal.SIGKILL else 128 + number), run.text()
    deadline = time.monotonic() + (30 if number == signal.SIGKILL else 0)
    while run.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.left() == {}
