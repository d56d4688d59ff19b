"""A run on two ranks: a rank is killed, the run is stopped, the whole is killed, and resumed each time."""

import os
import signal

import psutil
import pytest

from tests.system.conftest import char_model, start_run  # noqa: F401 - fixtures
from tests.system.test_run_resume import EPOCH, assert_finished, stop

pytestmark = pytest.mark.timeout(900)


def ranks(run):
    return [p for p in run.processes() if "learn" in p.info["cmdline"] and "asyncrl.launcher" not in p.info["cmdline"]]


def kill_all(run):
    """SIGKILL to everything at once."""
    family = [psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children(recursive=True)]
    for p in family:
        p.suspend()
    for p in family:
        os.kill(p.pid, signal.SIGKILL)
    run.process.wait(30)
    psutil.wait_procs(family, timeout=30)


def test_a_killed_rank_a_stopped_run_and_a_killed_run_train_every_prompt_of_the_epoch_once(start_run):  # noqa: F811
    changes = {"learner.updates": EPOCH, "learner.checkpoint_every": 3, "learner.ranks": 2, "eval.every": 0}
    run = start_run("stopped", **changes, **{"run.shutdown_s": 60})
    run.wait_for(lambda: len(run.updates()) >= 4 and list(run.folder.glob("checkpoints/u*/state.json")), 200)
    ranks(run)[-1].kill()
    run.wait_for(lambda: any(r.get("run/epoch") == 1 for r in run.updates()), 200)
    stop(run)

    run = start_run("stopped", resume=True)
    run.wait_for(lambda: any(r.get("run/epoch") == 2 for r in run.updates()), 200)
    kill_all(run)
    kept = max(int(f.parent.name[1:]) for f in run.folder.glob("checkpoints/u*/state.json"))

    again = start_run("stopped", resume=True, **{"learner.ranks": 1})
    assert_finished(again, kept)
