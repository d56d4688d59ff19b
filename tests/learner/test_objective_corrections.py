"""The corrections inside the loss: gradients against finite differences, what acts on the ratio and what on the loss.

The weights themselves are in tests/algos/test_corrections_*.py.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.algos.registry import CORRECTIONS, SURROGATES
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.mismatch_rows import weight_columns
from asyncrl.learner.objective import LossSums, Tokens, Totals, batch_loss, correction_weights
from asyncrl.learner.records import update_scalars
from asyncrl.learner.score import Scored, Scores
from asyncrl.learner.step import RowValues
from asyncrl.models.describe import describe
from asyncrl.sections.algorithm import AlgorithmSection, CorrectionSection
from tests.learner.groups import make_groups
from tests.learner.test_update import go, own_logprobs, setup

NAN, INF = math.nan, math.inf
F64 = torch.float64
MASK = torch.tensor([[True, True, True], [True, False, True]])
TOTALS = Totals(5, 2, 12)

every = pytest.mark.parametrize("kind", list(CORRECTIONS))


def settings(kind: str, surrogate: str = "clip", ratio: str = "proximal", **knobs) -> AlgorithmSection:
    return AlgorithmSection(surrogate=surrogate, ratio=ratio, correction=CorrectionSection(kind=kind, **knobs))


def tokens(**changed) -> Tokens:
    """Two responses of three tokens: pi, pi_old, mu and the router apart from each other, some tokens clipped."""
    mu = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -3.0, -1.5]], dtype=F64)
    old = mu + torch.tensor([[0.1, -0.6, 1.2], [-0.1, 9.0, 0.05]], dtype=F64)
    logp = old + torch.tensor([[0.05, 0.5, -0.1], [0.1, -9.0, -0.4]], dtype=F64)
    shift = torch.tensor([[0.0, 0.1, 0.5], [0.05, 2.0, 0.15]], dtype=F64)
    values = {"logp": logp.requires_grad_(), "old_logp": old, "rollout_logp": mu, "router_shift": shift}
    return Tokens(**{"advantages": torch.tensor([1.0, -2.0]), "mask": MASK} | values | changed)


def loss_and_gradient(x: Tokens, a: AlgorithmSection, totals: Totals = TOTALS) -> tuple[torch.Tensor, torch.Tensor]:
    loss = batch_loss(x, a, totals, LossSums())
    (gradient,) = torch.autograd.grad(loss, x.logp)
    return loss.detach(), gradient


def one(ratio: float, advantage: float, **changed) -> Tokens:
    """A single token with this pi / pi_old."""
    logp = torch.tensor([[math.log(ratio) - 1.0]], dtype=F64, requires_grad=True)
    old = torch.full((1, 1), -1.0, dtype=F64)
    x = Tokens(logp, old, old.clone(), torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool))
    return replace(x, **changed)


@every
@pytest.mark.parametrize("ratio", ["proximal", "behaviour"])
def test_the_gradient_is_that_of_finite_differences(kind: str, ratio: str) -> None:
    a, x = settings(kind, ratio=ratio), tokens()
    _, gradient = loss_and_gradient(x, a)
    assert gradient[~MASK].tolist() == [0.0]
    assert gradient.abs().sum() > 0
    step = 1e-6
    for b, t in MASK.nonzero().tolist():
        moved = []
        for sign in (1, -1):
            logp = x.logp.detach().clone()
            logp[b, t] += sign * step
            moved.append(batch_loss(replace(x, logp=logp), a, TOTALS, LossSums()).item())
        assert gradient[b, t].item() == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-8)


@every
@pytest.mark.parametrize("surrogate", list(SURROGATES))
def test_a_weight_acts_on_its_token_alone_and_a_factor_on_the_ratio(kind: str, surrogate: str) -> None:
    a, x = settings(kind, surrogate), tokens()
    weight = correction_weights(x.old_logp, x.rollout_logp, x.mask, x.router_shift, a)
    _, found = loss_and_gradient(x, a)
    if CORRECTIONS[kind].rescales:
        scaled = replace(x, old_logp=x.old_logp - torch.where(MASK, weight, 1.0).log())
        _, wanted = loss_and_gradient(scaled, settings("none", surrogate))
    else:
        wanted = loss_and_gradient(x, settings("none", surrogate))[1] * weight
    assert found.tolist() == [pytest.approx(row, rel=1e-12) for row in wanted.tolist()]


@every
@pytest.mark.parametrize("surrogate", list(SURROGATES))
def test_equal_policies_train_as_without_a_correction(kind: str, surrogate: str) -> None:
    logp = tokens().logp
    same = logp.detach().clone()
    x = tokens(logp=logp, old_logp=same, rollout_logp=same.clone(), router_shift=None)
    loss, gradient = loss_and_gradient(x, settings(kind, surrogate))
    plain, wanted = loss_and_gradient(x, settings("none", surrogate))
    assert torch.equal(loss, plain) and torch.equal(gradient, wanted)


@every
def test_nothing_but_the_policy_gets_a_gradient(kind: str) -> None:
    # pi_old is pi itself, with its graph: the weight depends on it and must still be a constant.
    x = tokens()
    leaves = {n: getattr(x, n).clone().requires_grad_() for n in ("rollout_logp", "router_shift")}
    logp = x.old_logp.clone().requires_grad_()
    x = replace(x, logp=logp, old_logp=logp, **leaves)
    batch_loss(x, settings(kind), TOTALS, LossSums()).backward()
    assert all(leaf.grad is None for leaf in leaves.values())
    weight = correction_weights(logp, x.rollout_logp, MASK, x.router_shift, settings(kind))
    # Ratio 1, or the factor; no token is clipped but those of A < 0 with a factor below 0.8, which is the floor.
    wanted = -weight * x.advantages[:, None] / 5
    assert logp.grad is not None
    assert logp.grad.tolist() == [pytest.approx(row, rel=1e-12) for row in wanted.tolist()]


@every
@pytest.mark.parametrize("surrogate", list(SURROGATES))
@pytest.mark.parametrize("delta", [100.0, -100.0])
def test_finite_at_huge_log_ratios(kind: str, surrogate: str, delta: float) -> None:
    x = tokens()
    far = torch.tensor([[delta, 0.0, -delta], [0.0, delta, delta]])
    for changed in ({"rollout_logp": x.rollout_logp + far}, {"logp": (x.logp.detach() + far).requires_grad_()}):
        for advantages in ([1.0, -1.0], [-1.0, 1.0]):
            y = replace(x, advantages=torch.tensor(advantages), **changed)
            loss, gradient = loss_and_gradient(y, settings(kind, surrogate))
            assert torch.isfinite(loss) and torch.isfinite(gradient).all()


@every
@pytest.mark.parametrize("surrogate", list(SURROGATES))
def test_a_weight_that_is_none_makes_the_loss_none(kind: str, surrogate: str) -> None:
    x = tokens()
    x.rollout_logp[0, 1], x.router_shift[0, 1] = INF, NAN
    weight = correction_weights(x.old_logp, x.rollout_logp, x.mask, x.router_shift, settings(kind, surrogate))
    loss, _ = loss_and_gradient(x, settings(kind, surrogate))
    # `none` reads neither.
    assert math.isnan(weight[0, 1]) == math.isnan(loss) == (kind != "none")


@every
def test_missing_and_masked_entries_train_nothing_wrong(kind: str) -> None:
    x = tokens()
    junk = torch.where(MASK, x.rollout_logp, NAN), torch.where(MASK, x.router_shift, NAN)
    old = torch.where(MASK, x.old_logp, INF)
    dirty = replace(x, rollout_logp=junk[0], router_shift=junk[1], old_logp=old)
    for found, wanted in zip(
        loss_and_gradient(dirty, settings(kind)), loss_and_gradient(x, settings(kind)), strict=True
    ):
        assert torch.equal(found, wanted)


def test_without_bounds_the_gradient_is_that_of_importance_sampling() -> None:
    # Nothing is clipped: pi = pi_old, so the gradient of token t is -A w / 5 with w = pi_old / mu.
    mu = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -3.0, -1.5]], dtype=F64)
    delta = torch.tensor([[0.1, -0.6, 1.2], [-0.1, 0.0, 0.05]], dtype=F64)
    logp = (mu + delta).requires_grad_()
    x = tokens(logp=logp, old_logp=logp.detach(), rollout_logp=mu)
    scale = -torch.tensor([[1.0], [-2.0]], dtype=F64) / 5 * MASK
    for kind, knobs in (("tis", {"cap": 1e6}), ("sis", {"envelope": 1e6})):
        _, gradient = loss_and_gradient(x, settings(kind, **knobs))
        assert gradient.tolist() == [pytest.approx(row, rel=1e-5) for row in (scale * delta.exp()).tolist()]
    # Sums along the response, without the token that does not count (its own difference is 0).
    _, gradient = loss_and_gradient(x, settings("ctpo", spread_low=1000.0, spread_high=1000.0))
    product = delta.cumsum(dim=1).exp()
    assert gradient.tolist() == [pytest.approx(row, rel=1e-12) for row in (scale * product).tolist()]


@pytest.mark.parametrize(
    ("kind", "opened", "closed"),
    [
        ("mask", {"low": 0.0, "high": 1e6}, {"high": 3.0}),
        ("trm", {"bound": 1e6}, {"bound": 0.5}),
        ("rspo", {"floor": 1.0}, {"floor": 0.5}),
    ],
)
def test_with_open_bounds_nothing_is_corrected(kind: str, opened: dict, closed: dict) -> None:
    wanted = loss_and_gradient(tokens(), settings("none"))
    found = loss_and_gradient(tokens(), settings(kind, **opened))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert not torch.equal(loss_and_gradient(tokens(), settings(kind, **closed))[1], wanted[1])


def test_a_token_that_is_left_out_stays_in_the_normaliser() -> None:
    # Ratios pi_old / mu of 1 and 9: the second is masked, the first still has half of the loss.
    logp = torch.tensor([[-1.0, -2.0]], dtype=F64, requires_grad=True)
    mu = torch.tensor([[-1.0, -2.0 - math.log(9)]], dtype=F64)
    x = Tokens(logp, logp.detach(), mu, torch.ones(1), torch.ones(1, 2, dtype=torch.bool))
    loss, gradient = loss_and_gradient(x, settings("mask"), Totals(2, 1, 2))
    assert loss == -0.5 and gradient.tolist() == [[-0.5, 0.0]]


def test_rspo_scales_the_ratio_before_the_clip() -> None:
    shift = torch.full((1, 1), -math.log(0.9), dtype=F64)
    clip, rspo, totals = settings("none"), settings("rspo", floor=0.5), Totals(1, 1, 1)
    # A < 0, ratio 0.85: clip alone keeps it, its loss is 0.85. Times 0.9 it is 0.765, below 0.8: clipped, loss 0.8.
    x = one(0.85, -1.0, router_shift=shift)
    loss, gradient = loss_and_gradient(x, clip, totals)
    assert loss.item() == pytest.approx(0.85) and gradient.item() == pytest.approx(0.85)
    sums = LossSums()
    loss = batch_loss(x, rspo, totals, sums)
    loss.backward()
    assert loss.item() == pytest.approx(0.8) and x.logp.grad is not None and x.logp.grad.item() == 0
    assert sums.clipped == 1
    # A > 0, ratio 1.35: clip alone stops it at 1.27. Times 0.9 it is 1.215 and trains.
    x = one(1.35, 1.0, router_shift=shift)
    loss, gradient = loss_and_gradient(x, clip, totals)
    assert loss.item() == pytest.approx(-1.27) and gradient.item() == 0
    loss, gradient = loss_and_gradient(x, rspo, totals)
    assert loss.item() == pytest.approx(-1.215) and gradient.item() == pytest.approx(-1.215)


def test_rspo_scales_the_ratio_to_the_rollout_policy_too() -> None:
    # pi / mu = 1.1, times 0.9; where mu is missing the ratio is 1, times 0.9.
    shift = torch.full((1, 1), -math.log(0.9), dtype=F64)
    x = one(1.1, 1.0, router_shift=shift)
    a = settings("rspo", ratio="behaviour", floor=0.5)
    assert loss_and_gradient(x, a, Totals(1, 1, 1))[1].item() == pytest.approx(-0.99)
    x = replace(x, rollout_logp=torch.full((1, 1), NAN, dtype=F64))
    assert loss_and_gradient(x, a, Totals(1, 1, 1))[1].item() == pytest.approx(-0.9)


def scored(index: tuple[int, ...], mask: list, mu: list, shift: list | None = None) -> Scored:
    """A forward of which only the mask, mu and the router count."""
    masks = torch.tensor(mask, dtype=torch.bool)
    ids = torch.zeros(masks.shape, dtype=torch.int64)
    batch = MicroBatch(index, ids, ids, masks, masks, torch.tensor(mu), torch.ones(len(masks)), routes=None, grad=False)
    zeros = torch.zeros(masks.shape)
    return Scored(batch, zeros, zeros, router_shift=None if shift is None else torch.tensor(shift))


def test_weight_columns_by_hand() -> None:
    # Rows 2, 0, 1 in two forwards, and one that is a dummy. pi_old is 0 everywhere, so the ratio is 1 / mu.
    half, eight = math.log(2), -math.log(8)
    parts = [
        scored((2,), [[1, 1, 0, 1]], [[0.0, half, 0.0, eight]], [[0.0, 0.1, 9.0, 9.0]]),
        scored((), [[0, 0]], [[0.0, 0.0]], [[NAN, NAN]]),
        scored((0, 1), [[1, 1], [0, 0]], [[eight, NAN], [eight, eight]], [[0.2, 0.0], [9.0, 9.0]]),
    ]
    scores = Scores(parts, np.zeros(3), np.zeros((3, 1)), (0.0, 0.0), False)
    values = RowValues([torch.zeros(2), torch.zeros(1), torch.zeros(4)])

    def columns(kind: str, **knobs) -> tuple[list[float], list[float]]:
        found = weight_columns([None] * 3, scores, values, settings(kind, **knobs))
        return found["weight"].tolist(), found["unweighted"].tolist()

    # Row 0: min(8, 2) and 1 (missing). Row 2: 1, 1/2, min(8, 2).
    assert columns("tis", cap=2.0) == ([3.0, 0.0, 3.5], [0.0, 0.0, 0.0])
    # The tokens of ratio 8 are left out; those that do not count are not numbered.
    assert columns("mask") == ([1.0, 0.0, 2.0], [1.0, 0.0, 1.0])
    # A token of ratio 8 takes its response along.
    assert columns("trm") == ([0.0, 0.0, 0.0], [2.0, 0.0, 3.0])
    weight, unweighted = columns("rspo", floor=0.8)
    assert weight == pytest.approx([math.exp(-0.2) + 1, 0.0, 1 + math.exp(-0.1) + 0.8], rel=1e-6)
    assert unweighted == [0.0, 0.0, 0.0]
    assert all(math.isnan(x) for column in columns("none") for x in column)


def test_the_share_of_tokens_without_weight_in_the_metrics(model_dir, world) -> None:
    algorithm = {"rdc": {"mode": "off"}, "correction": {"kind": "trm"}}
    config, policy, updater = setup(model_dir, world, algorithm=algorithm)
    info = describe(model_dir)
    groups = own_logprobs(policy, make_groups(info, 3, 4, 0), config, info, world)
    # One token of one response is exp(3) times as likely to the learner: k3 = 20.1 - 1 - 3, far above the bound.
    first = groups[0].trajectories[0]
    logprobs = first.logprobs.copy()
    logprobs[0] -= 3
    odd = replace(groups[0], trajectories=(replace(first, logprobs=logprobs), *groups[0].trajectories[1:]))
    out = go(config, policy, updater, [odd, *groups[1:]], world, model_dir)
    total = sum(t.num_tokens for g in groups for t in g.trajectories)
    found = update_scalars(out, info)
    assert found["mismatch/weight_zero"] == pytest.approx(first.num_tokens / total)
    assert found["mismatch/weight_mean"] == pytest.approx(1 - first.num_tokens / total)
    assert out.step.outcome == "stepped"
