"""Numbers of pooled responses, worked by hand."""

import math

import numpy as np
import pytest

from asyncrl.lens.measure import (
    Responses,
    bins,
    by,
    by_generator,
    by_layer,
    correlations,
    partial_rank,
    pearson,
    ranks,
    spearman,
    walk,
)

NAN = math.nan


def pool(drift, **columns):
    n = len(drift)
    given = {k: np.asarray(v, float) for k, v in columns.items() if k not in ("generators", "against", "layers")}
    zeros = {k: np.zeros(n) for k in ("length", "reward", "lag", "ratio")}
    return Responses(
        [f"t{i}" for i in range(n)], columns.get("generators", ["g0"] * n), np.zeros(n, np.int64),
        drift=np.asarray(drift, float), layers=np.asarray(columns.get("layers", np.zeros((n, 2)))),
        against=columns.get("against", {}), **(zeros | given),
    )  # fmt: skip


def test_a_table_has_one_line_per_value_and_leaves_out_what_has_no_drift():
    p = pool(
        [0.0, 0.2, 0.4, NAN, 0.1], lag=[0, 4, 4, 4, 0], length=[1, 2, 4, 100, 3], reward=[1, 0, 1, 1, 0],
        ratio=[0.1, NAN, 0.3, 9, 0.2], against={"9": (np.asarray([0.1, 0.3, 0.5, NAN, 0.1]), np.zeros((5, 2)))},
    )  # fmt: skip
    zero, four = by(p, p.lag)
    assert (zero["bin"], zero["responses"], zero["drift"], zero["length"], zero["reward"]) == ("0", 2, 0.05, 2.0, 0.5)
    assert (four["bin"], four["value"], four["responses"], four["length"]) == ("4", 4.0, 2, 3.0)
    assert four["drift"] == pytest.approx(0.3)
    assert four["p50"] == pytest.approx(0.3) and four["p90"] == pytest.approx(0.38)
    assert four["abs_log_ratio"] == 0.3  # of the one that has it
    assert four["against"] == {"9": pytest.approx(0.4)}


def test_many_values_are_cut_into_quantile_bins_that_part_no_equals():
    values = np.asarray([1.0] * 6 + list(range(2, 20)))
    found = list(bins(values, np.ones(24, bool)))
    assert sum(int(rows.sum()) for _, _, rows in found) == 24
    label, at, rows = found[0]
    assert (label, at, int(rows.sum())) == ("1", 1.0, 6)
    assert found[-1][0] == "17 to 19" and found[-1][1] == 18.0


def test_layers_and_generators():
    p = pool([0.15, 0.3, NAN], layers=[[0.1, 0.2], [0.2, 0.4], [NAN, NAN]], generators=["a", "b", "b"])
    first, second = by_layer(p, (1, 3))
    assert (first["layer"], second["layer"]) == (1, 3)
    assert first["drift"] == pytest.approx(0.15) and second["max"] == 0.4
    a, b = by_generator(p)
    assert (a["generator"], a["drift"], b["responses"]) == ("a", 0.15, 1)


def test_ranks_share_among_equals():
    assert ranks(np.asarray([3.0, 1.0, 3.0])).tolist() == [2.5, 1.0, 2.5]


def test_correlations_by_hand():
    x, y, z = np.asarray([1.0, 2, 3, 4]), np.asarray([2.0, 1, 4, 3]), np.asarray([1.0, 1, 2, 2])
    # Ranks from their mean: (-1.5, -.5, .5, 1.5) and (-.5, -1.5, 1.5, .5): 3 / 5.
    assert spearman(x, y) == pytest.approx(0.6)
    assert pearson(x, 2 * x + 1) == pytest.approx(1)
    # With (-1, -1, 1, 1) both give 4 / sqrt(20), squared 0.8: (0.6 - 0.8) / (1 - 0.8).
    assert partial_rank(x, y, z) == pytest.approx(-1)
    assert math.isnan(spearman(x, np.ones(4)))
    assert partial_rank(x, y, np.ones(4)) == pytest.approx(0.6)


def test_correlations_leave_out_what_one_side_lacks():
    p = pool([0.1, 0.2, 0.3, NAN], lag=[1, 2, 3, 0], ratio=[0.3, NAN, 0.1, 0.0], length=[1, 2, 3, 4])
    lines = {(c["of"], c["with"]): c for c in correlations(p)}
    assert lines["drift", "lag"]["responses"] == 3 and lines["drift", "lag"]["spearman"] == pytest.approx(1)
    assert lines["drift", "abs_log_ratio"]["responses"] == 2
    assert lines["drift", "abs_log_ratio"]["pearson"] == pytest.approx(-1)


def test_walk_changes_every_float_and_nothing_else():
    nest = {"a": [1, NAN, {"b": (2.5, "x", None, True)}]}
    assert walk(nest, lambda x: None if math.isnan(x) else x) == {"a": [1, None, {"b": [2.5, "x", None, True]}]}
