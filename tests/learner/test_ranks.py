"""Real FSDP2 ranks on gloo: numbers do not depend on how a batch is split."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.process import role_environment
from tests.helpers.tiny_models import qwen3_moe

ROOT = Path(__file__).parents[2]
FP64 = ["model.dtype=float64", "model.experts=eager"]

SPECS = {
    "replayed": {"overrides": ["algorithm.routes=r3", "algorithm.native_drift_every=0"], "updates": 1},
    "native": {"overrides": FP64},
    "split": {"overrides": [*FP64, "learner.micro_batch_tokens=40"]},
    "lone": {"overrides": FP64, "groups": 1, "keep_first_rank": True},
    "retained": {
        "overrides": [*FP64, "algorithm.rdc.baseline=retained", "algorithm.rdc.normalize=retained",
                      "algorithm.aggregation=sequence_mean"],
    },
    "behaviour_split": {"overrides": [*FP64, "algorithm.ratio=behaviour", "algorithm.correction.kind=none",
                                      "algorithm.dual_clip=3.0", "algorithm.advantage=rloo",
                                      "learner.micro_batch_tokens=40"]},
    "behaviour": {"overrides": [*FP64, "algorithm.ratio=behaviour", "algorithm.correction.kind=none",
                                "algorithm.dual_clip=3.0", "algorithm.advantage=rloo"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of every spec by world size. Waits for each torchrun at most 240 s."""
    folder = tmp_path_factory.mktemp("ranks")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(folder / "model")
    base = folder / "base.yaml"
    base.write_text("model: {path: x}\nalgorithm: {rdc: {q: 0.2}}\nstaleness: {sync_every: 1}\n")
    common = {"updates": 3, "groups": 5, "group_size": 4, "base": str(base)}
    (folder / "specs.json").write_text(json.dumps({n: common | s for n, s in SPECS.items()}))
    out = {}
    for world in (1, 2):
        (folder / str(world)).mkdir()
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
                str(ROOT / "tests/learner/rank_worker.py"), str(folder / "model"), str(folder / str(world)),
                str(folder / "specs.json"),
            ],
            cwd=ROOT, env={**role_environment(1), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        out[world] = {n: torch.load(folder / str(world) / f"{n}.pt", weights_only=True) for n in SPECS}
    return out


def assert_same_results(one, two, rel=1e-9):
    for a, b in zip(one["results"], two["results"], strict=True):
        for exact in ("keep", "drift", "outcome", "carry"):
            assert a[exact] == b[exact], exact
        assert a["scalars"].keys() == b["scalars"].keys()
        for name, value in a["scalars"].items():
            other = b["scalars"][name]
            assert (math.isnan(value) and math.isnan(other)) or value == pytest.approx(other, rel=rel, abs=rel), name


def weight_gap(one, two):
    return max(float((one["weights"][n] - two["weights"][n]).abs().max()) for n in one["weights"])


def test_gradients_before_the_optimizer_agree_in_fp32_with_replayed_routes(runs):
    one, two = runs[1]["replayed"], runs[2]["replayed"]
    (a,), (b,) = one["gradients"], two["gradients"]
    assert a.keys() == b.keys()
    assert len(a) >= 20
    for name in a:
        assert float((a[name] - b[name]).norm()) <= 1e-5 * float(a[name].norm()), name
    assert_same_results(one, two, rel=1e-4)
    assert one["results"][0]["forced"] == 1.0


def test_weights_agree_in_fp64_and_keep_sets_are_equal(runs):
    one, two = runs[1]["native"], runs[2]["native"]
    assert_same_results(one, two)
    assert weight_gap(one, two) < 1e-9
    assert any(not all(r["keep"].values()) for r in one["results"]), "the filter never dropped anything"


def test_weights_moved(runs):
    """Guards the comparisons of this file: a learner that never steps agrees with itself."""
    assert weight_gap(runs[1]["replayed"], runs[1]["native"]) > 1e-5


@pytest.mark.parametrize("name", ["retained", "behaviour"])
def test_other_objectives_agree_too(runs, name):
    assert_same_results(runs[1][name], runs[2][name])
    assert weight_gap(runs[1][name], runs[2][name]) < 1e-9
    assert weight_gap(runs[1][name], runs[1]["native"]) > 1e-9


def test_clipped_tokens_are_counted_alike_however_the_batch_is_split(runs):
    """Rows without advantage are forwarded by one way of scoring and not by the other."""
    whole, split = runs[1]["behaviour"], runs[2]["behaviour_split"]
    assert_same_results(whole, split)
    assert all(0 < r["scalars"]["policy/clip_fraction"] < 1 for r in whole["results"])
    assert any(r["scalars"]["policy/zero_variance_fraction"] > 0 for r in whole["results"])


def test_separate_scoring_with_small_micro_batches_gives_the_fused_numbers(runs):
    fused, split = runs[1]["native"], runs[2]["split"]
    assert [r["fused"] for r in fused["results"]] == [True] * 3
    assert [r["fused"] for r in split["results"]] == [False] * 3
    assert_same_results(fused, split)
    assert weight_gap(fused, split) < 1e-9


def test_rank_without_a_single_row_stays_in_step(runs):
    assert_same_results(runs[1]["lone"], runs[2]["lone"])
    assert weight_gap(runs[1]["lone"], runs[2]["lone"]) < 1e-9
