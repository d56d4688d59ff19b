"""Numbers of pooled responses: means by lag, length, reward, layer and generator, and correlations. Pure.

Axes: n responses of one or several dumps, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Row = dict[str, Any]

MAX_BINS = 9
"""More different values than this are cut into BINS quantile bins."""
BINS = 8


@dataclass(frozen=True, slots=True)
class Responses:
    """Responses of all dumps, one after the other. update int64 [n] says of which.

    drift float64 [n] and layers [n, L]: native, NaN where undefined; ratio: mean |log pi/mu| of the loss tokens, NaN
    without one; against: drift [n] and by layer [n, L] under other policies, by step.
    """

    ids: list[str]
    generators: list[str]
    update: NDArray[np.int64]
    length: Floats
    reward: Floats
    lag: Floats
    drift: Floats
    layers: Floats
    ratio: Floats
    against: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def defined(self) -> Mask:
        """Responses with a drift."""
        return ~np.isnan(self.drift)


def mean(values: Floats) -> float:
    """Mean of the values that are numbers, NaN without one."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def bins(values: Floats, rows: Mask) -> Iterator[tuple[str, float, Mask]]:
    """(label, mean value, rows) of every bin of the rows: one per value where there are few, else quantiles.

    Equal values are never parted, so quantile bins may differ in size.
    """
    distinct = np.unique(values[rows])
    if len(distinct) <= MAX_BINS:
        for value in distinct:
            yield f"{value:g}", float(value), rows & (values == value)
        return
    edges = np.unique(np.quantile(values[rows], np.linspace(0, 1, BINS + 1)[1:-1], method="higher"))
    place = np.searchsorted(edges, values, side="right")
    for b in range(len(edges) + 1):
        inside = rows & (place == b)
        if inside.any():
            low, high = values[inside].min(), values[inside].max()
            yield (f"{low:g}" if low == high else f"{low:g} to {high:g}"), mean(values[inside]), inside


def by(pool: Responses, values: Floats) -> list[Row]:
    """One line per bin of a column, over the responses with a drift."""
    return [{"bin": label, "value": at, **_line(pool, rows)} for label, at, rows in bins(values, pool.defined)]


def by_generator(pool: Responses) -> list[Row]:
    """One line per generator."""
    names = np.asarray(pool.generators)
    return [{"generator": g, **_line(pool, pool.defined & (names == g))} for g in sorted(set(pool.generators))]


def by_layer(pool: Responses, layers: tuple[int, ...]) -> list[Row]:
    """One line per MoE layer."""
    out: list[Row] = []
    for i, layer in enumerate(layers):
        values = pool.layers[pool.defined, i]
        quantiles = np.quantile(values, [0.5, 0.9, 1.0]) if values.size else np.full(3, np.nan)
        line: Row = {"layer": layer, "drift": mean(values), "p50": float(quantiles[0])}
        line |= {"p90": float(quantiles[1]), "max": float(quantiles[2])}
        line["against"] = {step: mean(by_layer_nL[:, i]) for step, (_, by_layer_nL) in pool.against.items()}
        out.append(line)
    return out


def overall(pool: Responses) -> Row:
    """The line of all responses with a drift."""
    return _line(pool, pool.defined)


def _line(pool: Responses, rows: Mask) -> Row:
    drift = pool.drift[rows]
    p50, p90 = np.quantile(drift, [0.5, 0.9]) if drift.size else (np.nan, np.nan)
    return {
        "responses": int(rows.sum()), "drift": mean(drift), "p50": float(p50), "p90": float(p90),
        "lag": mean(pool.lag[rows]), "length": mean(pool.length[rows]), "reward": mean(pool.reward[rows]),
        "abs_log_ratio": mean(pool.ratio[rows]),
        "against": {step: mean(values[rows]) for step, (values, _) in pool.against.items()},
    }  # fmt: skip


def correlations(pool: Responses) -> list[Row]:
    """Pearson's and Spearman's of drift with all else, and Spearman's with the effect of lag taken out."""
    columns = {"lag": pool.lag, "length": pool.length, "reward": pool.reward, "abs_log_ratio": pool.ratio}
    lines: list[Row] = []
    pairs = [("drift", pool.drift, name, values) for name, values in columns.items()]
    pairs += [("abs_log_ratio", pool.ratio, "lag", pool.lag), ("abs_log_ratio", pool.ratio, "length", pool.length)]
    for one, a, other, b in pairs:
        rows = pool.defined & ~np.isnan(a) & ~np.isnan(b)
        x, y, z = a[rows], b[rows], pool.lag[rows]
        partial = float("nan") if other == "lag" else partial_rank(x, y, z)
        line = {"of": one, "with": other, "responses": int(rows.sum())}
        lines.append(line | {"pearson": pearson(x, y), "spearman": spearman(x, y), "spearman_at_equal_lag": partial})
    return lines


def pearson(x: Floats, y: Floats) -> float:
    """Pearson's correlation, NaN where one side does not vary."""
    if len(x) < 2:
        return float("nan")
    a, b = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else float("nan")


def ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: Floats = last - (counts - 1) / 2
    out: Floats = middle[place]
    return out


def spearman(x: Floats, y: Floats) -> float:
    """Spearman's correlation, ties by mean ranks."""
    return pearson(ranks(x), ranks(y)) if len(x) else float("nan")


def partial_rank(x: Floats, y: Floats, z: Floats) -> float:
    """Spearman's correlation of x and y with the linear effect of the rank of z taken out of both."""
    xy, xz, yz = spearman(x, y), spearman(x, z), spearman(y, z)
    if np.isnan(xz) or np.isnan(yz):
        return xy  # z does not vary: nothing to take out
    scale = float(np.sqrt((1 - xz * xz) * (1 - yz * yz)))
    return (xy - xz * yz) / scale if scale > 1e-12 else float("nan")


def walk(numbers: Any, change: Callable[[float], Any]) -> Any:
    """The same nest of dicts and lists with every float changed."""
    if isinstance(numbers, Mapping):
        return {str(k): walk(v, change) for k, v in numbers.items()}
    if isinstance(numbers, list | tuple):
        return [walk(v, change) for v in numbers]
    return change(float(numbers)) if isinstance(numbers, float) else numbers
