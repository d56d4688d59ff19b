"""One update in one process: what trains, what is skipped, and which numbers come out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.config import Config, validate
from asyncrl.learner.batch import rows_of
from asyncrl.learner.records import update_scalars
from asyncrl.learner.shard import Policy, build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update, score_take
from asyncrl.models.describe import describe
from tests.learner.groups import make_groups


def setup(model_dir, world, **sections) -> tuple[Config, Policy, Updater]:
    tree = {"model": {"path": model_dir}, "staleness": {"sync_every": 1}}
    tree.update(sections)
    config = validate(tree)
    policy = build_policy(config.model, config.learner, config.algorithm.replays, world)
    return config, policy, Updater(policy, config.learner, config.algorithm, world)


def weights(policy):
    return {n: p.full_tensor().detach().clone() for n, p in policy.named_parameters()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def with_rewards(groups, rewards):
    """Groups whose trajectories get these rewards in turn."""
    it = iter(rewards)
    return [replace(g, trajectories=tuple(replace(t, reward=float(next(it))) for t in g.trajectories)) for g in groups]


def own_logprobs(policy, groups, config, info, world):
    """The same groups with the policy's own log-probs and routes: what a generator at lag 0 would send."""
    rows = rows_of(groups, 0, 0, info)
    old = score_take(policy, rows, config, info, world).old_logp
    out = []
    for g in groups:
        p = len(g.prompt.token_ids)
        made = [
            replace(t, logprobs=old[t.trajectory_id][p - 1 : p - 1 + t.num_tokens].float().numpy())
            for t in g.trajectories
        ]
        out.append(replace(g, trajectories=tuple(made)))
    return out


def go(config, policy, updater, groups, world, model_dir, update=0, bound=0, carry=0.0, state=None):
    info = describe(model_dir)
    rows = rows_of(groups, update, bound, info)
    return run_update(policy, updater, rows, update, carry, state, config, info, world)


def test_a_normal_update_moves_every_kind_of_weight_and_measures(model_dir, world):
    config, policy, updater = setup(model_dir, world)
    info = describe(model_dir)
    before = weights(policy)
    groups = own_logprobs(policy, make_groups(info, 4, 4, 0), config, info, world)
    out = go(config, policy, updater, groups, world, model_dir)
    after = weights(policy)
    moved = [n for n in before if not torch.equal(before[n], after[n])]
    assert len(moved) == len(before)
    s = update_scalars(out, info)
    assert s["mismatch/kl_k3"] == pytest.approx(0, abs=1e-6)
    assert s["mismatch/ess"] == pytest.approx(1, abs=1e-4)
    assert s["policy/clip_fraction"] == 0
    assert s["mismatch/weight_mean"] == pytest.approx(1, abs=1e-4)
    assert s["drift/mean"] > 0  # the synthetic routes are random
    assert s["optim/grad_norm"] > 0
    assert 0 < s["policy/entropy"] < math.log(64)


def test_equal_rewards_give_no_gradient_but_count_everywhere(model_dir, world):
    config, policy, updater = setup(model_dir, world)
    before = weights(policy)
    info = describe(model_dir)
    groups = with_rewards(make_groups(info, 2, 4, 1), [1.0] * 8)
    out = go(config, policy, updater, groups, world, model_dir)
    assert out.step.grad_norm == 0
    assert out.advantages.tolist() == [0.0] * 8
    assert same(before, weights(policy))
    s = update_scalars(out, info)
    assert s["policy/zero_variance_fraction"] == 1
    assert s["policy/tokens"] == sum(g.num_tokens for g in groups)


def test_batch_without_a_token_left_makes_no_step(model_dir, world):
    config, policy, updater = setup(model_dir, world)
    before = weights(policy)
    groups = make_groups(describe(model_dir), 2, 4, 2, version=0)
    out = go(config, policy, updater, groups, world, model_dir, update=9, bound=1)
    assert out.step.outcome == "filtered"
    assert same(before, weights(policy))
    assert update_scalars(out, describe(model_dir))["staleness/stale_responses"] == 8
    again = go(config, policy, updater, make_groups(describe(model_dir), 2, 4, 3), world, model_dir)
    assert again.step.outcome == "stepped"
    assert not same(before, weights(policy))


