"""launch/slurm/job.sh as a heterogeneous job of a real SLURM: one learner node, two generator nodes."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from asyncrl.replay.journal import surviving
from tests.system.conftest import SMALL

ROOT = Path(__file__).parents[2]


class Job:
    """A submitted run."""

    def __init__(self, slurm, place, model, environment, name, **changes):
        self.slurm, self.work = slurm, place / f"slurm-{name}"
        self.work.mkdir()
        self.folder = self.work / "runs" / name
        settings = SMALL | {"model.path": model, "run.name": name} | changes
        (self.work / "base.yaml").write_text("{}\n")
        slurm.env |= environment | {"PYTHON": sys.executable}
        self.id = slurm.call(
            "sbatch", "--parsable", f"--chdir={self.work}", str(ROOT / "launch/slurm/job.sh"), "base.yaml",
            *(f"{k}={v}" for k, v in settings.items()),
        ).split(";")[0]  # fmt: skip

    def text(self):
        files = [*self.work.glob("*.out"), *sorted(self.work.glob("logs/*/*.log"))]
        return "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in files)

    def output(self):
        return "".join(f.read_text() for f in self.work.glob("*.out"))

    @property
    def state(self):
        return self.slurm.job(self.id)["JobState"]

    def wait_for(self, condition, what, timeout_s=120):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"), (
                f"{what}: {self.state}\n{self.text()}"
            )
            assert time.monotonic() < deadline, (
                f"{what}: waited {timeout_s} s in vain\n{self.text()}{self.slurm.text()}"
            )
            time.sleep(0.2)

    def wait_until_over(self, timeout_s=180):
        deadline = time.monotonic() + timeout_s
        while self.state not in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"):
            assert time.monotonic() < deadline, f"{self.state}\n{self.text()}{self.slurm.text()}"
            time.sleep(0.2)
        return self.state

    def joined(self):
        return sorted(set(re.findall(r"(g\d) on \S+ joined", self.output())))

    def committed(self):
        file = self.folder / "committed.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


@pytest.fixture
def submit(slurm, place, char_model, environment):
    started = []

    def start(name, **changes):
        started.append(Job(slurm, place, char_model, environment, name, **changes))
        return started[-1]

    yield start
    for job in started:
        if job.state in ("PENDING", "RUNNING", "COMPLETING"):
            slurm.call("scancel", job.id)
    slurm.wait_for(lambda: not slurm.processes(), "the jobs' processes end", 60)


def nothing_left(slurm, within_s):
    deadline = time.monotonic() + within_s
    while slurm.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return [p.cmdline() for p in slurm.processes()] == []


@pytest.mark.timeout(400)
def test_a_generator_node_that_dies_does_not_end_the_run(submit, slurm):
    run = submit("node", **{"learner.updates": 60, "eval.every": 20})
    run.wait_for(lambda: run.joined() == ["g0", "g1"], "both generators join")
    run.wait_for(lambda: len(run.committed()) >= 8, "two updates")
    node = re.findall(r"started g1 on (\S+)", run.output())[0]  # not the first one, on which the batch script runs
    slurm.kill_node(node)
    try:
        # What slurmctld says by itself after SlurmdTimeout.
        slurm.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        done = len(run.committed())
        run.wait_for(lambda: len(run.committed()) >= done + 40, "ten updates without the node")
        assert run.wait_until_over() == "COMPLETED", run.text()
    finally:
        slurm.start_node(node)
        slurm.call("scontrol", "update", f"nodename={node}", "state=resume")
    assert slurm.job(run.id)["Restarts"] == "0"
    assert [line["update"] for line in run.committed()] == [u for u in range(60) for _ in range(4)]
    assert sorted(f.name for f in run.work.glob(f"logs/slurm-{run.id}/*")) == [
        "g0.log", "g1.log", "learner.log", "replay.log",
    ]  # fmt: skip
    assert nothing_left(slurm, 20)
    slurm.wait_for(lambda: slurm.states() == {"idle"}, "the node comes back", 60)


@pytest.mark.timeout(300)
def test_scancel_leaves_nothing(submit, slurm):
    run = submit("cancel", **{"learner.updates": 2000})
    run.wait_for(lambda: run.joined() == ["g0", "g1"], "both generators join")
    slurm.call("scancel", run.id)
    assert nothing_left(slurm, 20), run.text()
    assert run.wait_until_over(30) == "CANCELLED"
    assert "stopped by signal 15" in run.output()
    assert not list(run.folder.glob("replay.address"))


@pytest.mark.timeout(400)
def test_a_requeued_job_goes_on_where_it_was(submit, slurm):
    run = submit("requeue", **{"learner.updates": 30, "eval.every": 20, "learner.checkpoint_every": 2})
    run.wait_for(lambda: len(run.committed()) >= 20, "five updates")
    before = len(run.committed())
    slurm.call("scontrol", "requeue", run.id)
    run.wait_for(lambda: slurm.job(run.id)["Restarts"] == "1" and run.state == "RUNNING", "the job starts again")
    assert run.wait_until_over() == "COMPLETED", run.text()
    lines = [json.loads(line) for line in (run.folder / "committed.jsonl").read_text().splitlines()]
    kept = surviving(lines)
    assert before < len(kept)
    assert [line["update"] for line in kept] == [u for u in range(30) for _ in range(4)]
    ids = [line["group_id"] for line in kept]
    assert len(set(ids)) == len(ids)
