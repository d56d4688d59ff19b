"""Whole runs in which nothing can progress any more (B41): they end in time, the first cause in their last lines."""

import os
import signal
import subprocess
import sys
import time

import pytest

from asyncrl.process import role_environment
from tests.system.conftest import ROOT

pytestmark = pytest.mark.timeout(600)

# The fleet is started by hand, so nobody starts it again.
ALONE = {
    "generator.count": 0, "learner.updates": 100000, "eval.every": 0, "run.watchdog_s": 10,
    "replay.heartbeat_timeout_s": 4,
}  # fmt: skip

BROKEN = """
import sys
from asyncrl.cli import main
from asyncrl.errors import TaskError
from asyncrl.generator.sample import Sampler

async def broken(self, lease):
    raise TaskError("the verifier is broken")

Sampler.group = broken
main()
"""


@pytest.fixture
def generator():
    """Start a generator by hand in a run; ended at teardown."""
    started = []

    def start(run, name, program=("-m", "asyncrl")):
        command = [sys.executable, *program, "generate", str(run.folder / "config.yaml"), "--id", name]
        with open(run.folder / f"{name}.out", "w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=role_environment(1), stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(60)


def assert_ends_with(run, *words):
    """Status 1; the cause stands once in the last lines, and in the learner's log; nothing is left."""
    assert run.wait(180) == 1, run.text()
    last = " ".join(run.output.read_text().splitlines()[-3:])
    log = (run.folder / "logs/learner.log").read_text()
    for word in words:
        assert last.count(word) == 1, last
        assert word in log
    assert run.records() and not (run.folder / "model").exists()
    assert (run.folder / "replay.snapshot").exists()


@pytest.mark.long
def test_a_run_whose_generators_were_all_killed_ends_by_itself(start_run, generator):
    run = start_run("dead", **ALONE)
    run.wait_for(lambda: (run.folder / "config.yaml").exists())
    fleet = [generator(run, name) for name in ("g0", "g1")]
    run.wait_for(lambda: len(run.updates()) >= 3, 180)
    for process in fleet:
        os.kill(process.pid, signal.SIGKILL)
    assert_ends_with(run, "nothing can progress: every generator is gone", ": it fell silent")
    assert run.processes() == []


def test_a_run_whose_worker_raises_on_every_prompt_ends_with_its_exception(start_run, generator):
    run = start_run("broken", **ALONE | {"eval.every": 2})
    run.wait_for(lambda: (run.folder / "config.yaml").exists())
    process = generator(run, "g0", ("-c", BROKEN))
    assert run.wait(180) == 1, run.text()
    last = " ".join(run.output.read_text().splitlines()[-3:])
    cause = "first cause: g0: TaskError: the verifier is broken"
    assert last.count(cause) == 1, run.text()
    assert cause in (run.folder / "logs/learner.log").read_text()
    assert "ChildFailedError" not in run.output.read_text()
    # It hears of the end as well, and ends in order.
    assert process.wait(120) == 0, (run.folder / "g0.out").read_text()
    deadline = time.monotonic() + 120
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.processes() == []
