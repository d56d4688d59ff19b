"""The KL term in real updates: whom it pulls, what it takes from a reward, and what a reference policy leaves alone."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from asyncrl.config import validate
from asyncrl.learner.batch import rows_of
from asyncrl.learner.checkpoint import Checkpoints, Progress
from asyncrl.learner.publish import export, host_copy
from asyncrl.learner.recorder import absent
from asyncrl.learner.records import update_scalars
from asyncrl.learner.reference import open_reference
from asyncrl.learner.update import run_update, score_take
from asyncrl.models.describe import describe
from tests.helpers.tiny_models import qwen3_dense, qwen3_moe, save
from tests.learner.groups import make_groups, make_trajectory
from tests.learner.takes import made, renamed, whole
from tests.learner.test_health import poison, state_of, unlike
from tests.learner.test_update import own_logprobs, same, with_rewards


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another policy of the same architecture."""
    return str(save(qwen3_moe(seed=9), tmp_path_factory.mktemp("models") / "other"))


def opened(model_dir, world, kl, **sections):
    """config, policy, updater and reference of one batch per take; kl: settings of algorithm.kl."""
    algorithm = {"kl": kl} | sections.pop("algorithm", {})
    given = {"staleness": {"updates_per_take": 1}, "learner": {"warmup_updates": 0}} | sections
    config, policy, updater = made(model_dir, world, algorithm=algorithm, **given)
    return config, policy, updater, open_reference(config, world)


def go(run, groups, world, state=None, update=0, bound=0):
    config, policy, updater, reference = run
    info = describe(config.model.path)
    rows = rows_of(groups, update, bound, info, config.algorithm.truncated == "mask")
    return run_update(policy, updater, rows, update, 0.0, state, config, info, world, reference=reference)


def gap(one, two):
    """Largest difference of two gradients, against the largest entry of the first."""
    return max(float((one[n] - two[n]).abs().max()) for n in one) / max(float(g.abs().max()) for g in one.values())


# --- whom it pulls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring", ["auto", "separate"])
def test_groups_of_equal_rewards_are_pulled_too(model_dir, other, world, scoring):
    run = opened(model_dir, world, {"coef": 0.5, "reference": other}, learner={"scoring": scoring})
    before, groups = whole(run[1]), with_rewards(make_groups(describe(model_dir), 2, 4, 1), [1.0] * 8)
    out = go(run, groups, world)
    s = update_scalars(out, describe(model_dir))
    assert out.fused == (scoring == "auto") and out.advantages.tolist() == [0.0] * 8
    assert s["policy/ref_kl"] > 0 and s["optim/grad_norm"] > 0 and not same(before, whole(run[1]))
    # All of the loss is the term, and pi / mu is not 1: these responses came from somewhere else.
    assert s["policy/kl_loss"] == pytest.approx(s["policy/loss"]) and s["policy/kl_loss"] > 0
    assert s["policy/zero_variance_fraction"] == 1


def test_both_ways_of_scoring_give_one_gradient(model_dir, other, world):
    gradients = []
    for scoring in ("auto", "separate"):
        kl = {"coef": 0.5, "reference": other}
        run = opened(model_dir, world, kl, learner={"scoring": scoring, "micro_batch_tokens": 400})
        out = go(run, make_groups(describe(model_dir), 3, 4, 2), world)
        gradients.append((run[2].gradients[0], update_scalars(out, describe(model_dir))))
    (fused, a), (separate, b) = gradients
    assert gap(fused, separate) < 1e-5
    assert all(a[n] == pytest.approx(b[n], rel=1e-4, abs=1e-6) for n in a if n.startswith("policy/"))


