"""Residuals at equal lag and length, and the robust z: numbers by hand, and synthetic fleets."""

import math

import numpy as np
import pytest

from asyncrl.algos import outlier
from asyncrl.algos.outlier import CELLS, FEWEST, Rows, Summary, fleet_z, residuals, robust_z, summarise


def rows(member, value, lag=None, length=None) -> Rows:
    n = len(member)
    lag = np.zeros(n) if lag is None else np.asarray(lag, float)
    length = np.full(n, 10.0) if length is None else np.asarray(length, float)
    return Rows(np.asarray(member), np.asarray(value, float), lag, length)


def everything(r: Rows):
    return np.ones(len(r.value), bool)


def test_a_residual_is_the_distance_to_the_mean_of_the_others():
    member = [0] * FEWEST + [1] * FEWEST + [2] * 2
    value = [0.1] * FEWEST + [0.3] * FEWEST + [0.7, 0.9]
    out = residuals(rows(member, value), everything(rows(member, value)))
    others = {0: (16 * 0.3 + 1.6) / 18, 1: (16 * 0.1 + 1.6) / 18, 2: 0.2}
    share = {0: 18 / 34, 1: 18 / 34, 2: 32 / 34}
    assert out == pytest.approx([(v - others[m]) * share[m] for m, v in zip(member, value, strict=True)])


def test_what_grows_with_the_lag_is_no_difference():
    lag = np.tile(np.arange(8), 2 * FEWEST)
    member = np.repeat([0, 1], len(lag) // 2)
    # The second one is always older than the first.
    lag = lag + 2.0 * member
    value = 0.01 * lag
    r = rows(member, value, lag)
    out = residuals(r, everything(r))
    shared = (lag >= 2) & (lag <= 7)
    assert np.abs(out[shared]).max() < 1e-12
    # Nobody else is as young as 0 and 1, or as old as 8 and 9: those say nothing about their generator.
    assert np.isnan(out[~shared]).all()


def test_a_lag_with_few_responses_borrows_from_its_neighbours():
    lag = [0.0] * 20 + [1.0] * 3 + [2.0] * 20 + [1.0] * 4
    member = [0] * 43 + [1] * 4
    value = [0.0] * 20 + [0.1] * 3 + [0.2] * 20 + [0.5] * 4
    r = rows(member, value, lag)
    out = residuals(r, np.asarray(member) == 1)
    assert np.isnan(out[:43]).all()
    assert out[43:] == pytest.approx([(0.5 - 0.1) * 43 / 47] * 4, abs=0.01)


def test_mixed_lags_cost_no_more_than_whole_ones():
    # Responses of several versions each have a mean lag of their own, as a rule.
    rng = np.random.default_rng(1)
    lag = rng.uniform(0, 8, 16384)
    at, level = outlier._knots(outlier.cells_of(lag), lag, 0.01 * lag)
    assert FEWEST < len(at) <= 8 * CELLS + 1
    assert level == pytest.approx(0.01 * at)
    r = rows(np.arange(16384) % 4, 0.01 * lag, lag)
    assert np.abs(residuals(r, everything(r))).max() < 0.01 / CELLS


def test_of_two_members_the_residuals_differ_by_as_much_as_the_values():
    r = rows([0] * 20 + [1] * 20, [0.2] * 20 + [0.6] * 20)
    out = residuals(r, everything(r))
    assert out[-1] - out[0] == pytest.approx(0.4)


def test_what_depends_on_the_length_is_no_difference():
    rng = np.random.default_rng(0)
    short, long = rng.integers(1, 9, 200), rng.integers(24, 32, 200)
    # One generator has three long responses for a short one, the other the reverse.
    length = np.concatenate([short[:50], long[:150], short[50:], long[150:]])
    value = np.where(length < 16, 0.05, 0.01)
    r = rows(np.repeat([0, 1], 200), value, np.zeros(400), length)
    assert np.abs(residuals(r, everything(r))).max() < 1e-3


def test_without_enough_others_there_is_no_residual():
    r = rows([0] * 50 + [1] * (FEWEST - 1), np.zeros(50 + FEWEST - 1))
    assert np.isnan(residuals(r, np.arange(len(r.value)) < 50)).all()
    assert len(residuals(rows([], []), np.ones(0, bool))) == 0


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="different lengths"):
        residuals(Rows(np.zeros(2, int), np.zeros(3), np.zeros(2), np.zeros(2)), np.ones(2, bool))


def test_responses_to_one_prompt_count_as_one():
    alike = summarise(np.repeat([1.0, -1.0], 8), np.zeros(16), np.repeat([0, 1], 8))
    apart = summarise(np.repeat([1.0, -1.0], 8), np.zeros(16), np.arange(16))
    assert alike.variance == pytest.approx(2 * 8**2 / 16 * 2)
    assert apart.variance == pytest.approx(16 / 16 * 16 / 15)


def member(mean: float, num: int = 100, variance: float = 0.0, level: float = 0.0) -> Summary:
    return Summary(mean, num, variance, level)


def test_the_scale_is_the_mad_of_the_others():
    others = [member(m) for m in (0.0, 0.1, 0.2, 0.3, 5.0)]
    assert robust_z(member(1.2), others) == pytest.approx((1.2 - 0.2) / (1.4826 * 0.1))


def test_the_scale_is_never_below_the_standard_error():
    others = [member(0.0, 100, 4.0) for _ in range(4)]
    of_others = 4.0 * math.pi / 2 / 400
    # Its own variance counts, but not below theirs and not above four times that.
    for variance, counts in ((1.0, 4.0), (9.0, 9.0), (99.0, 16.0)):
        z = robust_z(member(1.0, 25, variance), others)
        assert z == pytest.approx(1 / math.sqrt(counts / 25 + of_others))


def test_a_quiet_fleet_does_not_blow_up_a_small_difference():
    # 10 % above a level of 0.02, with no noise at all.
    others = [member(0.0, 10**6, 1e-12, 0.02) for _ in range(7)]
    assert robust_z(member(0.002, 10**6, 1e-12, 0.022), others) == pytest.approx(0.002 / 0.001)
    assert robust_z(member(0.0, 100), [member(0.0), member(0.0)]) == 0.0


def test_of_two_the_higher_one_is_above_and_the_lower_one_below():
    z = fleet_z({"a": member(0.0, 100, 0.01), "b": member(0.5, 100, 0.01)})
    assert z["b"] > 10
    assert z["a"] == -z["b"]


def test_without_others_there_is_no_z():
    assert math.isnan(robust_z(member(1.0), []))
    assert math.isnan(robust_z(summarise(np.empty(0), np.empty(0), np.empty(0, int)), [member(0.0)]))
