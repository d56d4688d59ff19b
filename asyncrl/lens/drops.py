"""What the filter would have dropped, for any rate and number of length buckets. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algos.select import Buckets, select, unit_signal
from asyncrl.lens.measure import Mask, Responses, mean


def what_if(pool: Responses, rates: Iterable[float], numbers: Iterable[Buckets]) -> list[dict[str, Any]]:
    """One line per rate q and number of buckets: the top-q gate on every update by itself, without a carry.

    dropped and kept: means over the responses with a drift. overlap: share of the dropped that the same gate drops
    when it ranks by mean |log pi/mu| instead; by_chance: what two independent choices would share.
    """
    return [_line(pool, q, buckets) for q in rates for buckets in numbers]


def _line(pool: Responses, q: float, buckets: Buckets) -> dict[str, Any]:
    ratio = unit_signal(torch.from_numpy(pool.ratio)).numpy()
    # A response without a loss token has no ratio; what has no drift is ranked by neither.
    by_ratio = np.where(np.isnan(pool.drift), np.nan, np.nan_to_num(ratio))
    dropped, other = chosen(pool, pool.drift, q, buckets), chosen(pool, by_ratio, q, buckets)
    total, count = int(pool.defined.sum()), int(dropped.sum())
    return {
        "q": q, "buckets": buckets, "responses": total, "count": count,
        "dropped": _means(pool, dropped), "kept": _means(pool, pool.defined & ~dropped),
        "overlap": float((dropped & other).sum()) / count if count else float("nan"),
        "by_chance": float(other.sum()) / total if total else float("nan"),
        "by_length": _shares(pool, dropped),
    }  # fmt: skip


def chosen(pool: Responses, signal: NDArray[np.float64], q: float, buckets: Buckets) -> Mask:
    """What the gate drops of each update, bool [n]. signal [n] in [0, 1], NaN is never dropped."""
    out = np.zeros(len(pool), bool)
    for update in np.unique(pool.update):
        rows = np.flatnonzero(pool.update == update)
        ids = [pool.ids[i] for i in rows]
        out[rows] = ~select(signal[rows], pool.length[rows], ids, q, buckets, update=int(update)).keep.numpy()
    return out


def _means(pool: Responses, rows: Mask) -> dict[str, float]:
    return {
        "length": mean(pool.length[rows]), "reward": mean(pool.reward[rows]), "lag": mean(pool.lag[rows]),
        "drift": mean(pool.drift[rows]), "abs_log_ratio": mean(pool.ratio[rows]),
    }  # fmt: skip


def _shares(pool: Responses, dropped: Mask) -> list[float]:
    """Share of the dropped in each quarter of the responses by length, the shortest first; 0.25 each is neutral.

    Responses of one length are spread evenly over the quarters that they lie in.
    """
    length = pool.length[pool.defined]
    lost = dropped[pool.defined]
    if not lost.any():
        return [float("nan")] * 4
    edges = np.arange(5) * len(length) / 4
    found = np.zeros(4)
    at = 0
    for value in np.unique(length):
        same = length == value
        cover = np.clip(np.minimum(edges[1:], at + same.sum()) - np.maximum(edges[:-1], at), 0, None)
        found += lost[same].sum() * cover / same.sum()
        at += int(same.sum())
    return [float(x) for x in found / lost.sum()]