def test_filtered_responses_are_not_pulled(model_dir, other, world):
    """The gradient is that of a batch that never had them."""
    kl, info = {"coef": 0.5, "reference": other}, describe(model_dir)
    groups = with_rewards(make_groups(info, 2, 4, 3), [1.0] * 8)
    rdc = {"q": 0.3, "normalize": "retained", "buckets": 1}
    for scoring in ("auto", "separate"):
        run = opened(model_dir, world, kl, algorithm={"rdc": rdc | {"mode": "filter"}}, learner={"scoring": scoring})
        out = go(run, groups, world)
        kept = {i for i, k in zip(out.table.ids, out.keep, strict=True) if k}
        assert len(kept) == 6
        left = [
            replace(g, trajectories=tuple(t for t in g.trajectories if t.trajectory_id in kept)) for g in groups
        ]  # fmt: skip
        without = opened(model_dir, world, kl)
        alone = go(without, left, world)
        assert gap(without[2].gradients[0], run[2].gradients[0]) < 1e-5
        assert alone.step.kl == pytest.approx(out.step.kl, rel=1e-5)


def test_too_old_tokens_and_withheld_responses_are_not_pulled(model_dir, other, world):
    info, rng = describe(model_dir), np.random.default_rng(4)
    kl = {"coef": 0.5, "reference": other}
    (group,) = with_rewards(make_groups(info, 1, 4, 4), [1.0] * 4)
    # The first four tokens were sampled under version 0, the others under version 5; and one response is all old.
    mixed = make_trajectory("0/p0#0.0", len(group.prompt.token_ids), 9, info, rng, ((0, 4), (5, 9)), 1.0)
    old = replace(mixed, trajectory_id="0/p0#0.1", segments=(mixed.segments[0]._replace(end=9),),
                  route_counts=mixed.route_counts.sum(0, keepdims=True, dtype=np.uint16))  # fmt: skip
    cut = replace(mixed, trajectory_id="0/p0#0.2", finish_reason="length")
    batch = [replace(group, trajectories=(mixed, old, cut))]
    run = opened(model_dir, world, kl, algorithm={"truncated": "mask"})
    out = go(run, batch, world, update=5, bound=5)
    assert out.table["tokens"].tolist() == [5, 0, 0] and out.totals.tokens == 5
    assert out.table["ref_k3"][1:].tolist() == [0, 0]
    alone = opened(model_dir, world, kl)
    mask = np.arange(9) >= 4
    go(alone, [replace(group, trajectories=(replace(mixed, loss_mask=mask),))], world, update=5, bound=0)
    assert gap(alone[2].gradients[0], run[2].gradients[0]) < 1e-6


# --- the term in the reward ------------------------------------------------------------------------------------------


def sums_by_hand(run, groups, world):
    """log pi - log ref of every response, summed over its tokens, from one forward each."""
    config, policy, _, reference = run
    info, sums = describe(config.model.path), []
    for row in rows_of(groups, 0, 0, info):
        one, two = (score_take(p, [row], config, info, world).old_logp for p in (policy, reference))
        p, t = len(row.prompt_ids), row.trajectory
        cut = slice(p - 1, p - 1 + t.num_tokens)
        sums.append(float((one[t.trajectory_id] - two[t.trajectory_id])[cut].double().sum()))
    return torch.tensor(sums, dtype=torch.float64)


@pytest.mark.parametrize("baseline", ["batch", "retained"])
def test_the_reward_loses_the_kl_of_its_response_before_the_advantages(model_dir, other, world, baseline):
    info = describe(model_dir)
    rdc = {"mode": "filter", "q": 0.3, "buckets": 1, "baseline": baseline}
    run = opened(
        model_dir, world, {"coef": 0.2, "where": "reward", "reference": other},
        algorithm={"advantage": "dr_grpo", "rdc": rdc},
    )  # fmt: skip
    # Two groups, the second of equal rewards.
    groups = with_rewards(make_groups(info, 2, 4, 5), [1, 0, 0, 1, 1, 1, 1, 1])
    by_hand = torch.tensor([1, 0, 0, 1, 1, 1, 1, 1.0]).double() - 0.2 * sums_by_hand(run, groups, world)
    before = whole(run[1])
    out = go(run, groups, world)
    assert int((~out.keep).sum()) == 2
    for rows in (slice(0, 4), slice(4, 8)):
        shaped, kept = by_hand[rows], out.keep[rows]
        mean = shaped[kept].mean() if baseline == "retained" else shaped.mean()
        wanted = shaped - mean
        if baseline == "retained":
            wanted = wanted.where(kept, torch.tensor(0.0).double())
        assert out.advantages[rows].tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
    assert (out.advantages[4:].abs() > 1e-3).sum() >= 3, "a group of equal rewards has advantages now"
    s = update_scalars(out, info)
    assert s["policy/reward"] == 6 / 8, "it stays the task's"
    assert "policy/kl_loss" not in s and s["policy/ref_kl"] > 0
    assert s["policy/ref_kl_k1"] == pytest.approx(out.table["ref_k1"].sum() / out.table["tokens"].sum())
    assert not same(before, whole(run[1]))


