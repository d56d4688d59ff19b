"""The batch loss of surrogate x correction, against objectives in plain floats."""

import math
from collections.abc import Callable

import pytest
import torch

from asyncrl.algos.registry import SURROGATES
from asyncrl.learner.objective import LossSums, Tokens, Totals, batch_loss
from asyncrl.sections.algorithm import AlgorithmSection

NAN = math.nan
STEP = 1e-6

# Four responses of 3, 2, 3 and 1 tokens. Log-ratios pi / pi_old on both sides of the bounds below, both signs of A.
LENGTHS = [3, 2, 3, 1]
ADVANTAGES = [1.25, -0.75, -1.5, 0.5]
OLD = [[-1.0, -0.5, -2.0], [-0.7, -1.2], [-1.5, -0.25, -3.0], [-0.9]]
DELTAS = [[0.7, -0.1, 0.15], [-0.9, 0.05], [0.6, 0.4, -0.8], [0.12]]
# Log-ratios pi_old / mu: weights on both sides of the cap 2.
GAPS = [[0.3, 1.1, -0.4], [0.1, -0.2], [-1.5, 0.9, 0.05], [0.2]]

BOUNDS = {"clip": (0.2, 0.27), "gspo": (0.1, 0.2), "cispo": (0.5, 0.9), "gmpo": (0.3, 0.5)}
CORRECTIONS = [{"kind": "none"}, {"kind": "tis"}, {"kind": "tis", "level": "sequence"}]


def padded(rows: list[list[float]], junk: float = NAN) -> torch.Tensor:
    return torch.tensor([r + [junk] * (3 - len(r)) for r in rows], dtype=torch.float64)


MASK = torch.tensor([[t < n for t in range(3)] for n in LENGTHS])
LOGP = padded(OLD) + padded(DELTAS)
MU = padded(OLD) - padded(GAPS)
TOTALS = Totals(float(sum(LENGTHS)), float(len(LENGTHS)), 1.0)


def settings(name: str, correction: dict[str, str], aggregation: str = "sequence_mean") -> AlgorithmSection:
    low, high = BOUNDS[name]
    return AlgorithmSection.model_validate(
        {
            "surrogate": name,
            "eps_low": low,
            "eps_high": high,
            "aggregation": aggregation,
            "correction": correction,
        }
    )


def tokens(logp: torch.Tensor, rows: slice = slice(None), mu: torch.Tensor = MU) -> Tokens:
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    return Tokens(logp[rows], padded(OLD)[rows], mu[rows], advantages[rows], MASK[rows])


