"""Means over an update's responses by named part of the reward and by data source, over all ranks.

Names come from generators, hence from tasks and users' rewards; their number in a record is bounded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from math import fsum, isfinite

from asyncrl.learner.batch import Row
from asyncrl.learner.shard import World
from asyncrl.learner.table import all_bytes

MAX_NAMES = 64
"""Parts, and data sources, in one record: the first ones in alphabetical order."""

PENALTY = "truncation_penalty"
"""The part that algorithm.truncated=penalise adds."""

Answer = tuple[str, float, int, dict[str, float]]
"""Data source, reward, length and parts of one response."""


def breakdown(rows: Sequence[Row], world: World) -> dict[str, float]:
    """reward/<part> and source/<name>/reward, length and share of the responses of all ranks. A collective."""
    mine: list[Answer] = [
        (r.data_source, r.trajectory.reward, r.trajectory.num_tokens, dict(r.trajectory.parts)) for r in rows
    ]
    blobs = all_bytes(json.dumps(mine).encode(), world)
    return scalars([answer for blob in blobs for answer in json.loads(blob)])


def scalars(answers: Sequence[Answer]) -> dict[str, float]:
    """The same of these responses. Sums are exact, so that neither order nor split changes a value.

    The mean of a part is over the responses that have it. Responses without a data source have no share.
    """
    parts: dict[str, list[float]] = {}
    sources: dict[str, list[Answer]] = {}
    for answer in answers:
        for name, value in answer[3].items():
            if isfinite(value):
                parts.setdefault(_word(name), []).append(value)
        if answer[0]:
            sources.setdefault(_word(answer[0]), []).append(answer)
    out = {f"reward/{name}": _mean(parts[name]) for name in sorted(parts)[:MAX_NAMES]}
    if PENALTY in parts:
        out["policy/truncated_penalised"] = sum(v != 0 for v in parts[PENALTY]) / len(answers)
    for name in sorted(sources)[:MAX_NAMES]:
        mine = sources[name]
        out[f"source/{name}/reward"] = _mean(a[1] for a in mine)
        out[f"source/{name}/length"] = _mean(float(a[2]) for a in mine)
        out[f"source/{name}/share"] = len(mine) / len(answers)
    return out


@functools.lru_cache(maxsize=1024)
def _word(name: str) -> str:
    """As a part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:64] or "_"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fsum(found) / len(found)
