"""B15: rollout log-probs [-0.1, null, NaN, -2.0] train as if the two that are missing were the learner's own."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl import wire
from asyncrl.config import validate
from asyncrl.generator.collect import to_trajectory
from asyncrl.learner.batch import rows_of
from asyncrl.learner.objective import LossSums, Tokens, Totals, batch_loss
from asyncrl.learner.records import update_scalars
from asyncrl.learner.update import score_take
from asyncrl.models.describe import describe
from asyncrl.types import Completion, Segment, Version
from tests.learner.groups import make_groups
from tests.learner.test_update import go, setup, with_rewards

NAN, INF = math.nan, math.inf
LOGP = [-0.2, -0.3, -0.4, -1.5]
HOLES = [-0.1, None, NAN, -2.0]

SETTINGS = {
    "tis by token": {"correction": {"kind": "tis", "level": "token"}},
    "tis by response": {"correction": {"kind": "tis", "level": "sequence"}},
    "no correction": {"correction": {"kind": "none"}},
    "behaviour": {"ratio": "behaviour", "correction": {"kind": "none"}},
}


def loss_of(settings, rollout, aggregation="token_mean"):
    """Loss of one response of 4 tokens with advantage 1, and its gradient by each log-prob."""
    a = validate({"model": {"path": "x"}, "algorithm": {**settings, "aggregation": aggregation}}).algorithm
    logp = torch.tensor([LOGP], requires_grad=True)
    mu = torch.tensor(np.array([rollout], np.float32))
    mask = torch.ones(1, 4, dtype=torch.bool)
    loss = batch_loss(Tokens(logp, logp.detach(), mu, torch.ones(1), mask), a, Totals(4, 1, 4), LossSums())
    loss.backward()
    return loss.detach(), logp.grad[0]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", SETTINGS)
def test_b15_missing_log_probs_act_as_ratio_one(name, aggregation):
    # The learner's own values are what a ratio of exactly 1 means; the others are untouched, bit by bit.
    loss, gradient = loss_of(SETTINGS[name], HOLES, aggregation)
    own = [HOLES[0], LOGP[1], LOGP[2], HOLES[3]]
    wanted_loss, wanted = loss_of(SETTINGS[name], own, aggregation)
    assert torch.isfinite(loss) and torch.equal(loss, wanted_loss)
    assert torch.equal(gradient, wanted)
    if name != "tis by response":
        # A quarter of the advantage, with ratio 1.
        assert gradient[1:3].tolist() == [-0.25, -0.25]


@pytest.mark.parametrize("name", SETTINGS)
def test_b15_a_response_without_any_log_prob_acts_as_on_policy(name):
    loss, gradient = loss_of(SETTINGS[name], [None] * 4)
    assert loss == -1 and gradient.tolist() == [-0.25] * 4


def test_the_correction_matters_where_the_log_probs_are_there():
    """Guards the tests above: at positions 0 and 3 the settings differ."""
    found = [loss_of(s, HOLES)[1][[0, 3]].tolist() for s in SETTINGS.values()]
    assert len({tuple(g) for g in found}) >= 3


@pytest.mark.parametrize("name", ["tis by token", "behaviour"])
def test_b15_from_the_engine_to_the_weights(model_dir, world, name):
    """What an engine returned goes through generator, wire and a whole update; the two missing ones are counted."""
    config, policy, updater = setup(model_dir, world, algorithm=SETTINGS[name] | {"rdc": {"mode": "off"}})
    info = describe(model_dir)
    group = with_rewards(make_groups(info, 1, 4, 7), [1, 0, 0, 0])[0]
    p, routes = len(group.prompt.token_ids), np.zeros((len(group.prompt.token_ids) + 3, 2, 2), np.uint8)
    routes[..., 1] = 1

    def with_first(logprobs):
        segments = (Segment(Version(0, 0), 0, 4),)
        done = Completion(np.array([9, 8, 7, 6], np.int32), logprobs, segments, "stop", routes)
        first = to_trajectory(done, group.trajectories[0].trajectory_id, p, 1.0, info, False)
        made = replace(group, trajectories=(first, *group.trajectories[1:]))
        return wire.decode_group(wire.encode_group(made))

    holes = with_first(HOLES)
    own = score_take(policy, rows_of([holes], 0, 0, info), config, info, world).old_logp
    mine = own[holes.trajectories[0].trajectory_id][p - 1 : p + 3].tolist()
    after = []
    for received, missing in ((holes, 2), (with_first([HOLES[0], mine[1], mine[2], HOLES[3]]), 0)):
        config, policy, updater = setup(model_dir, world, algorithm=SETTINGS[name] | {"rdc": {"mode": "off"}})
        out = go(config, policy, updater, [received], world, model_dir)
        assert out.step.outcome == "stepped" and math.isfinite(out.step.loss)
        assert update_scalars(out, info)["mismatch/missing_logprobs"] == missing
        after.append({n: q.full_tensor().detach().clone() for n, q in policy.named_parameters()})
    assert all(torch.equal(after[0][n], after[1][n]) for n in after[0])