def test_everything_filtered_makes_no_step(model_dir, world):
    """Undefined drift dropped by setting, and no response has a defined one: no counts came."""
    config, policy, updater = setup(model_dir, world, algorithm={"rdc": {"on_undefined": "drop"}})
    before = weights(policy)
    groups = [
        replace(g, trajectories=tuple(replace(t, route_counts=None) for t in g.trajectories))
        for g in make_groups(describe(model_dir), 2, 4, 4)
    ]
    out = go(config, policy, updater, groups, world, model_dir)
    assert out.step.outcome == "filtered"
    assert same(before, weights(policy))
    assert update_scalars(out, describe(model_dir))["drift/undefined"] == 8


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_gradient_skips_the_step_and_leaves_adam_alone(model_dir, world, value):
    config, policy, updater = setup(model_dir, world)
    groups = make_groups(describe(model_dir), 2, 4, 5)
    go(config, policy, updater, groups, world, model_dir)
    before = weights(policy)
    state = {k: v["exp_avg"].full_tensor().clone() for k, v in updater._optimizer.state.items()}
    # One element of one gradient, as a broken kernel would leave it.
    real = updater.backward

    def broken(*args):
        sums = real(*args)
        next(policy.parameters()).grad.to_local().view(-1)[3] = value
        return sums

    updater.backward = broken
    out = go(config, policy, updater, groups, world, model_dir, update=1)
    assert out.step.outcome == "non_finite"
    assert same(before, weights(policy))
    assert all(torch.equal(state[k], v["exp_avg"].full_tensor()) for k, v in updater._optimizer.state.items())


def test_empty_response_in_a_group_changes_no_number_of_its_mates(model_dir, world):
    config, policy, updater = setup(model_dir, world)
    info = describe(model_dir)
    groups = with_rewards(make_groups(info, 1, 4, 6), [1, 0, 0, 1])
    empty = replace(
        groups[0].trajectories[3], token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32),
        loss_mask=np.zeros(0, bool), segments=(), route_counts=np.zeros((0, 2, 8), np.uint16), routes=None,
    )  # fmt: skip
    with_empty = [replace(groups[0], trajectories=(*groups[0].trajectories[:3], empty))]
    out = go(config, policy, updater, with_empty, world, model_dir)
    assert math.isnan(out.table["drift"][3])
    assert bool(out.keep[3])
    assert out.step.outcome == "stepped"
    assert out.totals.tokens == sum(t.num_tokens for t in groups[0].trajectories[:3])
    # Rewards 1, 0, 0, 1: the empty one's reward is part of the baseline.
    assert out.advantages[0] == pytest.approx(out.advantages[3])


def test_missing_rollout_logprobs_count_as_ratio_one(model_dir, world):
    config, policy, updater = setup(model_dir, world)
    info = describe(model_dir)
    groups = make_groups(info, 1, 4, 7)
    t = groups[0].trajectories[0]
    holes = np.full_like(t.logprobs, np.nan)
    groups = [replace(groups[0], trajectories=(replace(t, logprobs=holes), *groups[0].trajectories[1:]))]
    out = go(config, policy, updater, groups, world, model_dir)
    assert out.step.outcome == "stepped"
    assert math.isfinite(out.step.loss)
    assert update_scalars(out, info)["mismatch/missing_logprobs"] == t.num_tokens


def test_replayed_routes_are_forced_everywhere_and_change_the_policy(model_dir, world):
    algorithm = {"routes": "r3", "rdc": {"mode": "observe"}}
    config, policy, updater = setup(model_dir, world, algorithm=algorithm)
    info = describe(model_dir)
    groups = make_groups(info, 2, 4, 8)
    out = go(config, policy, updater, groups, world, model_dir)
    s = update_scalars(out, info)
    assert s["r3/forced_fraction"] == 1.0
    assert s["drift/mean"] > 0
    assert s["r3/in_pass_drift"] > 0
    native = setup(model_dir, world, algorithm={"rdc": {"mode": "observe"}})
    other = go(*native, groups, world, model_dir)
    assert out.step.loss != other.step.loss


def test_replay_without_routes_is_refused_by_name(model_dir, world):
    config, policy, updater = setup(model_dir, world, algorithm={"routes": "r3"})
    groups = make_groups(describe(model_dir), 1, 4, 9)
    bare = [replace(groups[0], trajectories=tuple(replace(t, routes=None) for t in groups[0].trajectories))]
    with pytest.raises(ValueError, match=r"0/p0#0\.\d.*replay needs routes"):
        go(config, policy, updater, bare, world, model_dir)


def test_several_updates_of_a_take_use_the_policy_of_its_start_and_clip(model_dir, world):
    config, policy, updater = setup(model_dir, world, learner={"lr": 0.05, "warmup_updates": 0})
    info = describe(model_dir)
    groups = own_logprobs(policy, make_groups(info, 2, 8, 10), config, info, world)
    state = score_take(policy, rows_of(groups, 0, 0, info), config, info, world)
    first = go(config, policy, updater, groups[:1], world, model_dir, state=state)
    second = go(config, policy, updater, groups[1:], world, model_dir, update=1, state=state)
    assert first.step.clipped == 0
    assert second.step.clipped > 0


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_modes_that_do_not_filter_train_on_everything(model_dir, world, mode):
    config, policy, updater = setup(model_dir, world, algorithm={"rdc": {"mode": mode, "q": 0.25}})
    info = describe(model_dir)
    out = go(config, policy, updater, make_groups(info, 2, 4, 11), world, model_dir)
    assert out.keep.all()
    assert int(out.would_drop.sum()) == (2 if mode == "observe" else 0)


