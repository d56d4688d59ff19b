"""What the filter would have dropped: eight responses whose numbers are known."""

import math

import numpy as np
import pytest

from asyncrl.lens.drops import chosen, what_if
from tests.lens.test_measure import pool

EIGHT = {
    "length": [1, 2, 3, 4, 5, 6, 7, 8],
    "reward": [0, 1, 1, 1, 1, 1, 1, 1],
    "ratio": [0.1, 0.9, 0.2, 0.1, 0.1, 0.1, 0.1, 0.8],
}
DRIFT = [0.8, 0.7, 0.1, 0.2, 0.3, 0.4, 0.05, 0.0]


def test_one_bucket_drops_the_short_and_two_do_not():
    one, two = what_if(pool(DRIFT, **EIGHT), [0.25], [1, 2])
    # The two highest are the two shortest; by log ratio it would be the second and the last.
    assert (one["count"], one["dropped"]["length"], one["kept"]["length"]) == (2, 1.5, 5.5)
    assert (one["dropped"]["reward"], one["kept"]["reward"]) == (0.5, 1.0)
    assert one["dropped"]["abs_log_ratio"] == pytest.approx(0.5)
    assert (one["overlap"], one["by_chance"]) == (0.5, 0.25)
    assert one["by_length"] == [1, 0, 0, 0]
    # One of each half: the first and the sixth; by log ratio the second and the last.
    assert (two["count"], two["dropped"]["length"], two["overlap"]) == (2, 3.5, 0)
    assert two["by_length"] == [0.5, 0, 0.5, 0]


def test_every_update_has_its_own_quota():
    p = pool(DRIFT, **EIGHT)
    p.update[:] = [0, 0, 0, 0, 2, 2, 2, 2]
    assert np.flatnonzero(chosen(p, p.drift, 0.25, 1)).tolist() == [0, 5]
    (line,) = what_if(p, [0.2], [1])  # floor(0.2 x 4) of each
    assert line["count"] == 0 and math.isnan(line["overlap"])


def test_what_has_no_drift_is_never_ranked():
    undefined = [math.nan, *DRIFT[1:]]
    (line,) = what_if(pool(undefined, **EIGHT), [0.3], [1])
    assert (line["responses"], line["count"], line["dropped"]["length"]) == (7, 2, 4)  # lengths 2 and 6
    (line,) = what_if(pool(DRIFT, **(EIGHT | {"ratio": [math.nan] * 8})), [0.25], [1])
    assert line["overlap"] == 0 and math.isnan(line["dropped"]["abs_log_ratio"])


def test_equal_lengths_are_spread_over_the_quarters():
    (line,) = what_if(pool(DRIFT, **(EIGHT | {"length": [5] * 8})), [0.25], [1])
    assert line["by_length"] == [0.25] * 4
