"""How far the router moved since the start of a take: by an independent model, at any split, and where it did not."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.learner.batch import collate, rows_of
from asyncrl.learner.records import update_scalars
from asyncrl.models.describe import describe
from asyncrl.models.load import load_model
from asyncrl.models.routes import RouteHook
from asyncrl.types import ModelInfo
from tests.helpers.tiny_models import FAMILIES, qwen3_dense, qwen3_moe
from tests.learner.groups import make_groups
from tests.learner.takes import batches_of, made, run_take, same_gradients
from tests.learner.test_ranks import assert_same_gradients, assert_same_results, train_on_ranks

RSPO = {"correction": {"kind": "rspo"}, "rdc": {"mode": "observe"}}


def router_outputs(folder, weights, row, forced=None):
    """Log-scores of all experts [L, S, E] and the chosen ones [L, S, K] of a plain model with these weights.

    forced int64 [L, S - 1, K]: experts of the learner's forward under replay.
    """
    model = load_model(folder, "float32")
    # Buffers are those of the folder; nothing trains them.
    keys = model.load_state_dict({n.removeprefix("model."): t for n, t in weights.items()}, strict=False)
    assert not keys.unexpected_keys and not {n for n, _ in model.named_parameters()} & set(keys.missing_keys)
    hook, found = RouteHook(model), []
    for router in hook.routers.values():
        router.register_forward_hook(lambda _m, _args, out: found.append((out[0].double(), out[2])))
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.trajectory.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        if forced is None:
            model(ids)
        else:
            whole_LBSK = torch.cat([forced, torch.full_like(forced[:, :1], -1)], dim=1)[:, None]
            with hook.replay(whole_LBSK):
                model(ids)
    sigmoid = model.config.model_type == "deepseek_v3"
    logs = [torch.nn.functional.logsigmoid(x) if sigmoid else x.log_softmax(-1) for x, _ in found]
    return torch.stack(logs), torch.stack([chosen for _, chosen in found])


def by_hand(folder, then, now, row, forced=None):
    """The shift at every input position [S], from plain models with the weights of then and of now."""
    (before, chosen), (after, _) = (router_outputs(folder, w, row, forced) for w in (then, now))
    moved = after.gather(-1, chosen) - before.gather(-1, chosen)
    return moved.abs().mean(dim=(0, 2))


def rollout_routes(row):
    return torch.from_numpy(row.trajectory.routes.astype(np.int64)).permute(1, 0, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("shift")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(root / "qwen3_moe")
    FAMILIES["deepseek_v3"]().save_pretrained(root / "deepseek_v3")
    return root


@pytest.mark.parametrize("scoring", ["auto", "separate"])
@pytest.mark.parametrize(
    ("name", "routes", "budget"),
    [
        ("qwen3_moe", "native", 4096),
        ("qwen3_moe", "native", 40),
        ("qwen3_moe", "r3", 40),
        ("qwen3_moe", "r2", 40),
        ("deepseek_v3", "native", 4096),
    ],
)
def test_the_shift_is_that_of_two_plain_models_at_the_experts_used_then(folders, world, name, routes, budget, scoring):
    config, policy, updater = made(
        folders / name, world, algorithm=RSPO | {"routes": routes},
        learner={"lr": 0.02, "warmup_updates": 0, "scoring": scoring, "micro_batch_tokens": budget},
    )  # fmt: skip
    batches = batches_of(describe(folders / name), 3)
    assert len({row.size for row in batches[1]}) > 3, "rows of one length would not show what padding does"
    state, outcomes, before = run_take(config, policy, updater, batches, world)
    assert [o.fused for o in outcomes] == [scoring == "auto" and budget == 4096] * 3
    for u, batch in enumerate(batches):
        shifts = updater.values[u].router_shift
        assert [len(s) for s in shifts] == [row.size for row in batch]
        if u == 0:
            # Another padding of the same rows rounds differently, in the last bits.
            assert max(float(s.max()) for s in shifts) < 1e-4
            continue
        for row, shift in list(zip(batch, shifts, strict=True))[::3]:
            forced = rollout_routes(row) if routes == "r3" else None
            if routes == "r2":
                taken = state.routes[row.trajectory.trajectory_id].routes[:-1]
                forced = torch.from_numpy(taken.astype(np.int64)).permute(1, 0, 2)
            expected = by_hand(folders / name, before[0], before[u], row, forced)
            # The last input predicts nothing, and under replay it has no route of its own.
            torch.testing.assert_close(shift[:-1].double(), expected[:-1], atol=1e-4, rtol=1e-3)
            assert float(shift[:-1].min()) > 0


@pytest.mark.parametrize("routes", ["native", "r3", "r2"])
def test_the_first_batch_of_a_take_has_no_shift(model_dir, world, routes):
    """In the micro-batch in which the take was scored, not even in the last bit; so its gradient is that of none."""
    info = describe(model_dir)
    found = []
    for kind in ("rspo", "none"):
        config, policy, updater = made(
            model_dir, world, algorithm={"routes": routes, "correction": {"kind": kind}, "rdc": {"mode": "observe"}}
        )
        run_take(config, policy, updater, batches_of(info, 1), world)
        found.append(updater)
    assert all(bool((s == 0).all()) for s in found[0].values[0].router_shift)
    assert found[1].values[0].router_shift is None
    assert same_gradients(*found)


def test_later_batches_have_a_weight_below_one_and_another_gradient(model_dir, world):
    info = describe(model_dir)
    found, weights = [], []
    for kind in ("rspo", "none"):
        algorithm = {"correction": {"kind": kind}, "rdc": {"mode": "off"}}
        config, policy, updater = made(model_dir, world, algorithm=algorithm)
        _, outcomes, _ = run_take(config, policy, updater, batches_of(info, 2), world)
        found.append(updater)
        weights.append([update_scalars(o, info).get("mismatch/weight_mean") for o in outcomes])
    assert weights[0][0] == pytest.approx(1, abs=1e-4)
    shifts, loss_tokens = found[0].values[1].router_shift, masks(batches_of(info, 2)[1])
    shift = torch.cat([s[mask] for s, mask in zip(shifts, loss_tokens, strict=True)])
    assert weights[0][1] == pytest.approx(float((-shift).exp().clamp_min(0.8).mean()), abs=1e-5)
    assert weights[0][1] < 0.999
    assert weights[1] == [None, None]
    first, second = zip(*(f.gradients for f in found), strict=True)
    assert all(torch.equal(first[0][n], first[1][n]) for n in first[0])
    assert not all(torch.equal(second[0][n], second[1][n]) for n in second[0])


def masks(batch):
    """The loss tokens of every row at its input positions [S]."""
    out = []
    for row in batch:
        mask = torch.zeros(row.size, dtype=torch.bool)
        first = len(row.prompt_ids) - 1
        mask[first : first + row.trajectory.num_tokens] = torch.from_numpy(row.loss_mask)
        out.append(mask)
    return out


def test_checkpointing_and_the_split_into_micro_batches_change_no_shift(model_dir, world):
    info = describe(model_dir)
    found = []
    for checkpointing, budget, scoring in ((False, 4096, "auto"), (True, 4096, "auto"), (True, 40, "separate")):
        config, policy, updater = made(
            model_dir, world, algorithm=RSPO, model={"dtype": "float64", "experts": "eager"},
            learner={"lr": 0.02, "warmup_updates": 0, "activation_checkpointing": checkpointing,
                     "micro_batch_tokens": budget, "scoring": scoring},
        )  # fmt: skip
        run_take(config, policy, updater, batches_of(info, 3), world)
        found.append(updater)
    assert same_gradients(found[0], found[1])
    for u in range(3):
        for a, b, c in zip(*(f.values[u].router_shift for f in found), strict=True):
            assert torch.equal(a, b)
            # Scores are float32, whatever the model computes in.
            torch.testing.assert_close(a, c, atol=1e-5, rtol=1e-5)


def test_a_response_of_another_length_has_the_shift_it_has_alone(model_dir, world):
    info = describe(model_dir)
    config, policy, updater = made(model_dir, world, algorithm=RSPO)
    batches = batches_of(info, 2)
    state, _, _ = run_take(config, policy, updater, batches, world)
    rows = [replace(r, taken=state.routes[r.trajectory.trajectory_id]) for r in batches[1]]
    shortest = min(range(len(rows)), key=lambda i: rows[i].size)
    found = []
    for index in (range(len(rows)), [shortest]):
        batch = collate(rows, list(index), info, False, False)
        with torch.no_grad():
            policy(batch, True)
        moved = (policy.hook.scores - batch.watched_scores).abs().mean(dim=(0, 3))
        found.append(moved[list(index).index(shortest), : rows[shortest].size])
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
    assert float(found[0].max()) > 0


def test_r3_with_a_shift_forces_the_routes_of_the_rollout_and_no_others(model_dir, world):
    """Where these are unknown the experts of the scoring pass are watched, and the router chooses anew."""
    info, known = describe(model_dir), 3
    config, policy, updater = made(model_dir, world, algorithm=RSPO | {"routes": "r3"})
    batches = [
        [replace(r, trajectory=replace(r.trajectory, routes_from=known), counts=None) for r in batch]
        for batch in batches_of(info, 2)
    ]
    seen = []
    policy.register_forward_hook(lambda _m, args, _out: seen.append((args[0], policy.hook.used, policy.hook.native)))
    state, outcomes, _ = run_take(config, policy, updater, batches, world)
    anew = 0
    for batch, used, native in seen:
        if batch.routes is None or batch.watched is None or not batch.index:
            continue
        assert bool((batch.routes[:, :, :known] == -1).all())
        assert torch.equal(used[:, :, :known], native[:, :, :known])
        anew += int((used[:, :, :known] != batch.watched[:, :, :known]).sum())
    assert anew > 0, "the router must choose otherwise than at the start of the take, else this test shows nothing"
    assert all(not t.forced for t in state.routes.values())
    assert all(0 < o.forced_fraction < 1 for o in outcomes)


@pytest.mark.parametrize("routes", ["native", "r3", "r2"])
def test_the_only_batch_of_a_take_has_no_shift_and_trains_as_without(model_dir, world, routes):
    info = describe(model_dir)
    found = []
    for kind in ("rspo", "none"):
        config, policy, updater = made(
            model_dir, world, algorithm={"routes": routes, "correction": {"kind": kind}, "rdc": {"mode": "observe"}}
        )
        run_take(config, policy, updater, batches_of(info, 1), world, alone=True)
        found.append(updater)
    assert found[0].values[0].router_shift is None
    assert same_gradients(*found)


def test_rows_without_the_scores_of_their_take_are_refused_by_name(model_dir, world):
    info = describe(model_dir)
    config, policy, updater = made(model_dir, world, algorithm=RSPO)
    state, _, _ = run_take(config, policy, updater, batches_of(info, 1), world)
    rows = [replace(r, taken=state.routes[r.trajectory.trajectory_id]) for r in batches_of(info, 1)[0]]
    rows[1] = replace(rows[1], taken=None)
    with pytest.raises(ValueError, match=r"0:0/p0#0\.1: no router scores of the start of its take"):
        collate(rows, [0, 1], info, True, False)


def test_bfloat16_takes_have_a_finite_shift(model_dir, world):
    info = describe(model_dir)
    config, policy, updater = made(model_dir, world, algorithm=RSPO, model={"dtype": "bfloat16"})
    run_take(config, policy, updater, batches_of(info, 2), world)
    for u, bounds in enumerate(((-1e-9, 0.2), (1e-3, math.inf))):
        shift = torch.cat(list(updater.values[u].router_shift))
        assert shift.dtype == torch.float32 and bool(torch.isfinite(shift).all())
        assert bounds[0] < float(shift.mean()) < bounds[1]


def test_a_dense_model_has_no_shift(tmp_path, world):
    """preflight refuses methods that need one; without them a take of a dense model keeps nothing of routers."""
    qwen3_dense().save_pretrained(tmp_path)
    info = describe(tmp_path)
    config, policy, updater = made(tmp_path, world, algorithm={"correction": {"kind": "none"}, "rdc": {"mode": "off"}})
    groups = [
        replace(g, trajectories=tuple(replace(t, routes=None, route_counts=None) for t in g.trajectories))
        for g in make_groups(ModelInfo((0, 1), 8, 2, 64), 3, 4, seed=0)
    ]
    state, _, _ = run_take(config, policy, updater, [rows_of(groups, 0, 0, info)], world)
    assert state.routes == {} and updater.values[0].router_shift is None


FP64 = ["model.dtype=float64", "model.experts=eager", "staleness.updates_per_take=3", "staleness.max_lag=8",
        "learner.lr=0.02", "learner.warmup_updates=0"]  # fmt: skip
SPECS = {
    f"{name}{split}": {"overrides": [*FP64, *overrides, *budget], "worlds": [1, 2]}
    for name, overrides in (
        ("rspo", ["algorithm.correction.kind=rspo"]),
        ("rspo_r3", ["algorithm.correction.kind=rspo", "algorithm.routes=r3"]),
        ("r2", ["algorithm.routes=r2"]),
        ("rspo_r2", ["algorithm.correction.kind=rspo", "algorithm.routes=r2"]),
    )
    for split, budget in (("", []), ("_40", ["learner.micro_batch_tokens=40"]))
} | {
    "lone": {
        "overrides": [*FP64, "algorithm.correction.kind=rspo", "algorithm.routes=r2"], "groups": 1, "deal": "first",
        "worlds": [1, 2],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two takes of three updates on one and on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(folder / "model")
    base = folder / "base.yaml"
    base.write_text("model: {path: x}\nalgorithm: {rdc: {mode: observe}}\nstaleness: {sync_every: 1}\n")
    common = {"kind": "updates", "updates": 6, "take": 3, "groups": 5, "group_size": 4, "base": str(base)}
    return train_on_ranks(folder, (1, 2), {n: common | s for n, s in SPECS.items()})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["rspo", "rspo_r3", "r2", "rspo_r2", "lone"])
def test_two_ranks_and_any_split_give_the_numbers_of_one(ranks, name):
    one = ranks[1][name]
    others = [ranks[2][name]]
    if name != "lone":
        others += [ranks[size][f"{name}_40"] for size in (1, 2)]
    for other in others:
        # Scores are float32: what hangs on a shift agrees to their resolution only.
        assert_same_gradients(one, other, 1e-5 if "rspo" in name or name == "lone" else 1e-9)
        assert_same_results(one, other, rel=1e-5)
    scalars = [r["scalars"] for r in one["results"]]
    if name != "r2":
        weights = [s["mismatch/weight_mean"] for s in scalars]
        assert weights[0] == pytest.approx(1, abs=1e-6) and weights[3] == pytest.approx(1, abs=1e-6)
        assert max(weights[1], weights[2], weights[4], weights[5]) < 0.999
    if "r2" in name or name == "lone":
        assert [s["r2/forced_fraction"] for s in scalars] == [1.0] * 6


def test_two_ranks_move_the_weights_as_one_does(ranks):
    for name in ("rspo", "r2", "rspo_r2"):
        one, two = ranks[1][name]["weights"], ranks[2][name]["weights"]
        assert max(float((one[n] - two[n]).abs().max()) for n in one) < 1e-4
