"""Replay of the take's own routes: its first batch is that of native routing, later ones run on those of pi_old."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.config import validate
from asyncrl.errors import TrainingError
from asyncrl.learner.loop import MAX_UNFORCED
from asyncrl.learner.probing import score_probes
from asyncrl.learner.recorder import absent
from asyncrl.learner.records import update_scalars
from asyncrl.learner.update import run_update, score_take
from asyncrl.metrics.names import is_known
from asyncrl.models.describe import describe
from tests.learner.groups import make_groups
from tests.learner.takes import Spy, batches_of, made, run_take, same_gradients, whole
from tests.learner.test_loop import bare_learner
from tests.learner.test_loop import outcome as stepped

R2 = {"routes": "r2", "rdc": {"mode": "observe"}}


def used_routes(policy):
    """A list that every forward of the policy appends its routes [L, B, S, K] to, with its micro-batch."""
    seen = []
    policy.register_forward_hook(lambda _m, args, _out: seen.append((args[0], policy.hook.used.clone())))
    return seen


def test_the_first_batch_of_a_take_is_natively_routed_to_the_bit(model_dir, world):
    info = describe(model_dir)
    found = []
    for routes in ("r2", "native"):
        config, policy, updater = made(model_dir, world, algorithm={"routes": routes, "rdc": {"mode": "observe"}})
        _, (outcome,), _ = run_take(config, policy, updater, batches_of(info, 1), world)
        found.append((updater, outcome, whole(policy)))
    (spy, r2, weights), (plain, native, others) = found
    assert same_gradients(spy, plain)
    assert all(torch.equal(weights[n], others[n]) for n in weights)
    for column in set(r2.table.columns) - {"native_drift"}:
        np.testing.assert_array_equal(r2.table[column], native.table[column], err_msg=column)
    # The routes that were forced are the native ones of now, so upstream layers are natively routed too.
    np.testing.assert_array_equal(r2.table["native_drift"], native.table["drift"])


@pytest.mark.parametrize("scoring", ["auto", "separate"])
@pytest.mark.parametrize("budget", [4096, 40])
def test_later_batches_run_on_the_routes_of_the_scoring_pass(model_dir, world, scoring, budget):
    info = describe(model_dir)
    config, policy, updater = made(
        model_dir, world, algorithm=R2 | {"native_drift_every": 0},
        learner={"lr": 0.02, "warmup_updates": 0, "scoring": scoring, "micro_batch_tokens": budget},
    )  # fmt: skip
    batches = batches_of(info, 3)
    state = score_take(policy, [r for b in batches for r in b], config, info, world)
    assert all(t.forced and t.scores is None and t.routes.dtype == np.uint8 for t in state.routes.values())
    seen, flipped = used_routes(policy), 0
    for u, batch in enumerate(batches):
        outcome = run_update(policy, updater, batch, u, 0.0, state, config, info, world)
        forwards = 0
        while seen:
            micro, used = seen.pop(0)
            forwards += 1
            for j, i in enumerate(micro.index):
                size = batch[i].size
                taken = state.routes[batch[i].trajectory.trajectory_id].routes
                got = used[:, j, : size - 1].permute(1, 0, 2).numpy()
                assert np.array_equal(got, taken[: size - 1])
                flipped += u > 0 and not np.array_equal(np.sort(got), np.sort(batch[i].trajectory.routes))
        assert forwards >= (1 if outcome.fused else 2)
        assert outcome.forced_fraction == 1.0
    assert flipped > 0, "the routes of the rollout are others, else this test shows nothing"


def test_what_is_forced_is_no_longer_what_the_router_would_choose(model_dir, world):
    info = describe(model_dir)
    found = {}
    for routes in ("r2", "native"):
        config, policy, updater = made(model_dir, world, algorithm={"routes": routes, "rdc": {"mode": "observe"}})
        _, outcomes, _ = run_take(config, policy, updater, batches_of(info, 3), world)
        found[routes] = updater, outcomes
    (forced, r2), (native, plain) = found["r2"], found["native"]
    assert all(torch.equal(forced.gradients[0][n], native.gradients[0][n]) for n in forced.gradients[0])
    assert any(not torch.equal(forced.gradients[1][n], native.gradients[1][n]) for n in forced.gradients[1])
    assert r2[1].step.loss != plain[1].step.loss
    # The drift of native routes: in the pass with forced upstream layers, and exactly in a pass of its own.
    assert not np.array_equal(r2[2].table["drift"], r2[2].table["native_drift"])


def test_pi_old_and_pi_of_an_unmoved_policy_are_equal_under_r2(model_dir, world):
    info = describe(model_dir)
    config, policy, _ = made(model_dir, world, algorithm=R2)
    updater = Spy(policy, config.learner.model_copy(update={"lr": 0.0}), config.algorithm, world)
    batches = batches_of(info, 3)
    state, _, _ = run_take(config, policy, updater, batches, world)
    for batch, scores, values in zip(batches, updater.scores, updater.values, strict=True):
        for part in scores.parts:
            for j, i in enumerate(part.batch.index):
                now, then = part.logp[j, : batch[i].size].detach(), values.old_logp[i]
                torch.testing.assert_close(now, then, atol=1e-5, rtol=0)
                assert values.old_logp[i] is state.old_logp[batch[i].trajectory.trajectory_id]


def test_metrics_of_r2_have_names_of_their_own(model_dir, world):
    info = describe(model_dir)
    config, policy, updater = made(model_dir, world, algorithm=R2 | {"native_drift_every": 2})
    _, outcomes, _ = run_take(config, policy, updater, batches_of(info, 3), world)
    scalars = [update_scalars(o, info) for o in outcomes]
    for u, s in enumerate(scalars):
        assert s["r2/forced_fraction"] == 1.0 and s["r2/in_pass_drift"] > 0
        assert not [n for n in s if n.startswith("r3/")]
        assert all(is_known(n) for n in s)
        # Native drift only where the extra pass measured it.
        assert ("drift/mean" in s) == (u != 1)
    assert scalars[0]["drift/mean"] == pytest.approx(scalars[0]["r2/in_pass_drift"], abs=1e-12)
    assert scalars[2]["drift/mean"] != scalars[2]["r2/in_pass_drift"]


def test_exact_native_drift_is_that_of_a_native_pass_with_the_same_weights(model_dir, world):
    info = describe(model_dir)
    config, policy, updater = made(model_dir, world, algorithm=R2)
    batches = batches_of(info, 2)
    _, outcomes, before = run_take(config, policy, updater, batches, world)
    other, again, spy = made(model_dir, world)
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.to_local().copy_(before[1][name])
    plain = run_update(again, spy, batches[1], 1, 0.0, None, other, info, world)
    np.testing.assert_array_equal(outcomes[1].table["native_drift"], plain.table["drift"])
    np.testing.assert_array_equal(outcomes[1].table["layer_1"], plain.table["layer_1"])


def test_the_only_batch_of_a_take_is_native_and_nothing_is_said_of_forcing(model_dir, world):
    info = describe(model_dir)
    config, policy, updater = made(model_dir, world, algorithm=R2)
    seen = used_routes(policy)
    _, (outcome,), _ = run_take(config, policy, updater, batches_of(info, 1), world, alone=True)
    assert math.isnan(outcome.forced_fraction)
    scalars = update_scalars(outcome, info)
    assert not [n for n in scalars if n.startswith(("r2/", "r3/"))]
    assert scalars["drift/mean"] > 0
    other, again, spy = made(model_dir, world)
    run_take(other, again, spy, batches_of(info, 1), world, alone=True)
    assert same_gradients(updater, spy)
    assert outcome.fused and len(seen) == len(updater.scores[0].parts), "no extra pass: the scoring pass was native"


def test_responses_without_routes_of_the_rollout_train_as_well(model_dir, world):
    info = describe(model_dir)
    found = []
    for keep in (True, False):
        config, policy, updater = made(model_dir, world, algorithm=R2)
        batches = batches_of(info, 2)
        if not keep:
            batches = [
                [replace(r, trajectory=replace(r.trajectory, routes=None), counts=None) for r in batch]
                for batch in batches
            ]
        _, outcomes, _ = run_take(config, policy, updater, batches, world)
        assert [o.forced_fraction for o in outcomes] == [1.0, 1.0]
        found.append(updater)
    assert same_gradients(*found)


def test_probes_are_natively_routed_and_need_no_routes(model_dir, world):
    info = describe(model_dir)
    probes = [
        replace(g, trajectories=tuple(replace(t, routes=None) for t in g.trajectories))
        for g in make_groups(info, 2, 4, seed=5)
    ]
    tables = []
    for routes in ("r2", "native"):
        config, policy, _ = made(model_dir, world, algorithm={"routes": routes, "rdc": {"mode": "observe"}})
        tables.append(score_probes(policy, probes, 0, 0, config, info, world))
    np.testing.assert_array_equal(tables[0]["drift"], tables[1]["drift"])


@pytest.mark.parametrize("routes", ["r2", "native", "r3"])
def test_only_r3_ends_a_run_in_which_nothing_is_forced(routes):
    learner = bare_learner()
    staleness = {"updates_per_take": 3, "max_lag": 8}
    learner.config = validate({"model": {"path": "x"}, "algorithm": {"routes": routes}, "staleness": staleness})
    for forced in [math.nan] * MAX_UNFORCED + [0.0] * (MAX_UNFORCED - 1):
        learner._advance(stepped(forced=forced))
    if routes == "r3":
        with pytest.raises(TrainingError, match=r"algorithm\.routes=r3"):
            learner._advance(stepped(forced=0.0))
    else:
        learner._advance(stepped(forced=0.0))


def test_charts_of_the_other_replay_are_left_out():
    def missing(**algorithm):
        staleness = {"updates_per_take": 2, "max_lag": 8}
        return absent(validate({"model": {"path": "x"}, "algorithm": algorithm, "staleness": staleness}))

    assert {"r3/", "r2/"} <= set(missing())
    assert "r3/" in missing(routes="r2") and "r2/" not in missing(routes="r2")
    assert "r2/" in missing(routes="r3") and "r3/" not in missing(routes="r3")
    # The last take of a run may have one batch, which is natively routed.
    assert "drift/" not in missing(routes="r2", native_drift_every=0)
    assert "drift/" in missing(routes="r3", native_drift_every=0)
