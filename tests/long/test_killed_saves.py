"""A learner's process that is killed before one line after the other of a save: the newest complete one is loaded."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.config import validate
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.stored import Progress, newest
from asyncrl.process import role_environment
from tests.helpers.tiny_models import qwen3_moe

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(1500)


def killed_at(line, model, run):
    """True when the process was killed, False when it had saved before that."""
    command = [sys.executable, str(ROOT / "tests/learner/killed_save.py"), str(model), str(run), str(line)]
    env = {**role_environment(1), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-2000:]
    return done.returncode != 0


def test_killed_before_any_line_of_a_save_the_newest_complete_one_is_loaded(tmp_path, world):
    model, first, run = tmp_path / "model", tmp_path / "first", tmp_path / "run"
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(model)
    settings = validate({"model": {"path": str(model)}})
    policy = build_policy(settings.model, settings.learner, False, world)
    updater = Updater(policy, settings.learner, settings.algorithm, world)
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(2.0)
    assert Checkpoints(first, "f", 1, world).save(policy, updater, Progress(0, 2, 2, 0.0))
    found, line, alive = [], 1, True
    while alive:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(first, run)
        alive = killed_at(line, model, run)
        has_name = (run / "checkpoints" / "u4").exists()
        progress = Checkpoints(run, "f", 1, world).load(policy, updater)
        assert progress == newest(run)
        (value,) = policy.model.lm_head.weight.full_tensor().unique().tolist()
        assert value == progress.update == (4 if has_name else 2), line
        assert not list((run / "checkpoints").glob("*.part"))
        found.append(progress.update)
        # More of them in the part that gives the names.
        line += 9 if has_name else 103
    assert found == sorted(found) and found.count(2) >= 20 and found.count(4) >= 3, found
