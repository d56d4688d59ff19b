"""Signals and crashes: nothing is left behind, the status is right, no group is trained twice."""

import os
import signal
import subprocess
import time

import pytest

from tests.system.conftest import ROOT
from tests.system.test_run import assert_clean, assert_lag_bound

LONG = {"learner.updates": 100000, "eval.every": 0}


def assert_everything_ends(run, status, within_s=10):
    """The run ends with this status within within_s, and leaves no process and no port."""
    started = time.monotonic()
    assert run.wait(60) == status, run.text()
    assert time.monotonic() - started < within_s
    assert_clean(run)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(start_run, number, status):
    run = start_run("signal", **LONG)
    run.wait_for(lambda: len(run.updates()) >= 2)
    run.process.send_signal(number)
    assert_everything_ends(run, status)


def test_a_signal_during_start_up_ends_everything(start_run):
    run = start_run("early", **LONG)
    run.wait_for(lambda: run.role("replay") is not None)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert run.processes() == []


@pytest.mark.parametrize("role", ["replay", "learn"])
def test_a_role_that_the_run_cannot_do_without_ends_it_with_its_cause(start_run, role):
    run = start_run("crash", **LONG, **{"run.max_replay_restarts": 0, "run.max_learner_restarts": 0})
    run.wait_for(lambda: len(run.updates()) >= 2)
    victims = [p for p in run.processes() if role in p.info["cmdline"] and "run" not in p.info["cmdline"]]
    os.kill(victims[-1].pid, signal.SIGKILL)
    assert_everything_ends(run, 1, within_s=20)
    assert ("the learner ended" if role == "learn" else "replay ended") in run.output.read_text().replace("\n", " ")


def test_a_killed_supervisor_takes_its_children_along(start_run):
    run = start_run("orphans", **LONG)
    run.wait_for(lambda: len(run.updates()) >= 1)
    run.process.kill()
    run.process.wait(10)
    deadline = time.monotonic() + 10
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.processes() == []


def test_a_killed_generator_is_replaced_and_its_leases_come_back(start_run):
    run = start_run("kill", **LONG, **{"generator.count": 2, "replay.heartbeat_timeout_s": 3})
    run.wait_for(lambda: len(run.updates()) >= 5)
    at = len(run.updates())
    os.kill(run.role("g0").pid, signal.SIGKILL)

    def first_epoch():
        return {c["group_id"] for c in run.committed() if c["group_id"].startswith("0/")}

    # All 64 prompts of the first data epoch, those that the killed one was sampling included.
    run.wait_for(lambda: len(first_epoch()) == 64)
    run.wait_for(lambda: "g0" in {c["generator_id"] for c in run.committed()[-200:]} and len(run.updates()) > at + 20)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    ids = [c["group_id"] for c in run.committed()]
    assert len(ids) == len(set(ids)) > 64
    assert "generator g0 ended with status -9; started again" in run.output.read_text()
    assert_lag_bound(run, 4)
    assert_clean(run)


def test_the_cause_of_a_learners_failure_is_shown_and_not_torchruns_banner(start_run):
    run = start_run("cause", **{"generator.count": 0, "learner.take_timeout_s": 10, "replay.heartbeat_timeout_s": 5})
    assert run.wait(90) == 1
    shown = " ".join(run.output.read_text().split())
    assert "no take for update 0 within 10 s" in shown
    assert "0 generators alive" in shown
    assert "ChildFailedError" not in shown


def test_two_runs_of_one_name_at_the_same_instant_get_their_own_folders(start_run):
    one, two = (start_run("same", **{"learner.updates": 1, "eval.every": 0}) for _ in range(2))
    assert one.wait() == 0, one.text()
    assert two.wait() == 0, two.text()
    for name in ("same", "same-2"):
        assert len((one.folder.parent / name / "metrics.jsonl").read_text().splitlines()) == 1


def test_bad_settings_are_refused_before_anything_starts(tmp_path, char_model):
    import sys

    for wrong in ("staleness.max_lag=0", "algorithm.rdc.quantle=0.1", "model.path=/nowhere"):
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl", "run", str(ROOT / "configs/quickstart.yaml"), f"model.path={char_model}",
             f"run.dir={tmp_path / 'runs'}", wrong],
            capture_output=True, text=True, timeout=60, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 2
        assert wrong.split("=")[0] in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "runs").exists()
