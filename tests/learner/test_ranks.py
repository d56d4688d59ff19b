"""Real FSDP2 ranks on gloo: numbers do not depend on how a batch is split."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import free_port, run_ranks
from tests.helpers.tiny_models import qwen3_moe

pytestmark = pytest.mark.timeout(600)

WORKER = Path(__file__).with_name("rank_worker.py")
FP64 = ["model.dtype=float64", "model.experts=eager"]
REPLAY = ["algorithm.routes=r3", "algorithm.native_drift_every=0"]
BEHAVIOUR = [*FP64, "algorithm.ratio=behaviour", "algorithm.correction.kind=none", "algorithm.dual_clip=3.0",
             "algorithm.advantage=rloo"]  # fmt: skip
SMALL = "learner.micro_batch_tokens=40"

# Five groups of four on one, two and four ranks, unless a spec says otherwise.
SPECS = {
    "replayed": {"overrides": REPLAY, "updates": 1, "worlds": [1, 2, 4]},
    "replayed_100": {"overrides": [*REPLAY, "learner.micro_batch_tokens=100"], "updates": 1, "worlds": [1, 2, 4]},
    "replayed_40": {"overrides": [*REPLAY, SMALL], "updates": 1, "worlds": [1, 2, 4]},
    "native": {"overrides": FP64, "updates": 5, "worlds": [1, 2, 4]},
    "split": {"overrides": [*FP64, SMALL], "updates": 5, "worlds": [1, 2, 4]},
    "uneven": {"overrides": FP64, "updates": 5, "deal": "uneven", "worlds": [2, 4]},
    "lone": {"overrides": FP64, "groups": 1, "deal": "first", "worlds": [1, 2, 4]},
    "emptied": {"overrides": [*FP64, "algorithm.rdc.on_undefined=drop"], "groups": 2, "uncounted": [1], "updates": 2,
                "worlds": [1, 2]},
    "emptied_split": {"overrides": [*FP64, "algorithm.rdc.on_undefined=drop", SMALL], "groups": 2, "uncounted": [1],
                      "updates": 2, "worlds": [2]},
    "retained": {
        "overrides": [*FP64, "algorithm.rdc.baseline=retained", "algorithm.rdc.normalize=retained",
                      "algorithm.aggregation=sequence_mean"],
    },
    "behaviour_split": {"overrides": [*BEHAVIOUR, SMALL]},
    "behaviour": {"overrides": BEHAVIOUR},
    "hang": {"overrides": [*REPLAY, "algorithm.rdc.mode=observe", "learner.micro_batch_tokens=64"], "updates": 1,
             "lengths": [[60, 60, 60], [10, 10]]},
    **{
        f"ties_{routes}_{checkpointed}": {
            "overrides": [*FP64, f"algorithm.routes={routes}", "algorithm.native_drift_every=0",
                          f"learner.activation_checkpointing={checkpointed}"],
            "updates": 1, "ties": True, "worlds": [2],
        }
        for routes in ("r3", "native")
        for checkpointed in ("false", "true")
    },
    "hand": {"overrides": ["algorithm.correction.kind=none"], "kind": "by_hand", "worlds": [1, 2, 4]},
    "hand_apart": {"overrides": ["algorithm.correction.kind=none", "learner.micro_batch_tokens=12"], "kind": "by_hand",
                   "worlds": [1, 2, 4]},
}  # fmt: skip
COMMON = {"kind": "updates", "updates": 3, "groups": 5, "group_size": 4, "worlds": [1, 2]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of every spec by world size."""
    folder = tmp_path_factory.mktemp("ranks")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(folder / "model")
    base = folder / "base.yaml"
    # 20 responses x 0.13 leave a fraction of the quota to carry.
    base.write_text("model: {path: x}\nalgorithm: {rdc: {q: 0.13}}\nstaleness: {sync_every: 1}\n")
    return train_on_ranks(folder, (1, 2, 4), {n: COMMON | s | {"base": str(base)} for n, s in SPECS.items()})


def train_on_ranks(folder, sizes, specs):
    """What rank_worker.py saves of specs, by world size and name; the model is in folder."""
    for size in sizes:
        (folder / str(size)).mkdir()
    # The largest group first: nobody waits for ranks that have something else to do.
    ports = {size: free_port() for size in sorted(sizes, reverse=True)}
    (folder / "specs.json").write_text(json.dumps({"ports": ports, "specs": specs}))
    ended = run_ranks(WORKER, max(sizes), folder, folder / "model", folder, folder / "specs.json")
    assert ended.codes == [0] * max(sizes), ended.said[-4000:]
    return {
        size: {n: load(folder / str(size) / f"{n}.pt") for n, s in specs.items() if size in s["worlds"]}
        for size in sizes
    }


def load(file):
    return torch.load(file, weights_only=True)


def in_order(value):
    """Text of a value by id, in the order of ids: the bits of a float, and NaN equal to itself."""
    return repr(sorted(value.items())) if isinstance(value, dict) else repr(value)


def assert_same_results(one, two, rel=1e-9):
    for a, b in zip(one["results"], two["results"], strict=True):
        for exact in ("keep", "bucket", "drift", "outcome", "carry"):
            assert in_order(a[exact]) == in_order(b[exact]), exact
        assert a["scalars"].keys() == b["scalars"].keys()
        for name, value in a["scalars"].items():
            other = b["scalars"][name]
            assert (math.isnan(value) and math.isnan(other)) or value == pytest.approx(other, rel=rel, abs=rel), name


def weight_gap(one, two):
    return max(float((one["weights"][n] - two["weights"][n]).abs().max()) for n in one["weights"])


