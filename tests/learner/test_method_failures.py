"""Public failure reports, for every surrogate and every correction: B15, B17, B22, B24, B26, B29, B55 and B56."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.algos.registry import CORRECTIONS, SURROGATES
from asyncrl.config import validate
from asyncrl.learner.batch import rows_of
from asyncrl.learner.objective import LossSums, Tokens, Totals, batch_loss, correction_weights
from asyncrl.learner.records import update_scalars
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update, score_take
from asyncrl.models.describe import describe
from tests.helpers.ranks import free_port, run_ranks
from tests.learner.groups import make_groups
from tests.learner.method_worker import METHODS, train
from tests.learner.test_update import own_logprobs, same, weights, with_rewards

WORKER = Path(__file__).with_name("method_worker.py")
NAN, INF = math.nan, math.inf
READS_MU = [name for name in CORRECTIONS if name not in ("none", "rspo")]
COMBINED = [
    (surrogate, correction, ratio)
    for surrogate in SURROGATES
    for correction in CORRECTIONS
    for ratio in ("proximal", "behaviour")
    if not (ratio == "behaviour" and CORRECTIONS[correction].weighs_mu)
]
every_method = pytest.mark.parametrize(("surrogate", "correction", "ratio"), COMBINED)


def settings(surrogate="clip", correction="none", ratio="proximal", **more):
    tree = {"surrogate": surrogate, "correction": {"kind": correction}, "ratio": ratio} | more
    if SURROGATES[surrogate].aggregation:
        tree.setdefault("aggregation", SURROGATES[surrogate].aggregation)
    return validate({"model": {"path": "x"}, "staleness": {"updates_per_take": 4}, "algorithm": tree}).algorithm


def loss_of(a, logp, old, mu, mask=None, advantages=None, shift=None):
    """The loss of a batch [B, T] and its gradient by the log-probs. Advantages: 1, -1, 1, ..."""
    x = logp.clone().requires_grad_()
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    if advantages is None:
        advantages = 1.0 - 2.0 * (torch.arange(len(logp)) % 2)
    shift = torch.full_like(logp, 0.1) if shift is None else shift
    tokens = Tokens(x, old, mu, advantages, mask, shift)
    loss = batch_loss(tokens, a, Totals(float(mask.sum()), len(logp), float(mask.numel())), LossSums())
    loss.backward()
    return loss.detach(), x.grad


def some(rows=2, tokens=6, seed=0):
    """Log-probs of pi, pi_old and mu [B, T], some way apart."""
    generator = torch.Generator().manual_seed(seed)
    logp = -0.5 - 2 * torch.rand(rows, tokens, generator=generator)
    old = logp + 0.05 * torch.randn(rows, tokens, generator=generator)
    mu = old + 0.3 * torch.randn(rows, tokens, generator=generator)
    return logp, old, mu


@every_method
def test_b15_missing_log_probs_train_as_those_of_the_learner(surrogate, correction, ratio):
    a = settings(surrogate, correction, ratio)
    logp, old, mu = some()
    if ratio == "behaviour":
        # There is one denominator then, and what is missing reads as pi itself.
        old = logp.clone()
    holes, own = mu.clone(), mu.clone()
    holes[:, 1], holes[0, 4] = NAN, NAN
    own[:, 1], own[0, 4] = old[:, 1], old[0, 4]
    loss, gradient = loss_of(a, logp, old, holes)
    wanted_loss, wanted = loss_of(a, logp, old, own)
    assert torch.isfinite(loss) and torch.equal(loss, wanted_loss)
    assert torch.isfinite(gradient).all() and torch.equal(gradient, wanted)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_b15_without_any_log_prob_every_token_weighs_one(correction):
    _, old, _ = some()
    weight = correction_weights(
        old, torch.full_like(old, NAN), torch.ones_like(old), None, settings("clip", correction)
    )
    assert torch.equal(weight, torch.ones_like(old))


@pytest.mark.parametrize("correction", READS_MU)
def test_the_corrections_do_something_where_the_log_probs_are_there(correction):
    """Guards the tests around it."""
    _, old, _ = some()
    mu = old.clone()
    mu[0, 2] += 2.0
    a = settings("clip", correction)
    assert not torch.equal(correction_weights(old, mu, torch.ones_like(old), None, a), torch.ones_like(old))


@every_method
@pytest.mark.parametrize("value", [INF, -INF])
def test_b15_an_infinite_log_prob_is_seen_and_gives_no_gradient(surrogate, correction, ratio, value):
    a = settings(surrogate, correction, ratio)
    logp, old, mu = some()
    clean, _ = loss_of(a, logp, old, mu)
    broken = mu.clone()
    broken[0, 3] = value
    loss, gradient = loss_of(a, logp, old, broken)
    if correction in READS_MU or ratio == "behaviour":
        # The step looks at the loss, so that no weight moves.
        assert torch.isnan(loss)
    else:
        assert torch.equal(loss, clean)
    broken = old.clone()
    broken[0, 3] = value
    loss, gradient = loss_of(a, logp, broken, mu)
    assert torch.isnan(loss) or (ratio == "behaviour" and correction not in READS_MU)
    assert torch.isfinite(gradient[1]).all(), "the response beside it"


@every_method
@pytest.mark.parametrize("apart", [100.0, -100.0])
def test_b15_a_policy_that_is_sure_makes_no_number_that_is_none(surrogate, correction, ratio, apart):
    a = settings(surrogate, correction, ratio)
    logp, old, mu = some()
    for far in ((logp, old, mu + apart), (logp, old + apart, mu), (logp, old + apart, mu - apart)):
        loss, gradient = loss_of(a, *far, shift=torch.full_like(logp, 100.0))
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()


@every_method
def test_b24_padding_changes_nothing(surrogate, correction, ratio):
    a = settings(surrogate, correction, ratio)
    logp, old, mu = some()
    mask = torch.ones_like(logp, dtype=torch.bool)
    mask[1, 2], mask[1, 5] = False, False
    loss, gradient = loss_of(a, logp, old, mu, mask)
    for pads, empty in ((3, 0), (100, 7)):
        wide = [torch.full((2 + empty, 6 + pads), NAN) for _ in range(3)]
        for tensor, values in zip(wide, (logp, old, mu), strict=True):
            tensor[:2, :6] = values
        wide_mask = torch.zeros(2 + empty, 6 + pads, dtype=torch.bool)
        wide_mask[:2, :6] = mask
        x = wide[0].requires_grad_()
        shift = torch.full_like(wide[1], NAN)
        shift[:2, :6] = 0.1
        advantages = torch.tensor([1.0, -1.0] + [5.0] * empty)
        tokens = Tokens(x, wide[1], wide[2], advantages, wide_mask, shift)
        padded = batch_loss(tokens, a, Totals(10.0, 2.0, 12.0), LossSums())
        padded.backward()
        # float32 sums in another order.
        torch.testing.assert_close(padded.detach(), loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(x.grad[:2, :6], gradient, rtol=1e-6, atol=1e-6)
        assert not x.grad[2:].any() and not x.grad[:, 6:].any()


@every_method
def test_b26_a_batch_without_a_token_has_loss_and_gradient_zero(surrogate, correction, ratio):
    a = settings(surrogate, correction, ratio)
    none = torch.full((2, 3), NAN)
    loss, gradient = loss_of(a, none, none, none, torch.zeros(2, 3, dtype=torch.bool), shift=none)
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("estimator", ["unbiased", "k2", "k3", "k1"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_b29_the_kl_term_pulls_where_it_should_although_mu_sampled(surrogate, estimator):
    """pi = (.7, .3), ref = (.4, .6), mu = (.5, .5), in exact expectation. KL(pi || ref) is 0.18379, its gradient on the
    first logit 0.26308."""
    a = settings(surrogate, kl={"coef": 1.0, "estimator": estimator})
    logits = torch.tensor([0.7, 0.3], dtype=torch.float64).log().requires_grad_()
    ref = torch.tensor([0.4, 0.6], dtype=torch.float64).log()
    value = torch.zeros((), dtype=torch.float64)
    for outcome in (0, 1):
        logp = logits.log_softmax(0)[outcome].reshape(1, 1)
        mu = torch.full((1, 1), math.log(0.5), dtype=torch.float64)
        mask = torch.ones(1, 1, dtype=torch.bool)
        sums = LossSums()
        tokens = Tokens(logp, logp.detach(), mu, torch.zeros(1), mask, None, ref[outcome].reshape(1, 1))
        value = value + 0.5 * batch_loss(tokens, a, Totals(1.0, 1.0, 1.0), sums)
        assert sums.kl == pytest.approx(sums.loss)
    value.backward()
    if estimator == "unbiased":
        assert float(value.detach()) == pytest.approx(0.18379, abs=1e-5)
        assert float(logits.grad[0]) == pytest.approx(0.26308, abs=1e-5)
    else:
        assert abs(float(logits.grad[0]) - 0.26308) > 1e-2


def test_b29_the_unbiased_term_is_the_default():
    assert settings(kl={"coef": 0.1}).kl.estimator == "unbiased"


def made(model_dir, world, updates_per_take=4, **algorithm):
    """Config, policy and updater of a method; rdc is off unless it is given."""
    tree = {"rdc": {"mode": "off"}, "native_drift_every": 0} | algorithm
    config = validate(
        {
            "model": {"path": model_dir},
            "learner": {"weight_decay": 0.0, "warmup_updates": 0},
            "staleness": {"sync_every": 1, "updates_per_take": updates_per_take},
            "algorithm": tree,
        }
    )
    policy = build_policy(config.model, config.learner, config.algorithm.replays, world)
    return config, policy, Updater(policy, config.learner, config.algorithm, world)


def update(config, policy, updater, groups, world, model_dir, u=0):
    """One update, of a take that begins with it."""
    info = describe(model_dir)
    rows = rows_of(groups, u, 0, info)
    state = score_take(policy, rows, config, info, world) if config.staleness.updates_per_take > 1 else None
    return run_update(policy, updater, rows, u, 0.0, state, config, info, world)


EMPTYING = {
    "mask": {"correction": {"kind": "mask", "low": 1.0, "high": 1.0}},
    "trm": {"correction": {"kind": "trm", "bound": 1e-12}},
    "mask, gspo": {
        "surrogate": "gspo", "aggregation": "sequence_mean", "correction": {"kind": "mask", "low": 1.0, "high": 1.0},
    },
    "trm under behaviour": {"ratio": "behaviour", "correction": {"kind": "trm", "bound": 1e-12}},
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTYING)
def test_b22_a_correction_that_leaves_nothing_moves_nothing_and_the_next_batch_trains(model_dir, world, name):
    config, policy, updater = made(model_dir, world, **EMPTYING[name])
    info = describe(model_dir)
    before = weights(policy)
    out = update(config, policy, updater, with_rewards(make_groups(info, 2, 4, 31), [1, 0] * 4), world, model_dir)
    s = update_scalars(out, info)
    assert (out.step.outcome, out.step.loss, out.step.grad_norm) == ("stepped", 0, 0)
    assert (s["mismatch/weight_zero"], s["mismatch/weight_mean"]) == (1, 0)
    assert same(before, weights(policy))
    near = own_logprobs(policy, with_rewards(make_groups(info, 2, 4, 32), [1, 0] * 4), config, info, world)
    bare = [
        replace(g, trajectories=tuple(replace(t, logprobs=np.full_like(t.logprobs, NAN)) for t in g.trajectories))
        for g in near
    ]
    again = update(config, policy, updater, bare, world, model_dir, u=1)
    assert again.step.outcome == "stepped" and again.step.grad_norm > 0
    assert update_scalars(again, info)["mismatch/weight_zero"] == 0
    assert not same(before, weights(policy))


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_b22_everything_filtered_makes_no_step_with_any_surrogate(model_dir, world, surrogate):
    config, policy, updater = made(
        model_dir, world, surrogate=surrogate, rdc={"mode": "filter", "on_undefined": "drop"},
        correction={"kind": "none"}, aggregation=SURROGATES[surrogate].aggregation or "token_mean",
    )  # fmt: skip
    before, info = weights(policy), describe(model_dir)
    groups = [
        replace(g, trajectories=tuple(replace(t, route_counts=None) for t in g.trajectories))
        for g in make_groups(info, 2, 4, 33)
    ]
    assert update(config, policy, updater, groups, world, model_dir).step.outcome == "filtered"
    assert same(before, weights(policy))
    assert update(config, policy, updater, make_groups(info, 2, 4, 34), world, model_dir).step.outcome == "stepped"


HOT = {
    **{f"surrogate {s}": {"surrogate": s, "ratio": "behaviour", "correction": {"kind": "none"}} for s in SURROGATES},
    **{f"correction {c}": {"correction": {"kind": c}} for c in CORRECTIONS},
    "r2": {"routes": "r2"},
    "r3": {"routes": "r3", "correction": {"kind": "none"}},
}


@pytest.mark.parametrize("name", HOT)
def test_b17_every_ratio_is_one_at_every_temperature(model_dir, world, name):
    """The same weights on both sides: no ratio leaves 1 in a batch of T = 0.6 and T = 1; with T swapped they all do."""
    config, policy, updater = made(model_dir, world, **HOT[name])
    info = describe(model_dir)
    groups = with_rewards(make_groups(info, 2, 4, 35), [1, 0] * 4)
    groups = [replace(groups[0], temperature=0.6), groups[1]]
    right = own_logprobs(policy, groups, config, info, world)
    wrong = [replace(g, temperature=1.6 - g.temperature) for g in right]
    s = update_scalars(update(config, policy, updater, right, world, model_dir), info)
    assert s["mismatch/kl_k3"] < 1e-9 and s["mismatch/f_1.2"] == 0 and s["policy/clip_fraction"] == 0
    if "mismatch/weight_mean" in s and not math.isnan(s["mismatch/weight_mean"]):
        assert s["mismatch/weight_mean"] == pytest.approx(1, abs=1e-5)
    config, policy, updater = made(model_dir, world, **HOT[name])
    s = update_scalars(update(config, policy, updater, wrong, world, model_dir), info)
    assert s["mismatch/kl_k3"] > 1e-4


@pytest.fixture(scope="module")
def both(model_dir, world, tmp_path_factory):
    """Every method's take on one rank and on two."""
    folder = tmp_path_factory.mktemp("methods")
    out, port = folder / "out.pt", free_port()
    ended = run_ranks(WORKER, 2, folder, 2, port, model_dir, out)
    assert ended.codes == [0, 0], ended.said[-4000:]
    return {name: train(model_dir, name, world) for name in METHODS}, torch.load(out, weights_only=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", METHODS)
def test_b56_no_method_depends_on_how_a_take_is_split_over_ranks(both, name):
    """Also where a rank has no response (B55), and where a correction leaves out everything that one rank has."""
    alone, together = (results[name] for results in both)
    for a, b in zip(alone["updates"], together["updates"], strict=True):
        assert a["outcome"] == b["outcome"] == "stepped"
        for key in ("loss", "optim/grad_norm", "policy/clip_fraction", "mismatch/weight_mean", "mismatch/weight_zero"):
            assert b.get(key, 0.0) == pytest.approx(a.get(key, 0.0), rel=1e-6, abs=1e-9, nan_ok=True), key
        if name in ("correction mask", "correction trm"):
            assert 0 < a["mismatch/weight_zero"] < 1
    for key, tensor in alone["weights"].items():
        torch.testing.assert_close(together["weights"][key], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.timeout(600)
def test_the_methods_of_the_ranks_differ(both):
    """Guards the test above: each method trains another policy than plain GRPO does."""
    plain = both[0]["surrogate clip"]["weights"]
    same_as_plain = [n for n, r in both[0].items() if all(torch.equal(r["weights"][k], plain[k]) for k in plain)]
    assert same_as_plain == ["surrogate clip", "correction none"]