def test_a_response_without_a_token_left_is_charged_what_its_group_is(model_dir, other, world):
    """Charged nothing it would raise the baseline, and those that train would be pushed down for it."""
    info = describe(model_dir)
    kl = {"coef": 0.2, "where": "reward", "reference": other}
    run = opened(model_dir, world, kl, algorithm={"advantage": "dr_grpo", "truncated": "mask"})
    (group,) = with_rewards(make_groups(info, 1, 4, 5), [1.0] * 4)
    cut = tuple(replace(t, finish_reason="length") if i < 2 else t for i, t in enumerate(group.trajectories))
    sums = sums_by_hand(run, [group], world)[2:]
    out = go(run, [replace(group, trajectories=cut)], world)
    assert out.table["tokens"][:2].tolist() == [0, 0]
    wanted = -0.2 * (sums - sums.mean())
    assert out.advantages[2:].tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
    assert out.advantages[:2].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_the_penalty_is_of_the_start_of_the_take_and_the_metrics_are_of_now(model_dir, other, world):
    info = describe(model_dir)
    kl = {"coef": 0.2, "where": "reward", "reference": other}
    config, policy, updater = made(model_dir, world, algorithm={"kl": kl, "advantage": "dr_grpo"})
    run = config, policy, updater, open_reference(config, world)
    batches = [renamed(make_groups(info, 2, 4, 6), 0), renamed(make_groups(info, 2, 4, 7), 1)]
    start = sums_by_hand(run, batches[1], world)
    state = score_take(policy, [r for b in batches for r in rows_of(b, 0, 0, info)], config, info, world)
    go(run, batches[0], world, state)
    now = sums_by_hand(run, batches[1], world)
    assert float((now - start).abs().max()) > 0.01, "the first update moved nothing"
    second = go(run, batches[1], world, state, update=1)
    assert second.table["ref_penalty"].tolist() == pytest.approx(start.tolist(), abs=1e-4)
    assert second.table["ref_k1"].tolist() == pytest.approx(now.tolist(), abs=1e-4)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_the_start_the_policy_is_the_reference(model_dir, world, dtype):
    """The same numbers come out of both, under each dtype, with a graph and without one, and with checkpointing."""
    run = opened(
        model_dir, world, {"coef": 0.5}, model={"path": model_dir, "dtype": dtype},
        learner={"activation_checkpointing": True, "warmup_updates": 0},
    )  # fmt: skip
    info = describe(model_dir)
    groups = own_logprobs(run[1], with_rewards(make_groups(info, 2, 4, 8), [1.0] * 8), run[0], info, world)
    s = update_scalars(go(run, groups, world), info)
    assert max(abs(s[f"policy/{n}"]) for n in ("ref_kl", "ref_kl_k1", "kl_loss")) < 1e-6
    assert s["optim/grad_norm"] < 1e-5
    # Rewards that differ move the policy away from it.
    groups = with_rewards(groups, [1, 0] * 4)
    for _ in range(3):
        s = update_scalars(go(run, groups, world), info)
    assert s["policy/ref_kl"] > 1e-6 and s["policy/kl_loss"] > 0


