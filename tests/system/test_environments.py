"""`asyncrl run` with an environment: episodes of several turns from real generators, trained to the end."""

import math

from tests.system.conftest import ROOT
from tests.system.test_run import assert_clean


def test_episodes_are_sampled_trained_and_evaluated(start_run):
    files = [ROOT / "configs/examples/self_correction.yaml"]
    changes = {"run.name": "episodes", "generator.environment_workers": 2, "sampling.max_new_tokens": 40}
    run = start_run("episodes", *files, **changes)
    assert run.wait() == 0, run.text()
    assert_clean(run)
    updates = run.updates()
    assert [r["update"] for r in updates] == [0, 1, 2, 3, 4, 5]
    for r in updates:
        assert math.isfinite(r["optim/grad_norm"]) and 0 <= r["drift/mean"] <= 1
        # An engine and a learner that took turns apart would differ far more.
        assert r["mismatch/kl_k3"] < 0.5
    final = [r for r in run.records() if r.get("eval/count") and r["update"] == 6]
    assert final and final[0]["eval/count"] == 16
    assert 1 <= final[0]["eval/chain_sum/part/turns"] <= 2
    assert {c["outcome"] for c in run.committed()} == {"trained"}


def test_a_run_whose_environment_is_not_there_starts_nothing(start_run):
    run = start_run("none", **{"task.environment": "examples.environments.calculator:Gone"})
    assert run.wait() == 2, run.text()
    assert "task.environment=examples.environments.calculator:Gone: " in run.output.read_text()
    assert not (run.folder / "logs").exists()