def test_filter_and_random_drop_as_many(model_dir, world):
    info = describe(model_dir)
    groups = make_groups(info, 4, 4, 12)
    dropped = {}
    for mode in ("filter", "random"):
        config, policy, updater = setup(model_dir, world, algorithm={"rdc": {"mode": mode, "q": 0.25}})
        out = go(config, policy, updater, groups, world, model_dir)
        dropped[mode] = {i for i, k in zip(out.table.ids, out.keep, strict=True) if not k}
    assert len(dropped["filter"]) == len(dropped["random"]) == 4
    assert dropped["filter"] != dropped["random"]


def test_dropped_responses_do_not_move_the_gradient_of_what_stays_under_retained(model_dir, world):
    """Rewards 10, 1, 0, 1 with the first dropped: survivors centre on their own mean 2/3."""
    algorithm = {"advantage": "dr_grpo", "rdc": {"q": 0.25, "baseline": "retained"}}
    config, policy, updater = setup(model_dir, world, algorithm=algorithm)
    groups = with_rewards(make_groups(describe(model_dir), 1, 4, 13), [0, 0, 0, 0])
    victim = int((~go(config, policy, updater, groups, world, model_dir).keep).nonzero()[0])
    rewards = [1.0, 0.0, 1.0]
    rewards.insert(victim, 10.0)
    out = go(config, policy, updater, with_rewards(groups, rewards), world, model_dir)
    stay = [float(a) for i, a in enumerate(out.advantages) if i != victim]
    assert stay == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert float(out.advantages[victim]) == 0


@pytest.mark.parametrize(
    ("baseline", "q", "dropped", "expected"),
    [
        # The mean of all four is 3; of the three that stay 2/3. What is dropped has no gradient either way.
        ("batch", 0.25, 1, {10: 7.0, 1: -2.0, 0: -3.0}),
        ("retained", 0.25, 1, {10: 0.0, 1: 1 / 3, 0: -2 / 3}),
        # One survivor has nobody to be compared with: 0, and no division by the spread of one.
        ("retained", 0.9, 3, {10: 0.0, 1: 0.0, 0: 0.0}),
    ],
)
def test_b21_each_baseline_by_its_name(model_dir, world, baseline, q, dropped, expected):
    rdc = {"q": q, "baseline": baseline, "buckets": 1}
    algorithm, info = {"advantage": "dr_grpo", "rdc": rdc, "correction": {"kind": "none"}}, describe(model_dir)
    config, policy, updater = setup(model_dir, world, algorithm=algorithm)
    groups = make_groups(info, 1, 4, 13)
    victim = int(go(config, policy, updater, with_rewards(groups, [0] * 4), world, model_dir).table["drift"].argmax())
    rewards = [1, 0, 1]
    rewards.insert(victim, 10)
    config, policy, updater = setup(model_dir, world, algorithm=algorithm)
    out = go(config, policy, updater, with_rewards(groups, rewards), world, model_dir)
    assert int((~out.keep).sum()) == dropped and not out.keep[victim]
    assert out.advantages.tolist() == pytest.approx([expected[r] for r in rewards])
    assert out.step.outcome == "stepped" and math.isfinite(out.step.loss)
    # With every ratio 1 a token costs -A: the dropped response is no part of the loss.
    tokens = out.table["tokens"]
    alone = -sum(float(a) * t for a, t, k in zip(out.advantages, tokens, out.keep, strict=True) if k) / tokens.sum()
    assert out.step.loss == pytest.approx(alone, abs=1e-6)


def test_a_group_of_seven_trains_on_its_own_seven_rewards(model_dir, world):
    # replay.on_timeout: partial: the eighth response never ended.
    info = describe(model_dir)
    whole, short = make_groups(info, 2, 8, seed=3)
    short = replace(short, trajectories=short.trajectories[:7])
    rewards = [1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    groups = with_rewards([whole, short], rewards)
    config, policy, updater = setup(model_dir, world, algorithm={"rdc": {"mode": "off"}, "group_size": 8})
    before = weights(policy)
    outcome = go(config, policy, updater, groups, world, model_dir)
    assert outcome.step.outcome == "stepped" and not same(before, weights(policy))
    by_id = {n[0]: float(a) for n, a in zip(outcome.table.names, outcome.advantages, strict=True)}
    assert len(by_id) == 15
    seven = torch.tensor(rewards[8:], dtype=torch.float64)
    expected = (seven - seven.mean()) / (seven.std() + 1e-6)
    got = [by_id[t.trajectory_id] for t in groups[1].trajectories]
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5)
    scalars = update_scalars(outcome, info)
    assert scalars["policy/responses"] == 15 and scalars["policy/reward"] == pytest.approx(3 / 15)