def test_without_a_coefficient_there_is_no_second_model_and_no_number_of_one(model_dir, world):
    config, policy, updater = made(model_dir, world, staleness={"updates_per_take": 1})
    # Nothing is there to be loaded.
    kl = config.algorithm.kl.model_copy(update={"reference": "/nowhere"})
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl": kl})})
    assert open_reference(config, world) is None
    out = go((config, policy, updater, None), make_groups(describe(model_dir), 2, 4, 9), world)
    s = update_scalars(out, describe(model_dir))
    assert not [n for n in s if "kl_loss" in n or "ref_kl" in n]
    assert {"policy/ref_kl", "policy/kl_loss"} <= set(absent(config))
    for where, left_out in (("loss", set()), ("reward", {"policy/kl_loss"})):
        on = validate({"model": {"path": "x"}, "algorithm": {"kl": {"coef": 0.1, "where": where}}})
        assert {n for n in absent(on) if "kl" in n} == left_out


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_prob_of_the_reference_that_is_none_skips_the_update_by_name(model_dir, other, world, where, value):
    info = describe(model_dir)
    run = opened(model_dir, world, {"coef": 0.5, "where": where, "reference": other})
    groups = make_groups(info, 3, 4, 10)
    before, state = whole(run[1]), state_of(run[2])
    victim, length = unlike(groups)
    hook = poison(run[3], value, length)
    out = go(run, groups, world)
    hook.remove()
    assert (out.step.outcome, out.step.reason) == ("non_finite", "reference")
    assert same(before, whole(run[1])) and same(state, state_of(run[2]))
    assert out.keep.all() and torch.isfinite(out.advantages).all()
    # The routes are those of the policy, whose numbers are sound.
    assert np.isfinite(out.table["drift"]).all()
    broken = [i for i, k in zip(out.table.ids, out.table["ref_penalty"], strict=True) if math.isnan(k)]
    assert broken == [victim] and "policy/ref_kl" not in update_scalars(out, info)
    assert go(run, groups, world).step.outcome == "stepped"


def test_a_response_that_filtering_takes_counts_as_dropped_with_effect(model_dir, other, world):
    """Without a reference policy a response of equal rewards would be dropped without any."""
    info, shares = describe(model_dir), []
    for kl in ({}, {"coef": 0.5, "reference": other}):
        run = opened(model_dir, world, kl, algorithm={"rdc": {"mode": "filter", "q": 0.3, "buckets": 1}})
        out = go(run, with_rewards(make_groups(info, 2, 4, 3), [1.0] * 8), world)
        shares.append(update_scalars(out, info)["filter/effective_dropped_fraction"])
    assert shares == [0, 0.25]


# --- another architecture, routers, what stays ------------------------------------------------------------------------


def test_a_reference_of_another_architecture_pulls_too(model_dir, world, tmp_path):
    """A dense one of other sizes beside a mixture of experts, which watches its experts and replays routes."""
    save(qwen3_dense(hidden=48, layers=3), tmp_path / "dense")
    info, kl = describe(model_dir), {"coef": 0.5, "reference": str(tmp_path / "dense")}
    for algorithm in ({"routes": "r3"}, {"routes": "r2"}, {"correction": {"kind": "rspo"}}):
        config, policy, updater = made(model_dir, world, algorithm=algorithm | {"kl": kl, "rdc": {"mode": "observe"}})
        run = config, policy, updater, open_reference(config, world)
        batches = [renamed(make_groups(info, 2, 4, 11), 0), renamed(make_groups(info, 2, 4, 12), 1)]
        state = score_take(policy, [r for b in batches for r in rows_of(b, 0, 0, info)], config, info, world)
        for u, groups in enumerate(batches):
            by_hand = None if u else native_sums(run, groups, world)
            out = go(run, groups, world, state, update=u)
            assert out.step.outcome == "stepped" and out.step.kl > 0
            if by_hand is not None and algorithm == {"correction": {"kind": "rspo"}}:
                assert out.table["ref_k1"].tolist() == pytest.approx(by_hand.tolist(), abs=1e-4)


