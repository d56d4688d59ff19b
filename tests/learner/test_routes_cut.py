"""Responses whose first routes are unknown, from the engine's completion through the wire to drift, R3 and metrics.

An engine that computes old rows again under newer weights has lost what sampled those tokens; they train as always.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl import wire
from asyncrl.generator.collect import to_trajectory
from asyncrl.learner.batch import collate, rows_of
from asyncrl.learner.health import usable
from asyncrl.learner.records import update_scalars
from asyncrl.learner.score import score
from asyncrl.learner.shard import reshard
from asyncrl.models.describe import describe
from asyncrl.types import Completion, Group, Prompt, Segment, Version
from tests.learner.groups import make_groups
from tests.learner.test_update import go, same, setup, weights, with_rewards

P, T = 5, 10
OBSERVE = {"rdc": {"mode": "observe"}}


@pytest.fixture
def info(model_dir):
    return describe(model_dir)


@pytest.fixture
def groups(info):
    return with_rewards(make_groups(info, 2, 4, 5), [1, 0, 0, 1, 0, 1, 0, 0])


def completion_of(info, versions, first, seed=0):
    """T random tokens with random routes; versions lists (update, end) of each segment, first is routes_from."""
    rng = np.random.default_rng(seed)
    ends = [0, *(end for _, end in versions)]
    segments = tuple(Segment(Version(0, u), a, b) for (u, b), a in zip(versions, ends, strict=False))
    order = rng.random((P + T - 1, len(info.layers), info.num_experts)).argsort(-1)[..., : info.top_k]
    tokens = rng.integers(0, info.vocab_size, T).astype(np.int32)
    logprobs = -np.ones(T, np.float32)
    routes = order.astype(info.route_dtype)
    return Completion(tokens, logprobs, segments, "length", routes, routes_from=first)


def group_of(info, *completions, full=True):
    """As a learner receives it."""
    prompt = Prompt("p", np.arange(P, dtype=np.int32), "", "", "t")
    made = tuple(
        to_trajectory(c, f"0/p#0.{i}", P, float(i % 2), info, full, None) for i, c in enumerate(completions)
    )  # fmt: skip
    return wire.decode_group([bytes(f) for f in wire.encode_group(Group("0/p", prompt, "g0", 0, 1.0, made))])


def native_routes(policy, batch):
    """The policy's own choices [S, L, K] for the first row."""
    with torch.no_grad():
        _, _, native = policy(replace(batch, routes=None))
    return native[:, 0].permute(1, 0, 2).numpy()


def by_hand(routes, native, tokens, info):
    """Drift of response tokens `tokens` from the definition: shares of choices, halved differences, their mean."""
    layers = []
    for layer in range(len(info.layers)):
        share = np.zeros((2, info.num_experts))
        for side, chosen in enumerate((routes, native)):
            for j in tokens:
                for expert in chosen[P - 1 + j, layer]:
                    share[side, expert] += 1 / (len(tokens) * info.top_k)
        layers.append(np.abs(share[0] - share[1]).sum() / 2)
    return np.mean(layers)


def scored(policy, rows, info, world, replay=False):
    batches = [collate(rows, range(len(rows)), info, False, replay)]
    return score(policy, usable(rows, info.top_k)[0], batches, False, info, world), batches[0]


def test_drift_is_that_of_exactly_the_six_tokens_of_the_second_version(made, info, world):
    policy = made[0]
    done = completion_of(info, [(3, 4), (4, 10)], P - 1 + 4)
    (row,) = rows_of([group_of(info, done)], 4, 0, info)
    assert row.counts.sum(1).tolist() == [6 * info.top_k] * len(info.layers) and row.loss_mask.sum() == 10
    scores, batch = scored(policy, [row], info, world)
    native = native_routes(policy, batch)
    wanted = by_hand(done.routes, native, range(4, 10), info)
    assert scores.drift[0] == pytest.approx(wanted, abs=1e-12) and wanted > 0
    assert scores.layers[0].mean() == pytest.approx(wanted, abs=1e-12)
    # What stands in the unknown rows means nothing; with known rows it would.
    other = replace(done, routes=done.routes.copy())
    other.routes[: P - 1 + 4] = [0, 1]
    again, _ = scored(policy, rows_of([group_of(info, other)], 4, 0, info), info, world)
    assert again.drift[0] == scores.drift[0]
    whole, _ = scored(policy, rows_of([group_of(info, replace(other, routes_from=0))], 4, 0, info), info, world)
    assert whole.drift[0] == pytest.approx(by_hand(other.routes, native, range(10), info), abs=1e-12)
    assert whole.drift[0] != scores.drift[0]


@pytest.mark.parametrize(
    ("first", "bound", "counted"),
    [
        (0, 0, range(10)),
        (0, 4, range(3, 10)),  # too old: the three tokens of version 3
        (P - 1 + 6, 0, range(6, 10)),  # unknown: all before the last version
        (P - 1 + 6, 4, range(6, 10)),  # both, and the staleness mask takes what was not counted anyway
        (P - 1 + 2, 4, range(3, 10)),
        (P - 1 + 4, 4, range(4, 10)),  # a border in the middle of the second segment
        (P - 1 + 4, 5, range(6, 10)),
        (3, 5, range(6, 10)),  # only prompt rows are unknown
    ],
)
def test_the_staleness_mask_removes_exactly_its_counts_of_what_is_left(made, info, world, first, bound, counted):
    policy = made[0]
    done = completion_of(info, [(3, 3), (4, 6), (5, 10)], first)
    (row,) = rows_of([group_of(info, done)], 5, bound, info)
    masked = {0: 0, 4: 3, 5: 6}[bound]
    assert (row.masked, row.loss_mask.sum()) == (masked, 10 - masked)
    assert row.count_mask.nonzero()[0].tolist() == list(counted)
    by_token = np.zeros((len(info.layers), info.num_experts), np.int64)
    for j in counted:
        for layer in range(len(info.layers)):
            by_token[layer, done.routes[P - 1 + j, layer]] += 1
    assert (row.counts == by_token).all()
    scores, batch = scored(policy, [row], info, world)
    wanted = by_hand(done.routes, native_routes(policy, batch), counted, info)
    assert scores.drift[0] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("first", "bound"), [(P - 1 + T, 0), (P - 1 + 6, 6), (P - 1 + 9, 6)])
