"""Faults under a real server in a whole run: training goes on with what is healthy, nothing is lost or mislabelled."""

import os
import signal
import time

import psutil
import pytest

from asyncrl.replay.journal import surviving
from tests.sglang.test_run import servers, sglang_run  # noqa: F401
from tests.system.conftest import char_model, start_run  # noqa: F401
from tests.system.test_run import assert_lag_bound

pytestmark = pytest.mark.timeout(1200)

LONG = {"learner.updates": 30, "staleness.sync_every": 1, "eval.every": 0, "generator.sglang.answer_s": 15}


def assert_whole(run, updates):
    """It ended well: every update of the surviving timeline once, no group twice, no token too old, no process left."""
    assert run.wait(600) == 0, run.text()
    kept = surviving(run.committed())
    assert [c["update"] for c in kept] == [u for u in range(updates) for _ in range(4)]
    assert len({c["group_id"] for c in kept}) == len(kept)
    assert_lag_bound(run, 4)
    assert run.processes() == []
    # A response under a wrong label would show here: ratios between weights that are `max_lag` small steps apart.
    assert max(r["mismatch/kl_k3"] for r in run.updates()) < 0.5


def send(processes, number):
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def sender_of(run):
    """The process beside the learner that sends to the one server of a run."""
    found = [p for p in run.processes() if any("collective.sender" in part for part in p.cmdline())]
    learners = [p for p in run.processes() if "learn" in p.cmdline()]
    for learner in learners:
        found += [p for p in learner.children(recursive=True) if any("sender" in part for part in p.cmdline())]
    return found[-1] if found else None


@pytest.mark.long
def test_a_server_killed_in_the_middle_of_its_groups_comes_back(sglang_run):  # noqa: F811
    run = sglang_run("killed", **LONG)
    run.wait_for(lambda: len(run.updates()) >= 3, 400)
    family = servers(run)
    send(family, signal.SIGKILL)
    assert_whole(run, 30)
    assert "generator g0 ended with status 1; started again" in run.output.read_text()
    assert not any(p.is_running() for p in family)


def test_a_server_killed_in_the_middle_of_an_update_comes_back(sglang_run):  # noqa: F811
    run = sglang_run("midsync", **LONG)
    run.wait_for(lambda: len(run.updates()) >= 3 and sender_of(run) is not None, 400)
    # A sender that stands still holds its server in the broadcast of the next version.
    sender, family = sender_of(run), servers(run)
    sender.send_signal(signal.SIGSTOP)
    at, stopped = len(run.updates()), time.monotonic()
    # The next update makes the next version due. None comes when the server was held in a broadcast already.
    run.wait_for(lambda: len(run.updates()) > at or time.monotonic() - stopped > 30, 120)
    send(family, signal.SIGKILL)
    assert_whole(run, 30)
    assert not psutil.pid_exists(sender.pid)


@pytest.mark.long
def test_a_sender_that_stands_still_is_given_up_and_the_version_loaded_again(sglang_run):  # noqa: F811
    run = sglang_run("sender", **LONG, **{"weights.timeout_s": 5})
    run.wait_for(lambda: len(run.updates()) >= 3 and sender_of(run) is not None, 400)
    sender_of(run).send_signal(signal.SIGSTOP)
    assert_whole(run, 30)
    assert max(r.get("generator/failed_loads", 0) for r in run.updates()) >= 1
    assert run.role("g0") is None and "g0 ended with status" not in run.output.read_text()


@pytest.mark.long
def test_one_of_two_servers_hangs_and_the_other_goes_on(sglang_run):  # noqa: F811
    # Versions must live longer than the second server takes to come.
    run = sglang_run("hangs", **(LONG | {"generator.count": 2, "learner.updates": 200, "staleness.sync_every": 4}))
    run.wait_for(lambda: {c["generator_id"] for c in run.committed()} == {"g0", "g1"}, 400)
    family = servers(run, "g1")
    send(family, signal.SIGSTOP)
    at = len(run.updates())
    run.wait_for(lambda: len(run.updates()) >= min(at + 5, 200), 200)
    assert_whole(run, 200)
    assert not any(p.is_running() and p.status() == psutil.STATUS_STOPPED for p in family)


@pytest.mark.long
def test_servers_live_on_when_the_learner_is_started_again(sglang_run):  # noqa: F811
    run = sglang_run("learner", **LONG, **{"learner.checkpoint_every": 2})
    run.wait_for(lambda: len(run.updates()) >= 5, 400)
    before = {p.pid for p in servers(run)}
    ranks = [p for p in run.processes() if "learn" in p.cmdline() and "asyncrl.launcher" not in p.cmdline()]
    ranks[-1].kill()
    run.wait_for(lambda: any(r.get("run/epoch", 0) >= 1 for r in run.updates()), 300)
    assert {p.pid for p in servers(run)} == before
    assert_whole(run, 30)
    assert "started again" in run.output.read_text() and "generator g0" not in run.output.read_text()
