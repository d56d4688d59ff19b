"""A reference policy on real FSDP2 ranks: numbers do not depend on the split, and a fault on one rank is one of all."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.ranks import free_port, run_ranks
from tests.helpers.tiny_models import qwen3_moe
from tests.learner.test_ranks import assert_same_gradients, assert_same_results, load, weight_gap

pytestmark = pytest.mark.timeout(600)

WORKER = Path(__file__).with_name("reference_worker.py")
FP64 = ["model.dtype=float64", "model.experts=eager"]
SMALL = "learner.micro_batch_tokens=40"
REWARD = ["algorithm.kl.where=reward", "algorithm.advantage=dr_grpo"]
# Five groups of four, of which every third has equal rewards.
SPECS = {
    "plain": {"overrides": ["algorithm.kl.coef=0"], "worlds": [1]},
    "loss": {"overrides": []},
    "loss_split": {"overrides": [SMALL]},
    "reward": {"overrides": REWARD},
    "reward_split": {"overrides": [*REWARD, SMALL]},
    "retained": {"overrides": [*REWARD, "algorithm.rdc.baseline=retained", "algorithm.rdc.normalize=retained",
                               "algorithm.aggregation=sequence_mean"]},
    "lone": {"overrides": [], "groups": 1, "deal": "first"},
    "broken_loss": {"overrides": [], "broken": 1, "worlds": [2]},
    "broken_reward": {"overrides": REWARD, "broken": 1, "worlds": [2]},
    "weight": {"overrides": [], "updates": 0, "worlds": [2]},
}  # fmt: skip
COMMON = {"updates": 3, "groups": 5, "group_size": 4, "worlds": [1, 2]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of every spec by world size."""
    folder = tmp_path_factory.mktemp("reference")
    qwen3_moe(vocab=64, seed=3).save_pretrained(folder / "model")
    qwen3_moe(vocab=64, seed=4).save_pretrained(folder / "other")
    shutil.copytree(folder / "other", folder / "damaged")
    weights = load_file(folder / "damaged" / "model.safetensors")
    # The last row of the output matrix lies on the last rank.
    weights["lm_head.weight"][-1, 0] = math.nan
    save_file(weights, folder / "damaged" / "model.safetensors", {"format": "pt"})
    base = folder / "base.yaml"
    base.write_text("model: {path: x}\nalgorithm: {rdc: {q: 0.13}}\nstaleness: {sync_every: 1}\n")
    specs = {}
    for name, spec in SPECS.items():
        other = folder / ("damaged" if name == "weight" else "other")
        with_kl = [] if name == "plain" else ["algorithm.kl.coef=0.5", f"algorithm.kl.reference={other}"]
        specs[name] = COMMON | spec | {"base": str(base), "overrides": [*FP64, *with_kl, *spec["overrides"]]}
    for size in (1, 2):
        (folder / str(size)).mkdir()
    (folder / "specs.json").write_text(json.dumps({"ports": {s: free_port() for s in (2, 1)}, "specs": specs}))
    ended = run_ranks(WORKER, 2, folder, folder / "model", folder, folder / "specs.json")
    assert ended.codes == [0, 0], ended.said[-4000:]
    found = {s: {n: load(folder / str(s) / f"{n}.pt") for n, x in specs.items() if s in x["worlds"]} for s in (1, 2)}
    return found | {"said": ended.said}


@pytest.mark.parametrize(
    ("name", "other", "world"),
    [("loss", "loss", 2), ("loss", "loss_split", 1), ("loss", "loss_split", 2), ("reward", "reward", 2),
     ("reward", "reward_split", 1), ("reward", "reward_split", 2), ("retained", "retained", 2), ("lone", "lone", 2)],
)  # fmt: skip
def test_ranks_and_micro_batches_change_no_number(runs, name, other, world):
    one, two = runs[1][name], runs[world][other]
    assert_same_results(one, two)
    assert_same_gradients(one, two, 1e-9)
    assert weight_gap(one, two) < 1e-9
    for result in one["results"]:
        scalars = result["scalars"]
        assert scalars["policy/ref_kl"] > 0 and "policy/ref_kl_k1" in scalars
        assert ("policy/kl_loss" in scalars) == (name in ("loss", "lone"))


def test_these_runs_were_split_and_filtered_and_had_groups_of_equal_rewards(runs):
    """Guards the comparison above."""
    assert [r["fused"] for r in runs[1]["loss"]["results"]] == [True] * 3
    assert [r["fused"] for r in runs[1]["loss_split"]["results"]] == [False] * 3
    assert all(r["scalars"]["policy/zero_variance_fraction"] > 0 for r in runs[1]["loss"]["results"])
    assert any(not all(r["keep"].values()) for r in runs[1]["loss"]["results"])
    for name in ("loss", "reward", "retained"):
        assert weight_gap(runs[1][name], runs[1]["plain"]) > 1e-6, "the term changed nothing"
    assert weight_gap(runs[1]["reward"], runs[1]["retained"]) > 1e-9


@pytest.mark.parametrize("name", ["broken_loss", "broken_reward"])
def test_a_log_prob_of_the_reference_that_is_none_on_one_rank_skips_the_update_on_all(runs, name):
    """The worker's ranks ended with status 0: neither raised, neither waited for the other."""
    before, broken, after = runs[2][name]["results"]
    assert (broken["outcome"], broken["reason"]) == ("non_finite", "reference")
    assert all(broken["keep"].values()) and torch.isfinite(broken["advantages"]).all()
    assert "policy/ref_kl" not in broken["scalars"]
    assert before["outcome"] == after["outcome"] == "stepped"
    assert "a non-finite log-prob of the reference policy: 0/p" in runs["said"] and "on rank 1" in runs["said"]


def test_a_weight_of_the_reference_that_is_none_on_one_rank_is_refused_on_all(runs):
    first, last = runs[2]["weight"]["said"]
    assert "algorithm.kl.reference=" in first and "is not finite (on another rank); set it to another folder" in first
    assert "not finite (model.lm_head.weight)" in last
