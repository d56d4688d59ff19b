"""The learner is killed in the middle of a run and started again: it goes on from its checkpoint, all else lives on."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import psutil
import pytest

from asyncrl.metrics.sink import read_jsonl, timeline
from asyncrl.process import role_environment
from asyncrl.replay.journal import surviving
from tests.system.conftest import ROOT, SMALL

UPDATES = 9

pytestmark = pytest.mark.timeout(900)
"""Importing torch again takes its time; every wait below has a limit of its own."""


class Roles:
    """The roles of one run, started by hand in its folder."""

    def __init__(self, folder, model, **changes):
        self.folder, self.running = folder, {}
        settings = SMALL | {"model.path": model, "run.dir": folder.parent, "run.name": folder.name} | changes
        folder.mkdir()
        base = folder.parent / "base.yaml"
        base.write_text("{}\n")
        self.arguments = [str(base), *(f"{k}={v}" for k, v in settings.items())]

    def start(self, name, *command):
        env = role_environment(1) | {"ASYNCRL_SUPERVISED": "0"}
        with open(self.folder / f"{name}.log", "ab") as out:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "asyncrl", *command, *self.arguments], cwd=ROOT, env=env, stdout=out,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def kill(self, name):
        """SIGKILL to a role and all that it started, at once."""
        process = psutil.Process(self.running[name].pid)
        family = [process, *process.children(recursive=True)]
        for p in family:
            p.suspend()
        for p in family:
            os.kill(p.pid, signal.SIGKILL)
        self.running[name].wait(30)

    def text(self):
        return "\n".join(f"--- {f.name}\n{f.read_text()[-4000:]}" for f in sorted(self.folder.glob("*.log")))

    def records(self):
        file = self.folder / "metrics.jsonl"
        return read_jsonl(file) if file.exists() else []

    def updates(self):
        return [r for r in self.records() if "policy/reward" in r]

    def lines(self):
        return [json.loads(line) for line in (self.folder / "committed.jsonl").read_text().splitlines()]

    def wait_for(self, condition, timeout_s=240):
        """Waits until condition() is true; no role may end before. At most timeout_s."""
        ended = {}
        for _ in range(timeout_s * 10):
            ended = {n: p.poll() for n, p in self.running.items() if p.poll() is not None}
            if condition():
                return
            assert not ended, f"{ended}\n{self.text()}"
            try:
                self.running["replay"].wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(f"waited {timeout_s} s in vain\n{self.text()}")


@pytest.fixture
def roles(tmp_path, char_model):
    started = []

    def make(**changes):
        started.append(Roles(tmp_path / "run", char_model, **changes))
        started[-1].start("replay", "replay")
        for name in ("g0", "g1"):
            started[-1].start(name, "generate", "--id", name)
        started[-1].start("learner", "learn")
        return started[-1]

    yield make
    for r in started:
        for name, process in r.running.items():
            if process.poll() is None:
                r.kill(name)


def finish(run):
    assert run.running["learner"].wait(240) == 0, run.text()
    assert run.running["replay"].wait(120) == 0, run.text()
    for name in ("g0", "g1"):
        assert run.running[name].wait(120) == 0, run.text()
    assert (run.folder / "model").is_dir() and not (run.folder / "checkpoints").exists()


def assert_books(run, updates=UPDATES):
    """What survived, from committed.jsonl alone and from metrics.jsonl alone."""
    lines = run.lines()
    kept = surviving(lines)
    assert [c["update"] for c in kept] == [u for u in range(updates) for _ in range(4)]
    assert [c["batch"] for c in kept] == [c["update"] for c in kept], "a batch was skipped"
    assert len({c["group_id"] for c in kept}) == len(kept), "a prompt was trained twice"
    epochs = [c["epoch"] for c in kept]
    assert epochs == sorted(epochs)
    undone = len([x for x in lines if "rolled_back_to" not in x]) - len(kept)
    records = timeline(run.records())
    steps = [r for r in records if "policy/reward" in r]
    assert [r["update"] for r in steps] == list(range(updates))
    assert [r["run/epoch"] for r in steps] == epochs[::4]
    assert steps[-1].get("replay/dropped/rolled_back", 0) == undone
    assert all(r["staleness/lag_max"] <= 4 for r in steps if "staleness/lag_max" in r)
    held = [r["eval/version"] for r in records if "eval/version" in r]
    assert held == sorted(set(held)) and held[-1] == updates
    return lines, kept, steps


def test_a_killed_learner_goes_on_from_its_checkpoint_on_more_ranks(roles):
    run = roles(**{"learner.updates": UPDATES, "learner.checkpoint_every": 2})
    run.wait_for(lambda: len(run.updates()) >= 4 and (run.folder / "checkpoints" / "u2").is_dir())
    run.kill("learner")
    saved = max(int(f.name[1:]) for f in (run.folder / "checkpoints").iterdir() if f.name[1:].isdigit())
    run.arguments.append("learner.ranks=2")
    run.start("learner", "learn")
    finish(run)
    lines, kept, _ = assert_books(run)
    (rollback,) = [x for x in lines if "rolled_back_to" in x]
    assert (rollback["rolled_back_to"], rollback["epoch"], rollback["update"]) == (saved, 1, saved)
    assert Counter(c["epoch"] for c in kept) == {0: 4 * saved, 1: 4 * (UPDATES - saved)}
    # Generators held the version of the lost timeline; they came to the new one and sampled all that was left.
    assert f"going on from the checkpoint of update {saved} as run epoch 1" in run.text()
    assert "were undone" not in run.text()


@pytest.mark.long
def test_without_a_checkpoint_training_begins_again_and_nothing_of_before_counts(roles):
    run = roles(**{"learner.updates": UPDATES, "learner.checkpoint_every": 0})
    run.wait_for(lambda: len(run.updates()) >= 3)
    run.kill("learner")
    run.start("learner", "learn")
    finish(run)
    lines, kept, _ = assert_books(run)
    (rollback,) = [x for x in lines if "rolled_back_to" in x]
    assert (rollback["rolled_back_to"], rollback["epoch"], rollback["update"]) == (0, 1, 0)
    assert {c["epoch"] for c in kept} == {1}
    assert "there is no checkpoint" in run.text()
