"""A generator with swapped experts in a running job: alarm, quarantine, re-sync, clean probe, and it is in again."""

import signal
import subprocess
import sys

import pytest

from asyncrl.metrics.names import is_known
from asyncrl.process import role_environment
from asyncrl.sections.sentinel import SentinelSection
from tests.system.conftest import ROOT

SETTINGS = {
    "generator.count": 3,
    "generator.groups_in_flight": 3,
    "algorithm.groups_per_update": 8,
    "learner.updates": 1000,
    "learner.checkpoint_every": 0,
    "eval.every": 0,
    "sentinel.window": 96,
    "sentinel.min_responses": 48,
}


@pytest.fixture
def generator(tmp_path):
    """Starts a faulty generator for a run; it is ended at teardown."""
    started = []

    def start(run, fault):
        helper = [sys.executable, "-m", "tests.helpers.faulty_generator", fault, "--until-resync"]
        with (tmp_path / "bad.log").open("w") as out:
            started.append(
                subprocess.Popen(
                    [*helper, str(run.folder / "config.yaml"), "--id", "bad"],
                    cwd=ROOT, env=role_environment(1), stdout=out, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def history(run, name):
    """The values of a metric, record by record."""
    return [r[name] for r in run.updates() if name in r]


def test_a_fault_that_a_resync_cures_is_found_cured_and_let_in_again(start_run, generator):
    run = start_run("sentinel", **SETTINGS)
    run.wait_for(lambda: (run.folder / "replay.address").exists())
    generator(run, "swap")
    out = "sentinel/bad/quarantined"
    run.wait_for(lambda: 1.0 in history(run, out), timeout_s=300)
    run.wait_for(lambda: history(run, out)[-1] == 0.0, timeout_s=200)
    back = len(run.committed())
    run.wait_for(lambda: "bad" in {c["generator_id"] for c in run.committed()[back:]}, timeout_s=200)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() in (0, 130, 143), run.text()
    alarms = (run.folder / "alarms.jsonl").read_text()
    assert '"name": "generator/bad"' in alarms
    assert '"name": "generator/g' not in alarms
    log = (run.folder / "logs" / "replay.log").read_text()
    assert "generator bad is in quarantine (resync)" in log
    assert "generator bad is let in again after 1 re-syncs: a probe of 48 responses is clean" in log
    # Nobody else was ever out, every batch was whole, and no probe was trained.
    assert all(not any(history(run, f"sentinel/g{i}/quarantined")) for i in range(3))
    assert {r["policy/responses"] for r in run.updates()} == {32.0}
    ids = [c["group_id"] for c in run.committed()]
    assert len(ids) == len(set(ids))
    assert not [i for i in ids if i.startswith("probe/")]
    last = run.updates()[-1]
    # Whether any of its groups lay in the queue at that moment is chance: tests/replay/test_quarantine.py evicts them.
    assert last["replay/idle/quarantined"] > 0
    signals = ("drift", "log_ratio", "joint")
    assert max(z for s in signals for z in history(run, f"sentinel/bad/{s}_z")) > SentinelSection().z
    assert {name for r in run.records() for name in r if not is_known(name)} == {"update", "time"}
