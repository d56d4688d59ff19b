"""Faults on rank 1 of two real ranks (B57): both skip together, nothing moves, nothing is published or saved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.process import role_environment

ROOT = Path(__file__).parents[2]
KINDS = {
    "gradient nan": "gradient", "gradient inf": "gradient", "log_prob": "log_prob", "loss": "loss", "weight": "weight",
    "filtered": "filtered",
}  # fmt: skip

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def faults(model_dir, tmp_path_factory):
    """What each rank wrote down, and how the torchrun ended. Waits for it at most 500 s."""
    out = tmp_path_factory.mktemp("faults")
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "tests/learner/fault_worker.py"), model_dir, str(out),
        ],
        cwd=ROOT, env={**role_environment(1), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    files = [out / f"{rank}.json" for rank in (0, 1)]
    assert all(f.exists() for f in files), done.stderr[-4000:]
    return [json.loads(f.read_text()) for f in files], done


CASES = [("native", kind) for kind in KINDS] + [("r3", "log_prob"), ("r3", "gradient nan")]


@pytest.mark.parametrize(("routes", "kind"), CASES)
def test_b57_a_fault_on_one_rank_skips_the_update_on_both_and_moves_nothing(faults, routes, kind):
    for rank, results in enumerate(faults[0]):
        found = results[routes][kind]
        assert found["outcome"] == ("filtered" if kind == "filtered" else "non_finite"), rank
        assert found["reason"] == KINDS[kind], rank
        assert not found["moved"], f"weights or moments of rank {rank} are not what they were"
        assert (found["clock"], found["told"]) == (0, 0), rank
    # What was saved last is of the update before.
    saved = [results[routes][kind]["saved"] for results in faults[0]]
    before = [k for r, k in CASES if r == routes].index(kind) + 1
    assert saved == [before, before]


@pytest.mark.parametrize("routes", ["native", "r3"])
def test_no_response_is_dropped_by_numbers_that_are_none(faults, routes):
    for results in faults[0]:
        assert results[routes]["log_prob"]["kept"]
        assert results[routes]["log_prob"]["undefined"] >= 1
        assert results[routes]["gradient nan"]["undefined"] == 0


def test_b57_a_weight_that_is_none_is_not_published_or_saved_by_anybody(faults):
    for results in faults[0]:
        found = results["native"]["weight"]
        assert (found["published anyway"], found["saved anyway"]) == (0, False)


def test_each_skip_is_counted_by_its_reason_on_every_rank(faults):
    for results in faults[0]:
        assert results["native"]["counts"] == {"gradient": 2, "log_prob": 1, "loss": 1, "weight": 1, "filtered": 1}


def test_a_step_that_breaks_a_weight_of_one_rank_ends_both_before_anything_is_told(faults):
    for results in faults[0]:
        assert "made a weight non-finite (model.lm_head.weight on rank 1)" in results["step"]
        assert (results["step clock"], results["step told"]) == (0, 0)


def test_b57_the_learner_stops_with_a_status_and_the_kind_after_the_limit(faults):
    _, done = faults
    assert done.returncode != 0
    assert "3 updates in a row were skipped (learner.max_skipped_updates) at update" in done.stderr
    assert "3 x a non-finite gradient (look at optim/grad_norm" in done.stderr
    assert "a non-finite log-prob of the learner: 0/p" in done.stderr and "on rank 1" in done.stderr
