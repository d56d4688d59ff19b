"""Signals and crashes: nothing is left behind, the status is right, no group is trained twice."""

import os
import signal
import subprocess
import time

import pytest

from tests.system.conftest import ROOT
from tests.system.test_run import assert_clean, assert_lag_bound
from tests.system.watching import assert_status_agrees, assert_told_how_to_watch

LONG = {"learner.updates": 100000, "eval.every": 0}


def assert_everything_ends(run, status):
    """The run ends with this status and leaves no process and no port; no role outlasted run.shutdown_s."""
    assert run.wait(150) == status, run.text()
    assert_clean(run)


def test_an_interrupt_ends_everything(start_run):
    # SIGTERM: test_supervision.py.
    run = start_run("signal", **LONG)
    run.wait_for(lambda: len(run.updates()) >= 2)
    assert_told_how_to_watch(run)
    assert_status_agrees(run)
    run.process.send_signal(signal.SIGINT)
    assert_everything_ends(run, 130)


def test_a_signal_during_start_up_ends_everything(start_run):
    run = start_run("early", **LONG)
    run.wait_for(lambda: run.role("replay") is not None)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(150) == 130
    assert run.processes() == []


@pytest.mark.parametrize("role", ["replay", pytest.param("learn", marks=pytest.mark.long)])
def test_a_role_that_the_run_cannot_do_without_ends_it_with_its_cause(start_run, role):
    run = start_run("crash", **LONG, **{"run.max_replay_restarts": 0, "run.max_learner_restarts": 0})
    run.wait_for(lambda: len(run.updates()) >= 2)
    victims = [p for p in run.processes() if role in p.info["cmdline"] and "run" not in p.info["cmdline"]]
    os.kill(victims[-1].pid, signal.SIGKILL)
    assert_everything_ends(run, 1)
    assert ("the learner ended" if role == "learn" else "replay ended") in run.output.read_text().replace("\n", " ")


def test_a_killed_supervisor_takes_its_children_along(start_run):
    run = start_run("orphans", **LONG)
    run.wait_for(lambda: len(run.updates()) >= 1)
    run.process.kill()
    run.process.wait(60)
    deadline = time.monotonic() + 120
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
    assert run.wait(150) == 130, run.text()
    ids = [c["group_id"] for c in run.committed()]
    assert len(ids) == len(set(ids)) > 64
    assert "generator g0 ended with status -9; started again" in run.output.read_text()
    assert_lag_bound(run, 4)
    assert_clean(run)


@pytest.mark.long
def test_the_cause_of_a_learners_failure_is_shown_and_not_torchruns_banner(start_run):
    run = start_run("cause", **{"generator.count": 0, "learner.take_timeout_s": 10, "replay.heartbeat_timeout_s": 5})
    assert run.wait(90) == 1
    shown = " ".join(run.output.read_text().split())
    assert "no take for update 0 within 10 s" in shown
    assert "0 generators alive" in shown
    assert "ChildFailedError" not in shown


def test_two_runs_of_one_name_at_the_same_instant_get_their_own_folders_and_leave_that_of_an_earlier_one(
    start_run, tmp_path
):
    earlier = tmp_path / "same"
    earlier.mkdir()
    (earlier / "metrics.jsonl").write_text("{}\n")
    one, two = (start_run("same", **{"learner.updates": 1, "eval.every": 0}) for _ in range(2))
    assert one.wait() == 0, one.text()
    assert two.wait() == 0, two.text()
    for name in ("same-2", "same-3"):
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 1
    assert [f.name for f in earlier.iterdir()] == ["metrics.jsonl"]
    assert (earlier / "metrics.jsonl").read_text() == "{}\n"


def test_bad_settings_are_refused_before_anything_starts(tmp_path, char_model):
    import sys

    for wrong in ("staleness.max_lag=0", "algorithm.rdc.quantle=0.1", "model.path=/nowhere"):
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl", "run", str(ROOT / "configs/quickstart.yaml"), f"model.path={char_model}",
             f"run.dir={tmp_path / 'runs'}", wrong],
            capture_output=True, text=True, timeout=240, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 2
        assert wrong.split("=")[0] in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "runs").exists()
