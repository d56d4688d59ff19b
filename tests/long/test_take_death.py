"""A rank is killed in the middle of a take of four updates: each group counts once, what was undone is made again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import save_config, validate
from asyncrl.launcher import STANDALONE
from asyncrl.metrics.sink import read_jsonl
from asyncrl.models.describe import describe
from asyncrl.process import role_environment
from asyncrl.replay.journal import FILE, surviving
from tests.helpers.char_model import save_char_model
from tests.learner.feeder import Feeder

ROOT = Path(__file__).parents[2]
UPDATES, M, G = 8, 4, 2
LIMIT_S = 200

pytestmark = pytest.mark.timeout(600)


def make_config(folder, checkpoint_every):
    model = save_char_model(folder / "model", steps=0)
    return validate(
        {
            "run": {"dir": str(folder), "name": "r"},
            "model": {"path": str(model)},
            "task": {"train_size": 64, "max_terms": 3, "eval_size": 8},
            "sampling": {"max_new_tokens": 12},
            "algorithm": {"groups_per_update": G, "group_size": 4, "rdc": {"q": 0.2}},
            "staleness": {"sync_every": M, "updates_per_take": M, "max_lag": M - 1},
            "learner": {"updates": UPDATES, "ranks": 2, "device": "cpu", "checkpoint_every": checkpoint_every,
                        "collective_timeout_s": 60, "lr": 0.001, "warmup_updates": 0},
            "eval": {"every": 0},
            "logging": {"tensorboard": False},
        }
    )  # fmt: skip


def learner(config, file, kill=""):
    """The learner as a supervisor starts it, to its end. Waits at most LIMIT_S."""
    command = [
        sys.executable, "-m", "asyncrl.launcher", *STANDALONE, "--nproc-per-node", str(config.learner.ranks),
        str(ROOT / "tests/learner/killed_learner.py"), str(file),
    ]  # fmt: skip
    env = {**role_environment(1), "PYTHONPATH": str(ROOT), "KILL": kill}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def journal(config):
    return [json.loads(line) for line in (config.run_dir / FILE).read_text().splitlines()]


def live_through(folder, checkpoint_every, rank, batch):
    """A run whose learner is killed behind the commit of `batch` and started again; what replay wrote down."""
    config = make_config(folder, checkpoint_every)
    config.run_dir.mkdir()
    file = config.run_dir / "config.yaml"
    save_config(config, file)
    with (folder / "replay.log").open("w") as log:
        replay = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "replay", str(file)], env=role_environment(1), cwd=ROOT, stdout=log,
            stderr=log,
        )  # fmt: skip
    feeder = Feeder(config, describe(config.model.path))
    try:
        died = learner(config, file, kill=f"{rank}:{batch}")
        assert died.returncode == 128 + 9, died.stderr[-3000:]
        before = journal(config)
        again = learner(config, file)
        assert again.returncode == 0, again.stderr[-3000:] + (folder / "replay.log").read_text()[-3000:]
        assert replay.wait(60) == 0
        feeder.end()
    finally:
        feeder._over.set()
        replay.kill()
    return config, feeder, before, journal(config)


def check_timeline(config, feeder, before, lines):
    """Every group once on the surviving timeline; what the dead learner had used up behind its checkpoint, again.

    Returns the first batch that was undone.
    """
    kept = surviving(lines)
    ids = [c["group_id"] for c in kept]
    assert [c["batch"] for c in kept] == [b for b in range(UPDATES) for _ in range(G)]
    assert [c["update"] for c in kept] == [u for u in range(UPDATES) for _ in range(G)]
    assert {c["outcome"] for c in kept} == {"trained"}
    assert len(set(ids)) == UPDATES * G, "a group was trained twice"
    (rollback,) = [line for line in lines if "rolled_back_to" in line]
    first_void = rollback["rolled_back_to"]
    assert (rollback["update"], rollback["epoch"]) == (first_void, 1)
    assert {c["epoch"] for c in kept if c["batch"] < first_void} <= {0}
    assert {c["epoch"] for c in kept if c["batch"] >= first_void} == {1}
    # Whatever was used up behind the checkpoint is trained again, and counted.
    undone = [c["group_id"] for c in before if c["batch"] >= first_void]
    assert set(undone) <= set(ids) and len(undone) == len(before) - first_void * G
    last = [r for r in read_jsonl(config.run_dir / "metrics.jsonl") if "policy/reward" in r][-1]
    assert last["replay/dropped/rolled_back"] == len(undone)
    # Nothing of the take that the dead rank had is lost: the first 16 prompts are the 16 trained ones.
    leased = list(dict.fromkeys(group for group, _ in feeder.sent))
    assert set(ids) == set(leased[: UPDATES * G])
    return first_void


def check_updates(config):
    """Each update of the surviving timeline measured drift under its own weights, and made one step."""
    by_update = {r["update"]: r for r in read_jsonl(config.run_dir / "metrics.jsonl") if "policy/reward" in r}
    assert sorted(by_update) == list(range(UPDATES))
    assert all(r["optim/stepped"] == 1 and r["drift/undefined"] == 0 for r in by_update.values())
    assert len({r["drift/mean"] for r in by_update.values()}) == UPDATES
    assert all(r["staleness/lag_max"] <= M - 1 for r in by_update.values())


def test_rank_1_dies_behind_the_second_commit_of_the_second_take(tmp_path):
    """Batches 4 to 7 are the second take. That of 5 is in no checkpoint; that of update 5 may not be complete yet."""
    config, feeder, before, lines = live_through(tmp_path, 1, rank=1, batch=5)
    assert [c["batch"] for c in before] == [b for b in range(6) for _ in range(G)]
    assert check_timeline(config, feeder, before, lines) in (4, 5)
    check_updates(config)


def test_rank_0_dies_there_and_no_checkpoint_was_ever_made(tmp_path):
    """Training begins again at the start model: all six batches are undone, and each group is trained once more."""
    config, feeder, before, lines = live_through(tmp_path, 0, rank=0, batch=5)
    assert [c["batch"] for c in before] == [b for b in range(6) for _ in range(G)]
    assert check_timeline(config, feeder, before, lines) == 0
    check_updates(config)


def test_rank_0_dies_behind_the_second_commit_of_the_first_take(tmp_path):
    """Two of four batches are committed, and the checkpoint of update 1 or none is complete."""
    config, feeder, before, lines = live_through(tmp_path, 1, rank=0, batch=1)
    assert [c["batch"] for c in before] == [0] * G + [1] * G
    assert check_timeline(config, feeder, before, lines) in (0, 1)
    check_updates(config)