def between(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


Row = list[float]
TokenObjective = Callable[[Row, Row, float, float, float], Row]
"""(log-ratios, log-ratios at the point of differentiation, A, eps_low, eps_high) -> objective of each token.

What a method holds constant it takes from the second; the ratio of a response moves with the token's own log-ratio.
"""


def clip(d: Row, held: Row, a: float, low: float, high: float) -> Row:
    return [min(math.exp(x) * a, between(math.exp(x), 1 - low, 1 + high) * a) for x in d]


def gspo(d: Row, held: Row, a: float, low: float, high: float) -> Row:
    s = [math.exp(mean(held) + x - h) for x, h in zip(d, held, strict=True)]
    return [min(x * a, between(x, 1 - low, 1 + high) * a) for x in s]


def gmpo(d: Row, held: Row, a: float, low: float, high: float) -> Row:
    def bounded(x: float) -> float:
        return min(x, high) if a > 0 else max(x, -low)

    centre = mean([bounded(h) for h in held])
    return [a * math.exp(centre + bounded(x) - bounded(h)) for x, h in zip(d, held, strict=True)]


FORMULAS: dict[str, TokenObjective] = {"clip": clip, "gspo": gspo, "gmpo": gmpo}


def weights(b: int, correction: dict[str, str]) -> Row:
    if correction["kind"] == "none":
        return [1.0] * LENGTHS[b]
    if correction.get("level") == "sequence":
        return [min(math.exp(sum(GAPS[b])), 2.0)] * LENGTHS[b]
    return [min(math.exp(g), 2.0) for g in GAPS[b]]


def plain_loss(name: str, correction: dict[str, str], moved: tuple[int, int], by: float) -> float:
    """sequence_mean of -weight x objective in plain floats, with one log-prob moved."""
    loss = 0.0
    for b, held in enumerate(DELTAS):
        d = [x + by if (b, t) == moved else x for t, x in enumerate(held)]
        if name == "cispo":
            low, high = BOUNDS[name]
            gains = [between(math.exp(h), 1 - low, 1 + high) * ADVANTAGES[b] for h in held]
            gains = [g * (OLD[b][t] + d[t]) for t, g in enumerate(gains)]
        else:
            gains = FORMULAS[name](d, held, ADVANTAGES[b], *BOUNDS[name])
        loss -= mean([w * g for w, g in zip(weights(b, correction), gains, strict=True)]) / len(DELTAS)
    return loss


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: "-".join(c.values()))
@pytest.mark.parametrize("name", list(BOUNDS))
def test_value_and_gradient_equal_the_formula_in_plain_floats(name: str, correction: dict[str, str]) -> None:
    logp = LOGP.clone().requires_grad_()
    sums = LossSums()
    loss = batch_loss(tokens(logp), settings(name, correction), TOTALS, sums)
    wanted = plain_loss(name, correction, (-1, -1), 0.0)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    assert sums.loss == pytest.approx(wanted, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, logp)
    for b, t in MASK.nonzero().tolist():
        up, down = (plain_loss(name, correction, (b, t), by) for by in (STEP, -STEP))
        assert gradient[b, t].item() == pytest.approx((up - down) / (2 * STEP), abs=1e-8)
    assert not gradient[~MASK].any()


@pytest.mark.parametrize("correction", [CORRECTIONS[0], CORRECTIONS[2]], ids=["none", "tis-sequence"])
@pytest.mark.parametrize("name", ["clip", "gspo", "gmpo"])
def test_gradient_is_the_derivative_of_the_loss(name: str, correction: dict[str, str]) -> None:
    # With one weight per response. A weight per token scales the gradient of its token, which for one ratio per
    # response is not the derivative of the weighed value; `cispo` holds its weight.
    def value(x: torch.Tensor) -> torch.Tensor:
        return batch_loss(tokens(x), settings(name, correction), TOTALS, LossSums())

    logp = LOGP.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(logp), logp)
    for b, t in MASK.nonzero().tolist():
        step = torch.zeros_like(LOGP)
        step[b, t] = STEP
        numeric = (value(LOGP + step) - value(LOGP - step)) / (2 * STEP)
        assert gradient[b, t].item() == pytest.approx(numeric.item(), abs=1e-8)
    assert 0 < gradient.count_nonzero() <= MASK.sum()


def test_gspo_is_the_objective_of_the_paper() -> None:
    # 1/n sum_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|): mean log-ratios 0.25, -0.425, 1/15
    # and 0.12, bounds 0.9 and 1.2. The first is cut from 1.284 to 1.2, the second from 0.654 to 0.9 (A < 0).
    def objective(deltas: list[Row]) -> float:
        total = 0.0
        for d, a in zip(deltas, ADVANTAGES, strict=True):
            s = math.exp(sum(d) / len(d))
            total += min(s * a, between(s, 0.9, 1.2) * a)
        return total / len(deltas)

    by_hand = (1.2 * 1.25 - 0.9 * 0.75 - math.exp(0.2 / 3) * 1.5 + math.exp(0.12) * 0.5) / 4
    assert objective(DELTAS) == pytest.approx(by_hand, rel=1e-12)
    logp = LOGP.clone().requires_grad_()
    sums = LossSums()
    loss = batch_loss(tokens(logp), settings("gspo", {"kind": "none"}), TOTALS, sums)
    assert loss.item() == pytest.approx(-by_hand, rel=1e-12)
    assert sums.clipped == 5
    (gradient,) = torch.autograd.grad(loss, logp)
    for b, t in MASK.nonzero().tolist():
        up, down = ([[x + s * ((i, j) == (b, t)) for j, x in enumerate(d)] for i, d in enumerate(DELTAS)]
                    for s in (STEP, -STEP))  # fmt: skip
        wanted = -(objective(up) - objective(down)) / (2 * STEP)
        assert gradient[b, t].item() == pytest.approx(wanted, abs=1e-8)
    assert not gradient[0].any()
    assert not gradient[1].any()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", list(SURROGATES))
