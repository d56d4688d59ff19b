"""Replay is killed in the middle of whole runs and started again: it goes on, no group is lost or trained twice."""

import os
import signal

import pytest

from tests.system.test_run import assert_lag_bound


def kill_replay(run):
    os.kill(run.role("replay").pid, signal.SIGKILL)


@pytest.mark.long
def test_a_run_survives_two_kills_of_replay(start_run):
    changes = {"learner.updates": 26, "eval.every": 10, "generator.count": 2, "replay.heartbeat_timeout_s": 5}
    run = start_run("restart", **changes)
    for at in (4, 12):
        run.wait_for(lambda at=at: len(run.updates()) >= at)
        kill_replay(run)
        count = len(run.updates())
        run.wait_for(lambda count=count: len(run.updates()) > count + 1)
    assert run.wait() == 0, run.text()
    assert run.output.read_text().count("replay ended with status -9; started again") == 2
    assert run.processes() == []
    committed = run.committed()
    ids = [c["group_id"] for c in committed]
    assert len(ids) == len(set(ids)) == 26 * 4
    assert {c["outcome"] for c in committed} == {"trained"}
    assert [c["update"] for c in committed] == [u for u in range(26) for _ in range(4)]
    # 104 groups were trained and at most 20 may be ahead, so the first data epoch (64 prompts) is over.
    assert len([i for i in ids if i.startswith("0/")]) == 64
    assert [r["update"] for r in run.updates()] == list(range(26))
    assert_lag_bound(run, 4)
    evaluated = [r["update"] for r in run.records() if "eval/sampled_accuracy" in r]
    assert evaluated == sorted(set(evaluated)) and evaluated[-1] == 26
    assert [r["eval/count"] for r in run.records() if "eval/count" in r] == [16.0] * len(evaluated)
    assert not (run.folder / "replay.snapshot").exists()
