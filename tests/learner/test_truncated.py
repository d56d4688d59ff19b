"""Responses without a token to train: cut off and masked, empty, or all of a batch (B26)."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.learner.batch import collate, rows_of
from asyncrl.learner.records import update_scalars
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from tests.learner.groups import make_groups, make_trajectory
from tests.learner.test_batch import INFO, group_of, traced
from tests.learner.test_update import same, setup, weights, with_rewards


def cut_off(group, *which):
    made = [replace(t, finish_reason="length") if i in which else t for i, t in enumerate(group.trajectories)]
    return replace(group, trajectories=tuple(made))


def empty(group, *which):
    def nothing(t):
        return replace(
            t, token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), loss_mask=np.zeros(0, bool),
            segments=(), route_counts=np.zeros((0, 2, 8), np.uint16), routes=None, finish_reason="stop",
        )  # fmt: skip

    made = [nothing(t) if i in which else t for i, t in enumerate(group.trajectories)]
    return replace(group, trajectories=tuple(made))


def go(config, policy, updater, groups, world, info, bound=0):
    rows = rows_of(groups, 0, bound, info, config.algorithm.truncated == "mask")
    return run_update(policy, updater, rows, 0, 0.0, None, config, info, world)


def test_b26_a_response_cut_by_length_and_padded_to_8_has_5_mask_entries():
    rows = rows_of([cut_off(group_of(traced("a", 0, 2, 5), traced("b", 0, 2, 8), prompt=(1, 2)), 0)], 5, 0, INFO)
    assert rows[0].loss_mask.tolist() == [True] * 5
    batch = collate(rows, [0, 1], INFO, True, False)
    assert batch.predict_mask[0].tolist() == [False] + [True] * 5 + [False] * 4


def test_masked_rows_have_no_token_no_count_and_no_stale_token():
    t = make_trajectory("a", 3, 10, INFO, np.random.default_rng(0), ((7, 4), (8, 10)))
    group = cut_off(group_of(t, replace(t, trajectory_id="b")), 0)
    row, mate = rows_of([group], 9, 8, INFO, mask_truncated=True)
    assert not row.loss_mask.any() and not row.count_mask.any() and row.counts.sum() == 0
    assert (row.withheld, row.masked, row.max_lag) == (10, 0, 0)
    assert (mate.withheld, mate.masked) == (0, 4) and mate.loss_mask.sum() == 6
    kept, _ = rows_of([group], 9, 8, INFO)
    assert (kept.withheld, kept.masked) == (0, 4)


def test_tokens_that_the_policy_did_not_sample_are_not_withheld():
    t = replace(traced("a", 0, 3, 4), loss_mask=np.array([True, False, False, True]))
    (row,) = rows_of([cut_off(group_of(t), 0)], 5, 0, INFO, mask_truncated=True)
    assert row.withheld == 2


@pytest.mark.parametrize("rdc", [{}, {"mode": "off"}, {"normalize": "retained"}])
def test_a_masked_response_counts_in_the_baseline_of_its_group_and_nowhere_else(model_dir, world, rdc):
    info = describe(model_dir)
    config, policy, updater = setup(model_dir, world, algorithm={"truncated": "mask", "rdc": rdc})
    (group,) = with_rewards(make_groups(info, 1, 4, 6), [1, 0, 0, 0])
    out = go(config, policy, updater, [cut_off(group, 3)], world, info)
    lengths = [t.num_tokens for t in group.trajectories]
    # (1 - 1/4) / std of 1, 0, 0, 0: the reward of the masked one is in the mean and in the deviation.
    assert out.advantages[0] == pytest.approx(0.75 / 0.5, abs=1e-4)
    assert out.table["tokens"].tolist() == [*lengths[:3], 0]
    assert math.isnan(out.table["drift"][3]) and bool(out.keep[3]) and out.step.outcome == "stepped"
    kept = out.keep.tolist() if rdc.get("normalize") == "retained" else [True] * 4
    assert out.totals.tokens == sum(n for n, k in zip(lengths[:3], kept, strict=False) if k)
    s = update_scalars(out, info)
    total = sum(lengths)
    assert (s["policy/truncated_masked"], s["policy/truncated_fraction"]) == (0.25, 0.25)
    assert s["policy/truncated_masked_tokens"] == pytest.approx(lengths[3] / total)
    assert (s["staleness/masked_token_fraction"], s["staleness/stale_responses"]) == (0, 0)
    assert s["policy/tokens"] == total - lengths[3]


def test_masking_is_as_if_the_loss_mask_had_come_empty(model_dir, world):
    info = describe(model_dir)
    groups = with_rewards(make_groups(info, 2, 4, 6), [1, 0, 0, 1, 0, 1, 1, 0])
    masked = [cut_off(groups[0], 1, 2), groups[1]]

    def bare(t):
        return replace(t, loss_mask=np.zeros(t.num_tokens, bool), route_counts=np.zeros_like(t.route_counts))

    first, second, third, fourth = groups[0].trajectories
    by_hand = [replace(groups[0], trajectories=(first, bare(second), bare(third), fourth)), groups[1]]
    after = []
    for truncated, made in (("mask", masked), ("keep", by_hand)):
        config, policy, updater = setup(model_dir, world, algorithm={"truncated": truncated, "rdc": {"mode": "off"}})
        out = go(config, policy, updater, made, world, info)
        after.append((out.step.loss, weights(policy)))
    assert after[0][0] == pytest.approx(after[1][0], rel=1e-6)
    for name, value in after[0][1].items():
        torch.testing.assert_close(value, after[1][1][name], rtol=1e-4, atol=1e-6)


def test_keep_trains_cut_off_responses_as_any_other(model_dir, world):
    info = describe(model_dir)
    results = []
    for which in ((), (0, 3)):
        config, policy, updater = setup(model_dir, world)
        out = go(config, policy, updater, [cut_off(make_groups(info, 1, 4, 6)[0], *which)], world, info)
        results.append((out.step.loss, out.totals, weights(policy)))
    assert results[0][:2] == results[1][:2] and same(results[0][2], results[1][2])


def test_undefined_drift_of_masked_responses_follows_on_undefined(model_dir, world):
    info = describe(model_dir)
    algorithm = {"truncated": "mask", "rdc": {"on_undefined": "drop"}}
    config, policy, updater = setup(model_dir, world, algorithm=algorithm)
    (group,) = with_rewards(make_groups(info, 1, 4, 6), [1, 0, 0, 1])
    out = go(config, policy, updater, [cut_off(group, 3)], world, info)
    assert not bool(out.keep[3]) and out.advantages[0] == pytest.approx(out.advantages[3])


@pytest.mark.parametrize("make", [cut_off, empty])
@pytest.mark.parametrize("size", [2, 4])
def test_b26_a_batch_without_a_token_has_loss_0_and_changes_no_weight(model_dir, world, make, size):
    info = describe(model_dir)
    config, policy, updater = setup(model_dir, world, algorithm={"truncated": "mask"})
    before = weights(policy)
    (group,) = with_rewards(make_groups(info, 1, size, 6), [1, 0, 0, 1][:size])
    out = go(config, policy, updater, [make(group, *range(size))], world, info)
    assert out.step.outcome == "filtered" and (out.step.loss, out.step.grad_norm) == (0.0, 0.0)
    assert same(before, weights(policy))
    s = update_scalars(out, info)
    assert s["policy/tokens"] == 0 and s["drift/undefined"] == size


def test_b26_an_empty_response_among_four_has_no_drift_and_no_token_and_its_reward_is_in_the_mean(model_dir, world):
    info = describe(model_dir)
    config, policy, updater = setup(model_dir, world)
    (group,) = with_rewards(make_groups(info, 1, 4, 6), [1, 1, 1, 0])
    out = go(config, policy, updater, [empty(group, 3)], world, info)
    assert out.advantages.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-4)
    assert math.isnan(out.table["drift"][3]) and out.table["tokens"][3] == 0 and out.step.outcome == "stepped"
    assert out.totals.tokens == sum(t.num_tokens for t in group.trajectories[:3])


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_groups_of_any_size_get_their_advantages_from_what_is_there(model_dir, world, size):
    # Responses that nothing could score are left out, so that groups of one update differ in size.
    info = describe(model_dir)
    config, policy, updater = setup(model_dir, world, algorithm={"advantage": "dr_grpo"})
    first, second = make_groups(info, 2, size, 1)[0], make_groups(info, 2, 4, 2)[1]
    groups = with_rewards([first, second], [1] + [0] * (size - 1) + [1, 1, 0, 0])
    out = go(config, policy, updater, groups, world, info)
    expected = [1 - 1 / size] + [-1 / size] * (size - 1) + [0.5, 0.5, -0.5, -0.5]
    assert out.advantages.tolist() == pytest.approx(expected)
    assert update_scalars(out, info)["policy/responses"] == size + 4
