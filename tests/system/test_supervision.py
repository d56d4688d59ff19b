"""`asyncrl run` and launch/local.sh start again what is killed, and leave nothing behind whenever they are stopped."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from asyncrl.process import role_environment
from asyncrl.replay.journal import surviving
from asyncrl.weights.place import directory_of
from tests.system.conftest import ROOT, SMALL, Run
from tests.system.test_faults import LONG, assert_everything_ends
from tests.system.test_run import assert_lag_bound
from tests.test_launch import is_in_session

pytestmark = pytest.mark.timeout(900)


def ranks(run):
    return [p for p in run.processes() if "learn" in p.info["cmdline"] and "asyncrl.launcher" not in p.info["cmdline"]]


def assert_books(run, updates):
    """Every update of the surviving timeline once, every group of it once."""
    kept = surviving(run.committed())
    assert [c["update"] for c in kept] == [u for u in range(updates) for _ in range(4)]
    assert len({c["group_id"] for c in kept}) == len(kept)


def test_neither_a_killed_launcher_nor_a_killed_rank_is_an_error_and_the_learner_goes_on(start_run):
    # Long enough that each kill finds a learner that trains.
    changes = {"learner.updates": 40, "learner.checkpoint_every": 2, "learner.ranks": 2, "eval.every": 0}
    run = start_run("killed", **changes)
    run.wait_for(lambda: len(run.updates()) >= 3)
    (launcher,) = [p for p in run.processes() if "asyncrl.launcher" in p.info["cmdline"]]
    old = {p.pid for p in ranks(run)}
    launcher.kill()
    run.wait_for(lambda: "learner ended with status -9; started again" in run.output.read_text())
    run.wait_for(lambda: old.isdisjoint(p.pid for p in run.processes()))
    run.wait_for(lambda: any(r.get("run/epoch") == 1 for r in run.updates()))
    os.kill(ranks(run)[-1].pid, signal.SIGKILL)
    assert run.wait(240) == 0, run.text()
    assert "learner ended with status 137; started again" in run.output.read_text()
    assert_books(run, 40)
    assert_lag_bound(run, 4)
    assert run.processes() == []


def test_sigterm_while_weights_are_published_leaves_nothing(start_run):
    run = start_run("publishing", **LONG, **{"staleness.sync_every": 1})
    run.wait_for(lambda: len(run.updates()) >= 2)
    place = directory_of(run.folder / "weights")
    assert place.exists()
    before = {f.name for f in place.iterdir()}
    run.wait_for(lambda: {f.name for f in place.iterdir()} - before)
    run.process.send_signal(signal.SIGTERM)
    assert_everything_ends(run, 143)
    assert not place.exists()
    # Metrics end with whole lines.
    assert all(json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines())


def test_a_generator_that_is_set_aside_does_not_end_the_run_and_the_last_one_does(start_run):
    run = start_run("aside", **LONG, **{"generator.count": 2, "run.max_generator_restarts": 0})
    run.wait_for(lambda: len(run.updates()) >= 2)
    os.kill(run.role("g0").pid, signal.SIGKILL)
    run.wait_for(lambda: "generator g0 ended with status -9; set aside" in run.output.read_text())
    count = len(run.updates())
    run.wait_for(lambda: len(run.updates()) > count + 5)
    os.kill(run.role("g1").pid, signal.SIGKILL)
    assert_everything_ends(run, 1)
    assert "every generator ended; g0 with status -9" in run.output.read_text()


def words_of(process):
    """Its command line; none once it has ended, as the script's own short commands do all the time."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_script_survives_a_kill_of_replay_and_of_a_generator_and_leaves_nothing(tmp_path, char_model):
    changes = {"learner.updates": 30, "generator.count": 2, "eval.every": 0, "replay.heartbeat_timeout_s": 5}
    settings = SMALL | {"model.path": char_model, "run.dir": tmp_path, "run.name": "hand"} | changes
    base = tmp_path / "base.yaml"
    base.write_text("{}\n")
    output = tmp_path / "hand.out"
    command = ["bash", "launch/local.sh", str(base), *(f"{k}={v}" for k, v in settings.items())]
    env = role_environment(1) | {"PYTHON": sys.executable}
    with open(output, "w") as out:
        script = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    run = Run(script, tmp_path / "hand", output)
    try:
        for word, at in (("replay", 3), ("g1", 6)):
            run.wait_for(lambda at=at: len(run.updates()) >= at, 180)
            family = psutil.Process(script.pid).children(recursive=True)
            (victim,) = [p for p in family if {word, "asyncrl"} <= set(words_of(p))]
            victim.kill()
        assert run.wait(240) == 0, run.text()
    finally:
        if script.poll() is None:
            script.terminate()
            script.wait(30)
    said = output.read_text()
    assert "replay ended with status 137; started again" in said and "g1 ended with status 137; started again" in said
    assert_books(run, 30)
    assert [p.pid for p in psutil.process_iter() if is_in_session(p, script.pid)] == []


@pytest.mark.long
def test_a_run_that_trained_to_the_end_is_no_failure_although_a_generator_was_set_aside(start_run):
    run = start_run("aside", **{"generator.count": 2, "run.max_generator_restarts": 0, "learner.updates": 40})
    run.wait_for(lambda: len(run.updates()) >= 2)
    run.role("g1").kill()
    assert run.wait(240) == 0, run.text()
    assert "generator g1 ended with status -9; set aside" in run.output.read_text()
    assert_books(run, 40)


@pytest.mark.long
def test_roles_that_somebody_told_to_leave_are_started_again(start_run):
    run = start_run("told", **{"learner.updates": 60, "eval.every": 0})
    run.wait_for(lambda: len(run.updates()) >= 2)
    run.role("replay").terminate()
    run.wait_for(lambda: "replay ended with status 143; started again" in run.output.read_text())
    run.role("g0").terminate()
    assert run.wait(240) == 0, run.text()
    assert "generator g0 ended with status 143; started again" in run.output.read_text()
    assert_books(run, 60)
