"""Numbers that are none: which stage sees them, that nothing moves, and that the next update trains."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.errors import TrainingError
from asyncrl.learner.batch import rows_of
from asyncrl.learner.health import REASONS, broken_weight
from asyncrl.learner.records import update_scalars
from asyncrl.learner.update import TakeState, score_take
from asyncrl.metrics.names import is_known
from asyncrl.models.describe import describe
from tests.learner.groups import make_groups
from tests.learner.test_update import go, same, setup, weights, with_rewards

NAN, INF = math.nan, math.inf


def state_of(updater):
    return {n: t.full_tensor().clone() if hasattr(t, "full_tensor") else t.clone() for n, t in updater.state().items()}


def poison(policy, value, row_tokens):
    """The next forwards give `value` as log-prob of the first token of every row with so many trained tokens."""

    def hook(_module, args, output):
        logp, *rest = output
        for i, mask in enumerate(args[0].predict_mask):
            if int(mask.sum()) == row_tokens:
                at = int(mask.nonzero()[0])
                logp = logp.index_put((torch.tensor(i), torch.tensor(at)), torch.tensor(value, dtype=logp.dtype))
        return logp, *rest

    return policy.register_forward_hook(hook)


def unlike(groups):
    """(trajectory id, length) of a response whose length no other has."""
    lengths = [(t.num_tokens, t.trajectory_id) for g in groups for t in g.trajectories]
    counts = [n for n, _ in lengths]
    return next((i, n) for n, i in lengths if counts.count(n) == 1)


@pytest.mark.parametrize(
    ("value", "sections"),
    [
        (NAN, {}),
        (-INF, {"learner": {"scoring": "separate"}}),
        (NAN, {"algorithm": {"rdc": {"signal": "log_ratio"}}}),
        (NAN, {"algorithm": {"routes": "r3"}}),
    ],
)
def test_a_log_prob_that_is_none_stops_the_update_before_selection_and_backward(model_dir, world, value, sections):
    config, policy, updater = setup(model_dir, world, **sections)
    info = describe(model_dir)
    go(config, policy, updater, make_groups(info, 2, 4, 5), world, model_dir)
    before, state = weights(policy), state_of(updater)
    groups = make_groups(info, 4, 4, 21)
    victim, length = unlike(groups)
    hook = poison(policy, value, length)
    out = go(config, policy, updater, groups, world, model_dir, update=1, carry=0.5)
    hook.remove()
    assert (out.step.outcome, out.step.reason) == ("non_finite", "log_prob")
    assert same(before, weights(policy)) and same(state, state_of(updater))
    assert out.keep.all() and not out.would_drop.any() and out.selection.carry == 0.5
    # Routes that come from numbers that are none say nothing about drift.
    drift = dict(zip(out.table.ids, out.table["drift"], strict=True))
    assert [i for i, d in drift.items() if math.isnan(d)] == [victim]
    if "native_drift" in out.table.columns:
        assert np.isnan(out.table["native_drift"]).tolist() == np.isnan(out.table["drift"]).tolist()
    assert not math.isfinite(update_scalars(out, info)["mismatch/kl_k3"])
    again = go(config, policy, updater, groups, world, model_dir, update=1, carry=0.5)
    assert again.step.outcome == "stepped" and not same(before, weights(policy))


def test_a_log_prob_of_a_response_without_advantage_counts_too(model_dir, world):
    """It would reach no loss and no gradient, and only the next numbers would show it."""
    config, policy, updater = setup(model_dir, world)
    groups = with_rewards(make_groups(describe(model_dir), 2, 4, 22), [1, 0, 0, 0, 1, 1, 1, 1])
    lengths = [t.num_tokens for g in groups for t in g.trajectories]
    quiet = next(n for n in lengths[4:] if n not in lengths[:4])
    poison(policy, NAN, quiet)
    assert go(config, policy, updater, groups, world, model_dir).step.reason == "log_prob"


def test_a_log_prob_of_the_start_of_the_take_counts_too(model_dir, world):
    """Without TIS a NaN in pi_old would be read as missing: ratio 1, and nobody would know."""
    config, policy, updater = setup(model_dir, world, algorithm={"correction": {"kind": "none"}})
    info = describe(model_dir)
    groups = make_groups(info, 2, 4, 23)
    state = score_take(policy, rows_of(groups, 0, 0, info), config, info, world)
    trained = go(config, policy, updater, groups, world, model_dir, state=state)
    assert trained.step.outcome == "stepped"
    broken = dict(state.old_logp)
    name = groups[0].trajectories[0].trajectory_id
    broken[name] = torch.full_like(broken[name], NAN)
    out = go(config, policy, updater, groups, world, model_dir, state=TakeState(broken))
    assert out.step.reason == "log_prob"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_weight_that_is_none_is_seen_also_where_no_token_uses_it(model_dir, world, value):
    config, policy, updater = setup(model_dir, world)
    info = describe(model_dir)
    groups = make_groups(info, 2, 4, 24)
    name, parameter = next((n, p) for n, p in policy.named_parameters() if n.endswith("embed_tokens.weight"))
    used = {int(i) for g in groups for t in g.trajectories for i in (*t.token_ids, *g.prompt.token_ids)}
    free = next(i for i in range(info.vocab_size) if i not in used)
    parameter.to_local().data[free, 0] = value
    before, state = weights(policy), state_of(updater)
    out = go(config, policy, updater, groups, world, model_dir)
    assert (out.step.outcome, out.step.reason) == ("non_finite", "weight")
    assert np.isfinite(out.table["k3"]).all(), "a token uses it"
    after = weights(policy)
    assert all(torch.equal(before[n].nan_to_num(7), after[n].nan_to_num(7)) for n in before)
    assert same(state, state_of(updater))
    assert broken_weight(policy) == name


def test_a_step_that_makes_a_weight_non_finite_ends_the_learner(model_dir, world):
    """A second moment below 0, as damaged memory may leave it: a finite gradient, and a root that is none."""
    config, policy, updater = setup(model_dir, world)
    info = describe(model_dir)
    go(config, policy, updater, make_groups(info, 2, 4, 25), world, model_dir)
    name, parameter = next((n, p) for n, p in policy.named_parameters() if n.endswith("lm_head.weight"))
    updater._optimizer.state[parameter]["exp_avg_sq"].to_local()[0, 3] = -1e9
    with pytest.raises(TrainingError, match=rf"step of update 1 made a weight non-finite \({name} on rank 0\)"):
        go(config, policy, updater, make_groups(info, 2, 4, 26), world, model_dir, update=1)


def test_a_loss_that_overflows_is_called_a_loss(model_dir, world):
    config, policy, updater = setup(model_dir, world, algorithm={"advantage": "dr_grpo"})
    before = weights(policy)
    groups = with_rewards(make_groups(describe(model_dir), 1, 4, 27), [1e300, 0, 0, 0])
    out = go(config, policy, updater, groups, world, model_dir)
    assert (out.step.outcome, out.step.reason) == ("non_finite", "loss")
    assert same(before, weights(policy))


@pytest.mark.parametrize("bad", [-INF, INF, 0.3])
def test_an_impossible_rollout_log_prob_that_comes_this_far_is_not_trained(model_dir, world, bad):
    """Generator and replay refuse it. Here the response loses its tokens, its reward stays in the baseline."""
    info = describe(model_dir)
    groups = with_rewards(make_groups(info, 1, 4, 28), [1, 0, 1, 0])
    t = groups[0].trajectories[1]
    logprobs = t.logprobs.copy()
    logprobs[0] = bad
    results = []
    for change in ({"logprobs": logprobs}, {"loss_mask": np.zeros(t.num_tokens, bool), "route_counts": None}):
        config, policy, updater = setup(model_dir, world)
        made = (groups[0].trajectories[0], replace(t, **change), *groups[0].trajectories[2:])
        out = go(config, policy, updater, [replace(groups[0], trajectories=made)], world, model_dir)
        assert out.step.outcome == "stepped"
        results.append((out, weights(policy)))
    refused, masked = results
    assert same(refused[1], masked[1]), "trained as if it had no token"
    assert torch.equal(refused[0].advantages, masked[0].advantages)
    assert refused[0].totals.tokens == sum(x.num_tokens for x in groups[0].trajectories) - t.num_tokens
    assert update_scalars(refused[0], info)["mismatch/refused_responses"] == 1
    assert update_scalars(masked[0], info)["mismatch/refused_responses"] == 0


def test_route_counts_that_cannot_be_are_no_counts(model_dir, world):
    """A generator that counts one token too few must not end the run: its response has no drift, and trains."""
    config, policy, updater = setup(model_dir, world)
    groups = make_groups(describe(model_dir), 1, 4, 29)
    t = groups[0].trajectories[2]
    short = t.route_counts.copy()
    short[0, 1, int(short[0, 1].argmax())] -= 1
    made = (*groups[0].trajectories[:2], replace(t, route_counts=short), groups[0].trajectories[3])
    out = go(config, policy, updater, [replace(groups[0], trajectories=made)], world, model_dir)
    assert out.step.outcome == "stepped"
    assert np.isnan(out.table["drift"]).tolist() == [False, False, True, False]
    assert out.totals.tokens == groups[0].num_tokens


def test_every_reason_has_its_metric():
    assert all(is_known(f"optim/skipped/{reason}") for reason in REASONS)
