"""Splits of an update's table that stay few, however large the lag and however deep the model: what charts can draw.

Pure: a table in, floats out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.learner.mismatch_rows import mismatch_of
from asyncrl.learner.table import Table

Mask = NDArray[np.bool_]

PARTS = ("first", "middle", "last")
"""Thirds of the depth of a model."""


def lag_range(lag: int) -> str:
    """The range of a lag: 0, 1, 2-3, 4-7, 8-15, each twice as wide as the one before."""
    if lag < 2:
        return str(lag)
    low = 1 << (lag.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def by_lag_range(t: Table) -> Iterable[tuple[str, Mask]]:
    """(range, rows) of the rows with a trained token, by their lag."""
    used = t["tokens"] > 0
    names = np.asarray([lag_range(int(lag)) if u else "" for lag, u in zip(t["lag"], used, strict=True)])
    for name in sorted(set(names.tolist()) - {""}, key=lambda n: int(n.partition("-")[0])):
        yield name, names == name


def mismatch_by_lag(t: Table, keep: Mask) -> dict[str, float]:
    """KL estimates, F(tau) and effective sample size of the kept rows, by range of lag."""
    out: dict[str, float] = {}
    for name, rows in by_lag_range(t):
        part = mismatch_of(t, rows & keep)
        out |= {f"mismatch/lags_{name}/{k}": part[k] for k in ("kl_k1", "kl_k3", "f_1.2", "f_2", "f_5", "ess")}
    return out


def drift_by_lag(t: Table, drift: NDArray[np.float64]) -> dict[str, float]:
    """Mean drift by range of lag; drift [n], NaN where undefined."""
    ranges = ((name, drift[rows & ~np.isnan(drift)]) for name, rows in by_lag_range(t))
    return {f"drift/lags_{name}": float(values.mean()) for name, values in ranges if values.size}


def drift_by_depth(t: Table, layers: Sequence[int]) -> dict[str, float]:
    """Mean drift of the first, middle and last third of the MoE layers; of fewer layers some parts are missing."""
    thirds = zip(PARTS, np.array_split(np.asarray(layers), len(PARTS)), strict=True)
    out: dict[str, float] = {}
    for part, members in thirds:
        columns = [t[f"layer_{layer}"] for layer in members.tolist()]
        values = np.concatenate([c[~np.isnan(c)] for c in columns]) if columns else np.zeros(0)
        out[f"drift/depth_{part}"] = float(values.mean()) if values.size else math.nan
    return out