def native_sums(run, groups, world):
    """As `sums_by_hand`, without replayed routes or watched experts."""
    config, policy, updater, reference = run
    plain = validate({"model": {"path": config.model.path}, "algorithm": {"rdc": {"mode": "observe"}}})
    return sums_by_hand((plain, policy, updater, reference), groups, world)


def test_a_reference_has_no_gradient_no_moment_and_is_written_nowhere(model_dir, other, world, tmp_path):
    info = describe(model_dir)
    run = opened(model_dir, world, {"coef": 0.5, "reference": other})
    _, policy, updater, reference = run
    frozen, started = whole(reference), whole(policy)
    for u in range(2):
        assert go(run, make_groups(info, 2, 4, 13 + u), world, update=u).step.outcome == "stepped"
    assert same(frozen, whole(reference)) and not same(started, whole(policy))
    assert all(not p.requires_grad and p.grad is None for p in reference.parameters())
    held = {id(p) for group in updater._optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in policy.parameters()}
    # A run without a reference leaves the same names, everywhere.
    plain = opened(model_dir, world, {})
    go(plain, make_groups(info, 2, 4, 13), world)
    names = []
    for name, (_, p, u, _) in (("with", run), ("without", plain)):
        Checkpoints(tmp_path / name, "f", 2, world).save(p, u, Progress(0, 2, 2, 0.0))
        export(p, model_dir, tmp_path / name / "model", world)
        (file,) = (tmp_path / name / "checkpoints" / "u2").glob("*.safetensors")
        stored = load_file(file)
        names.append((sorted(stored), sorted(load_file(tmp_path / name / "model" / "model.safetensors"))))
        names[-1] += (sorted(host_copy(p, world)), sum(t.numel() for t in stored.values()))
    assert names[0] == names[1]
    assert "kl" not in json.dumps(sorted(updater.state()))


def test_a_learner_that_goes_on_from_a_checkpoint_has_the_reference_of_its_beginning(model_dir, world, tmp_path):
    """algorithm.kl.reference null: the start model, and not what was trained since. Bit by bit the straight run."""
    info, kl = describe(model_dir), {"coef": 5.0}
    straight = opened(model_dir, world, kl, learner={"lr": 0.02, "warmup_updates": 0})
    start = whole(straight[3])
    for u in range(4):
        last = go(straight, make_groups(info, 2, 4, 20 + u), world, update=u)
        if u == 1:
            Checkpoints(tmp_path, "f", 2, world).save(straight[1], straight[2], Progress(0, 2, 2, 0.0))
    resumed = opened(model_dir, world, kl, learner={"lr": 0.02, "warmup_updates": 0})
    assert Checkpoints(tmp_path, "f", 2, world).load(resumed[1], resumed[2]).update == 2
    assert same(start, whole(resumed[3])) and not same(whole(resumed[1]), whole(resumed[3]))
    for u in (2, 3):
        again = go(resumed, make_groups(info, 2, 4, 20 + u), world, update=u)
    assert same(whole(straight[1]), whole(resumed[1]))
    assert again.step.kl == last.step.kl > 0 and again.table["ref_k3"].tolist() == last.table["ref_k3"].tolist()


def test_the_scoring_pass_of_a_reference_leaves_nothing_behind(model_dir, other, world):
    """Its parameters are sharded again, and the policy's routes are those of the policy."""
    info, kept = describe(model_dir), []
    for kl in ({}, {"coef": 1e-12, "reference": other}):
        run = opened(model_dir, world, kl)
        out = go(run, make_groups(info, 3, 4, 14), world)
        kept.append((out.table["drift"].tolist(), out.usage.tolist(), out.step.clipped))
        if run[3] is not None:
            assert all(isinstance(p, DTensor) for p in run[3].parameters())
    assert kept[0] == kept[1]