def test_parts_of_a_batch_add_up(name: str, aggregation: str) -> None:
    # Any split into micro-batches has the loss, the gradient and the counts of the whole.
    a = AlgorithmSection.model_validate({"surrogate": name, "aggregation": aggregation})
    totals = Totals(9.0, 4.0, 12.0)

    def run(parts: list[slice]) -> tuple[LossSums, torch.Tensor]:
        logp, sums = LOGP.clone().requires_grad_(), LossSums()
        for part in parts:
            batch_loss(tokens(logp, part), a, totals, sums).backward()
        assert logp.grad is not None
        return sums, logp.grad

    whole, gradient = run([slice(0, 4)])
    sums, added = run([slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 4)])
    assert sums.vector() == pytest.approx(whole.vector())
    torch.testing.assert_close(added, gradient)


@pytest.mark.parametrize("name", list(SURROGATES))
def test_a_token_of_weight_zero_does_not_train(name: str) -> None:
    # Ratios pi_old / mu: e^-1.5 and e^1.8 are outside [0.5, 5]. On policy otherwise: -A / T / n each.
    gaps = padded([[0.0, 1.8, 0.1], [-1.5, 0.0], [0.0] * 3, [0.0]])
    a = AlgorithmSection.model_validate(
        {"surrogate": name, "aggregation": "sequence_mean", "correction": {"kind": "mask"}}
    )
    logp = padded(OLD).requires_grad_()
    batch_loss(tokens(logp, mu=padded(OLD) - gaps), a, TOTALS, LossSums()).backward()
    assert logp.grad is not None
    wanted = torch.tensor([[-a / n / 4] * 3 for a, n in zip(ADVANTAGES, LENGTHS, strict=True)], dtype=torch.float64)
    wanted = torch.where(MASK, wanted, 0.0)
    wanted[0, 1] = wanted[1, 0] = 0
    torch.testing.assert_close(logp.grad, wanted)


@pytest.mark.parametrize("name", list(SURROGATES))
def test_behaviour_ratio_takes_mu_and_reads_a_missing_one_as_the_policy(name: str) -> None:
    a = AlgorithmSection.model_validate(
        {"surrogate": name, "ratio": "behaviour", "aggregation": "sequence_mean", "correction": {"kind": "none"}}
    )
    missing = MU.clone()
    missing[0, 1] = missing[3, 0] = NAN
    same = torch.where(missing.isnan() & MASK, LOGP, MU)
    found = []
    for mu in (missing, same):
        logp = LOGP.clone().requires_grad_()
        loss = batch_loss(tokens(logp, mu=mu), a, TOTALS, LossSums())
        found.append((loss.item(), torch.autograd.grad(loss, logp)[0]))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    # The only token of its response, without mu: on policy.
    assert found[0][1][3, 0].item() == pytest.approx(-0.5 / 4)
    # pi_old is not read, where mu is there.
    other = Tokens(LOGP, padded(OLD) + 1, MU, torch.tensor(ADVANTAGES).double(), MASK)
    plain = batch_loss(tokens(LOGP), a, TOTALS, LossSums())
    assert batch_loss(other, a, TOTALS, LossSums()).item() == plain.item()