def test_drift_is_undefined_when_no_counted_token_is_left(made, info, world, first, bound):
    policy = made[0]
    done = completion_of(info, [(3, 6), (5, 10)], first)
    cut, fresh = group_of(info, done), group_of(info, completion_of(info, [(6, 10)], 0, 1))
    rows = rows_of([cut, fresh], 6, bound, info)
    scores, _ = scored(policy, rows, info, world)
    assert math.isnan(scores.drift[0]) and np.isnan(scores.layers[0]).all()
    assert scores.drift[1] > 0


def test_counts_that_belong_to_another_first_row_leave_no_drift(info, caplog):
    group = group_of(info, completion_of(info, [(3, 10)], P - 1 + 4))
    claimed = replace(group, trajectories=(replace(group.trajectories[0], routes_from=0),))
    for received, known in ((group, True), (claimed, False)):
        (row,), refused = usable(rows_of([received], 3, 0, info), info.top_k)
        assert (row.counts is not None) == known and not refused.any() and row.loss_mask.all()
    assert "its route counts are not 10 x 2 per layer" in caplog.text


def cut_some(groups, info):
    """Groups whose every other response has unknown routes before the middle of its tokens."""
    out = []
    for g in groups:
        made = list(g.trajectories)
        for i in range(0, len(made), 2):
            t = made[i]
            first = len(g.prompt.token_ids) - 1 + t.num_tokens // 2
            done = Completion(t.token_ids, t.logprobs, t.segments, t.finish_reason, t.routes, routes_from=first)
            made[i] = to_trajectory(done, t.trajectory_id, len(g.prompt.token_ids), t.reward, info, True)
        out.append(replace(g, trajectories=tuple(made)))
    return out


def test_what_trains_does_not_depend_on_which_routes_are_known(groups, info, model_dir, world):
    after = []
    for received in (groups, cut_some(groups, info)):
        config, policy, updater = setup(model_dir, world, algorithm=OBSERVE)
        out = go(config, policy, updater, received, world, model_dir)
        after.append((weights(policy), out))
    (uncut, plain), (cut, out) = after
    assert same(uncut, cut) and out.step.loss == plain.step.loss
    assert out.table["drift"][1] == plain.table["drift"][1]
    s, t = update_scalars(out, info), update_scalars(plain, info)
    half = sum(g.trajectories[i].num_tokens // 2 for g in groups for i in (0, 2))
    assert (s["drift/routes_cut"], t["drift/routes_cut"]) == (4, 0)
    assert s["drift/uncounted_fraction"] == half / sum(g.num_tokens for g in groups) > 0
    assert t["drift/uncounted_fraction"] == 0
    assert s["policy/tokens"] == t["policy/tokens"]
    assert s["drift/mean"] != t["drift/mean"]


def test_r3_forces_known_rows_and_leaves_the_others_to_the_learner(groups, info, model_dir, world):
    config, policy, updater = setup(model_dir, world, algorithm={"routes": "r3", "native_drift_every": 1} | OBSERVE)
    received = cut_some(groups, info)
    rows = rows_of(received, 0, 0, info)
    batch = collate(rows, range(len(rows)), info, False, True)
    with torch.no_grad():
        policy(batch)
    used, native = policy.hook.used, policy.hook.native
    reshard(policy)
    for i, row in enumerate(rows):
        first, last = row.trajectory.routes_from, row.size - 1
        assert torch.equal(used[:, i, :first].sort(-1)[0], native[:, i, :first].sort(-1)[0])
        sent = torch.from_numpy(row.trajectory.routes[first:].astype(np.int64)).permute(1, 0, 2)
        assert torch.equal(used[:, i, first:last].sort(-1)[0], sent.sort(-1)[0])
    out = go(config, policy, updater, received, world, model_dir)
    s = update_scalars(out, info)
    known = sum(row.size - 1 - row.trajectory.routes_from for row in rows)
    assert s["r3/forced_fraction"] == pytest.approx(known / sum(row.size - 1 for row in rows), abs=1e-9)
    assert 0 < s["r3/forced_fraction"] < 1
    assert s["drift/routes_cut"] == 4 and s["drift/mean"] > 0 and s["drift/undefined"] == 0


def test_r3_without_one_known_row_has_forced_nothing(groups, info, model_dir, world):
    config, policy, updater = setup(model_dir, world, algorithm={"routes": "r3"} | OBSERVE)
    bare = [
        replace(g, trajectories=tuple(
            replace(t, routes_from=len(g.prompt.token_ids) - 1 + t.num_tokens, route_counts=0 * t.route_counts)
            for t in g.trajectories
        ))
        for g in groups
    ]  # fmt: skip
    out = go(config, policy, updater, bare, world, model_dir)
    assert out.forced_fraction == 0  # which ends a run that never forces
    assert update_scalars(out, info)["r3/forced_fraction"] == 0
    assert out.step.outcome == "stepped"
