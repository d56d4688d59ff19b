"""Which member of a fleet differs: residuals at equal lag and length against the rest, and a robust z of their means.

The score of a member is (m - median of the others) / scale, with scale 1.4826 MAD of the others (Iglewicz and Hoaglin,
How to Detect and Handle Outliers, 1993), but never below the standard error of what is compared, nor below a small
share of the signal's level: a MAD of few members is often near 0, and a difference of 2 % is real in a fleet of
different hardware and no fault. The standard error counts groups, not responses: responses to one prompt are alike.
Leaving a member out of its own reference keeps it from hiding itself; the median keeps one faulty member, which is part
of everybody else's reference, from moving the others. Knows numbers only. Numpy, float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEWEST = 16
"""Responses that a knot of the reference needs; lags with fewer are joined with their neighbours."""
LENGTH_BINS = 4
CELLS = 4
"""Lags are told apart to a quarter: means over mixed lags are nearly all different, and each would cost time."""
SLACK = 0.5
"""What lies further than this outside the lags of the rest has no reference."""
LEVEL_SHARE, LEVEL_LEAST = 0.025, 0.0005
"""The smallest scale: 0.025 of the level and 0.0005. With z 8 a member must be 20 % above the others."""
MAD_TO_SD = 1.4826
MOST_VARIANCE = 4.0
"""A member's own variance counts up to so many times that of the others."""


class Rows(NamedTuple):
    """Responses. member int [n]; value [n], finite; lag [n] and length [n] of each."""

    member: Ints
    value: Floats
    lag: Floats
    length: Floats


class Summary(NamedTuple):
    """One member's residuals: their mean, number, and variance per response; level: mean of the signal itself."""

    mean: float
    num: int
    variance: float
    level: float


def residuals(rows: Rows, wanted: NDArray[np.bool_]) -> Floats:
    """Value minus what the other members' responses of that lag and length have; [n], NaN where not wanted.

    Times the others' share of all responses: so residuals of two members differ by as much as their values do (of two
    alone, each is the other's reference, and the difference would count twice).
    The reference is a(lag) + e(length): a is linear between knots of at least FEWEST responses, e a mean per quartile
    of the length. NaN also where the others have too few responses or none near that lag.
    """
    n = len(rows.value)
    if any(len(part) != n for part in rows) or wanted.shape != (n,):
        raise ValueError(f"rows of different lengths: {[len(part) for part in (*rows, wanted)]}")
    out = np.full(n, np.nan)
    if not n:
        return out
    edges = np.quantile(rows.length, np.arange(1, LENGTH_BINS) / LENGTH_BINS)
    bins = np.searchsorted(edges, rows.length, side="left")
    cells = cells_of(rows.lag)
    for member in np.unique(rows.member[wanted]):
        mine, rest = rows.member == member, rows.member != member
        mine &= wanted
        if rest.sum() < FEWEST:
            continue
        out[mine] = (rows.value[mine] - _reference(rows, cells, bins, rest, mine)) * (rest.sum() / n)
    return out


def cells_of(lag: Floats) -> Ints:
    """The number of each lag's quarter, from 0 on in the order of the lags; [n]."""
    found: Ints = np.unique(np.round(lag * CELLS), return_inverse=True)[1]
    return found


def _reference(rows: Rows, cells: Ints, bins: Ints, rest: NDArray[np.bool_], mine: NDArray[np.bool_]) -> Floats:
    value, lag, cell, at = rows.value[rest], rows.lag[rest], cells[rest], bins[rest]
    knots = _knots(cell, lag, value)
    effect = _effects(value - np.interp(lag, *knots), at)
    knots = _knots(cell, lag, value - effect[at])
    low, high = lag.min() - SLACK, lag.max() + SLACK
    known = (rows.lag[mine] >= low) & (rows.lag[mine] <= high)
    return np.where(known, np.interp(rows.lag[mine], *knots) + effect[bins[mine]], np.nan)


def _knots(cell: Ints, lag: Floats, value: Floats) -> tuple[Floats, Floats]:
    """Mean lag and mean value of neighbouring cells that have FEWEST responses together. Cells may be empty."""
    counts, sums, lags = (np.bincount(cell, weights=w) for w in (None, value, lag))
    label, filled, knot = np.zeros(len(counts), np.int64), 0, 0
    left = int(counts.sum())
    for i, count in enumerate(counts):
        label[i] = knot
        filled, left = filled + int(count), left - int(count)
        # What is left must be enough for another knot.
        if filled >= FEWEST and left >= FEWEST:
            filled, knot = 0, knot + 1
    total = np.bincount(label, weights=counts)
    return np.bincount(label, weights=lags) / total, np.bincount(label, weights=sums) / total


def _effects(value: Floats, bins: Ints) -> Floats:
    """Mean of what is left per length bin [LENGTH_BINS]; 0 where there is too little to tell."""
    counts = np.bincount(bins, minlength=LENGTH_BINS)
    sums = np.bincount(bins, weights=value, minlength=LENGTH_BINS)
    return np.where(counts >= FEWEST, sums / np.maximum(counts, 1), 0.0)


def summarise(residual: Floats, level: Floats, groups: Ints) -> Summary:
    """Of one member's residuals [n], the signal [n] they came from, and which responses share a prompt (int [n])."""
    n = len(residual)
    if not n:
        return Summary(np.nan, 0, np.nan, np.nan)
    mean = float(residual.mean())
    _, inverse = np.unique(groups, return_inverse=True)
    sums = np.bincount(inverse, weights=residual - mean)
    # The mean took one degree of freedom, of as many as there are groups.
    spread = float((sums**2).sum()) / n * len(sums) / max(1, len(sums) - 1)
    return Summary(mean, n, spread, float(level.mean()))


def robust_z(one: Summary, others: Sequence[Summary]) -> float:
    """How far one member is above the others; NaN without a number or without others. Below them is negative."""
    others = [o for o in others if o.num]
    if not one.num or not others:
        return float("nan")
    means = np.asarray([o.mean for o in others])
    middle = float(np.median(means))
    mad = MAD_TO_SD * float(np.median(np.abs(means - middle)))
    # Of the others' own variances the middle one: that of a faulty member is no measure of noise.
    usual = float(np.median([o.variance for o in others]))
    # A mean that is high by one odd group has a high variance, too; but a fault must not hide behind its own.
    own = min(max(usual, one.variance), MOST_VARIANCE * usual)
    level = float(np.median([o.level for o in others]))
    # A median of k means varies pi / 2 as much as their mean; of two it is the mean.
    share = np.pi / 2 if len(others) > 2 else 1.0
    error = np.sqrt(own / one.num + usual * share / sum(o.num for o in others))
    return (one.mean - middle) / max(mad, float(error), LEVEL_SHARE * abs(level) + LEVEL_LEAST)


def fleet_z(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """robust_z of every member against all others, by name."""
    return {
        name: robust_z(own, [s for other, s in summaries.items() if other != name]) for name, own in summaries.items()
    }
