"""A run with learner.keep_best whose learner is killed: at its end RUN/best is the best version that stands."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.learner.export import export_step
from asyncrl.metrics.sink import timeline
from asyncrl.models.load import load_model
from asyncrl.process import role_environment
from tests.system.conftest import ROOT
from tests.system.test_resume import UPDATES, finish, roles

__all__ = ["roles"]

# A random model solves nothing; how long it talks differs from version to version.
METRIC = "eval/response_length"

pytestmark = pytest.mark.timeout(600)


def test_the_best_policy_survives_a_killed_learner_and_is_that_of_the_records(roles, tmp_path):
    run = roles(
        **{
            "learner.updates": UPDATES, "learner.checkpoint_every": 2, "learner.keep_best": METRIC,
            "logging.dump_every": 2,
        }
    )  # fmt: skip
    best, u2 = run.folder / "best", run.folder / "checkpoints" / "u2"
    run.wait_for(lambda: len(run.updates()) >= 4 and u2.is_dir() and best.is_dir())
    run.kill("learner")
    run.start("learner", "learn")
    finish(run)
    records = timeline(run.records())
    held = [r for r in records if METRIC in r]
    wanted = max(held, key=lambda r: (r[METRIC], r["eval/version"]))
    note = json.loads((best / "best.json").read_text())
    assert (note["metric"], note["value"], note["update"]) == (METRIC, wanted[METRIC], wanted["eval/version"])
    assert note["complete"] is True, "an evaluation of a small job is not cut short"
    # The weights are those that learned from there, or the last ones.
    last = note["update"] == UPDATES
    policy = run.folder / "model" if last else run.folder / "dumps" / f"u{note['update']}" / "policy"
    stored, same = load_file(best / "model.safetensors"), load_file(policy / "model.safetensors")
    assert stored.keys() == same.keys() and all(torch.equal(stored[n], same[n]) for n in same)
    assert load_model(str(best), "float32") is not None
    assert export_step(run.folder, "best", tmp_path / "out") > 0
    assert not (run.folder / "best.pending").exists() and list(run.folder.glob("best.*")) == []
    assert [r["run/best"] for r in records if "run/best" in r], "it is in the records"
    shown = subprocess.run(
        [sys.executable, "-m", "asyncrl", "samples", str(run.folder), "--limit", "2"], cwd=ROOT, timeout=120,
        env=role_environment(1), capture_output=True, text=True,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
