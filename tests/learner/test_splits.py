"""Splits of a table that stay few: ranges of lag, thirds of the depth."""

import math

import numpy as np
import pytest

from asyncrl.learner.splits import by_lag_range, drift_by_depth, drift_by_lag, lag_range, mismatch_by_lag
from asyncrl.learner.table import Table


def table(**columns) -> Table:
    values = {k: np.asarray(v, np.float64) for k, v in columns.items()}
    n = len(values["lag"])
    return Table([(f"t{i}", "g", "g0") for i in range(n)], values, 0, n)


def test_ranges_double_in_width():
    assert [lag_range(n) for n in (0, 1, 2, 3, 4, 7, 8, 15, 16, 100)] == [
        "0", "1", "2-3", "2-3", "4-7", "4-7", "8-15", "8-15", "16-31", "64-127"
    ]  # fmt: skip


def test_rows_without_a_trained_token_are_in_no_range_and_ranges_come_in_order():
    t = table(lag=[9, 0, 3, 2, 5], tokens=[4, 4, 4, 4, 0])
    assert [(name, rows.tolist()) for name, rows in by_lag_range(t)] == [
        ("0", [False, True, False, False, False]),
        ("2-3", [False, False, True, True, False]),
        ("8-15", [True, False, False, False, False]),
    ]


def test_drift_of_a_range_is_the_mean_of_its_rows_that_have_one():
    t = table(lag=[2, 3, 3, 0], tokens=[1, 1, 1, 1])
    assert drift_by_lag(t, np.array([0.1, 0.3, np.nan, np.nan])) == pytest.approx({"drift/lags_2-3": 0.2})


def test_mismatch_of_a_range_is_over_its_kept_tokens():
    sums = {"missing": [0, 0, 0], "k3": [0, 0, 0], "abs": [0, 0, 0], "w": [4, 4, 6], "w2": [4, 4, 18]}
    shares = {"f_1.2": [2, 4, 0], "f_2.0": [1, 4, 0], "f_5.0": [0, 4, 0], "f_10.0": [0, 4, 0]}
    t = table(lag=[2, 3, 1], tokens=[4, 4, 2], count=[4, 4, 2], k1=[0.4, 8.0, 0.6], **sums, **shares)
    out = mismatch_by_lag(t, np.array([True, False, True]))
    assert out["mismatch/lags_2-3/kl_k1"] == pytest.approx(0.1)  # the other row of the range was dropped
    assert out["mismatch/lags_2-3/f_1.2"] == 0.5 and out["mismatch/lags_2-3/f_2"] == 0.25
    assert out["mismatch/lags_1/kl_k1"] == pytest.approx(0.3)
    assert out["mismatch/lags_1/ess"] == pytest.approx(6**2 / (2 * 18))


def test_layers_are_drawn_as_thirds_of_the_depth():
    columns = {f"layer_{n}": [float(n), np.nan] for n in range(48)}
    out = drift_by_depth(table(lag=[0, 0], tokens=[1, 1], **columns), range(48))
    assert out == {"drift/depth_first": 7.5, "drift/depth_middle": 23.5, "drift/depth_last": 39.5}


def test_a_single_layer_is_the_first_third():
    out = drift_by_depth(table(lag=[0], tokens=[1], layer_5=[0.25]), [5])
    assert out["drift/depth_first"] == 0.25 and math.isnan(out["drift/depth_middle"])