def assert_same_gradients(one, two, rel):
    for a, b in zip(one["gradients"], two["gradients"], strict=True):
        assert a.keys() == b.keys()
        assert len(a) >= 20
        for name in a:
            assert float((a[name] - b[name]).norm()) <= rel * float(a[name].norm()), name


@pytest.mark.parametrize(
    ("name", "world"),
    [(n, w) for n in ("replayed", "replayed_100", "replayed_40") for w in (1, 2, 4) if (n, w) != ("replayed", 1)],
)
def test_gradients_before_the_optimizer_agree_in_fp32_with_replayed_routes(runs, name, world):
    one, other = runs[1]["replayed"], runs[world][name]
    assert_same_gradients(one, other, 1e-5)
    assert_same_results(one, other, rel=1e-4)
    assert one["results"][0]["forced"] == other["results"][0]["forced"] == 1.0
    norms = [run["results"][0]["scalars"]["optim/grad_norm"] for run in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_micro_batches_of_these_gradients_differed(runs):
    """Guards the comparison: one forward for all of it, or several on each rank."""
    passes = {(n, w): runs[w][n]["results"][0]["work"][0] for n in ("replayed", "replayed_40") for w in (1, 2, 4)}
    assert passes["replayed", 1] <= 2
    assert passes["replayed_40", 1] > passes["replayed_40", 2] > passes["replayed_40", 4] > 2
    assert [runs[w]["replayed"]["results"][0]["fused"] for w in (1, 2, 4)] == [True] * 3
    assert [runs[w]["replayed_40"]["results"][0]["fused"] for w in (1, 2, 4)] == [False] * 3


@pytest.mark.parametrize(("name", "world"), [("native", 2), ("native", 4), ("split", 1), ("split", 2), ("split", 4),
                                             ("uneven", 2), ("uneven", 4)])  # fmt: skip
def test_weights_after_five_updates_agree_in_fp64_and_keep_sets_are_equal(runs, name, world):
    one, other = runs[1]["native"], runs[world][name]
    assert_same_results(one, other)
    assert weight_gap(one, other) < 1e-9
    assert any(not all(r["keep"].values()) for r in one["results"]), "the filter never dropped anything"
    assert any(r["carry"] > 0 for r in one["results"])
    assert set(one["results"][0]["bucket"].values()) == {0, 1}


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


def test_separate_scoring_is_used_where_a_share_does_not_fit(runs):
    assert [r["fused"] for r in runs[1]["native"]["results"]] == [True] * 5
    for world in (1, 2, 4):
        assert [r["fused"] for r in runs[world]["split"]["results"]] == [False] * 5


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_without_a_single_row_stay_in_step(runs, world):
    """One group on four ranks: three of them have nothing."""
    assert_same_results(runs[1]["lone"], runs[world]["lone"])
    assert weight_gap(runs[1]["lone"], runs[world]["lone"]) < 1e-9
    assert len(set(runs[world]["lone"]["forwards"])) == 1


@pytest.mark.parametrize("name", ["emptied", "emptied_split"])
def test_rank_whose_rows_were_all_filtered_stays_in_step(runs, name):
    # B55: RDC drops all of rank 1's samples.
    one, two = runs[1]["emptied"], runs[2][name]
    for r in two["results"]:
        assert {i for i, kept in r["keep"].items() if not kept} >= {f"0/p1#0.{i}" for i in range(4)}
        assert r["outcome"] == "stepped"
    assert_same_results(one, two)
    assert weight_gap(one, two) < 1e-9


def test_ranks_of_unequal_length_run_the_same_number_of_passes(runs):
    # B55: 64 tokens a micro-batch, rank 0 has three rows of 60 tokens and rank 1 two of 10.
    one, two = runs[1]["hang"], runs[2]["hang"]
    (result,) = two["results"]
    assert not result["fused"]
    assert result["work"][0] == 3
    # Three to score, three to train, on both ranks.
    assert two["forwards"] == [6, 6]
    # 3 x 60, 2 x 10 and one dummy row of 2 tokens on rank 1.
    assert result["work"][1:] == (3 * 60 + 2 * 10 + 2, 0)
    # Alone: the two short rows together, then the three long ones.
    assert one["forwards"] == [8]
    assert_same_gradients(one, two, 1e-6)
    assert_same_results(one, two, rel=1e-4)


@pytest.mark.parametrize("name", ["hand", "hand_apart"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_mean_over_tokens_is_that_of_the_batch_and_not_a_mean_of_means(runs, world, name):
    # B56: ten tokens of loss 1 and two of loss 4 are 18 / 12; the mean of the ranks' means would be 2.5.
    run = runs[world][name]
    assert run["loss"] == pytest.approx(1.5, abs=1e-6)
    assert run["fused"] == (name == "hand")
    assert_same_gradients(runs[1]["hand"], run, 1e-6)
    assert run["norm"] == pytest.approx(runs[1]["hand"]["norm"], rel=1e-6)


@pytest.mark.parametrize("routes", ["r3", "native"])
def test_recomputed_routers_with_ties_choose_what_the_forward_chose(runs, routes):
    # B13: exact ties between experts, and noise on the second evaluation.
    whole, checkpointed = runs[2][f"ties_{routes}_false"], runs[2][f"ties_{routes}_true"]
    assert whole["rerun"] == 0
    # Two layers, run again for each forward with a graph; what has none is not run again.
    assert checkpointed["rerun"] > 0
    assert checkpointed["rerun"] % 2 == 0
    assert_same_gradients(whole, checkpointed, 1e-6)
    # Drift, scored tokens and every other scalar: the routes of the second evaluation are not counted.
    assert_same_results(whole, checkpointed, rel=1e-6)
    assert whole["results"][0]["scalars"].get("drift/mean", 1.0) > 0
