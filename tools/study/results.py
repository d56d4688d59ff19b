"""What a finished cell came to: numbers and curves, read from its metrics. Knows no comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from asyncrl.metrics.sink import read_jsonl, timeline
from study.plan import Cell, cell_of
from study.runs import FACTS, is_finished

TAIL = 10
"""Updates at the end that means are taken over."""
ALARM = 0.1
"""F(2) above it counts."""

CURVES = {
    "reward": "policy/reward",
    "kl_k3": "mismatch/kl_k3",
    "F(2)": "mismatch/f_2",
    "gradient norm": "optim/grad_norm",
    "drift": "drift/mean",
    "lag": "staleness/lag_mean",
    "dropped": "filter/dropped",
    "clipped": "policy/clip_fraction",
    "weight": "mismatch/weight_mean",
}
"""Name in figures: metric."""


class Result(NamedTuple):
    """One run. evals: (update, sampled accuracy, greedy accuracy); curves: by name, (update, value)."""

    cell: Cell
    evals: list[tuple[int, float, float]]
    curves: dict[str, list[tuple[int, float]]]
    cpu_s: float
    wall_s: float
    load: float

    @property
    def best(self) -> float:
        """Highest sampled accuracy of any evaluation."""
        return max(e[1] for e in self.evals)

    @property
    def last(self) -> float:
        """Sampled accuracy after the last update."""
        return self.evals[-1][1]

    @property
    def greedy(self) -> float:
        """Greedy accuracy after the last update."""
        return self.evals[-1][2]

    @property
    def area(self) -> float:
        """Mean sampled accuracy of the evaluations after the first one: where the whole run was."""
        return fmean(e[1] for e in self.evals[1:])

    @property
    def alarms(self) -> int:
        """Updates with F(2) above ALARM."""
        return sum(value > ALARM for _, value in self.curves["F(2)"])

    @property
    def sustained(self) -> int:
        """First update after which 5 of the last 10 had F(2) above ALARM; -1 for never."""
        high = [value > ALARM for _, value in self.curves["F(2)"]]
        return next((i for i in range(len(high)) if sum(high[max(0, i - 9) : i + 1]) >= 5), -1)

    @property
    def max_grad(self) -> float:
        """Largest gradient norm."""
        return max(value for _, value in self.curves["gradient norm"])

    def tail(self, name: str) -> float:
        """Mean of a curve over the last TAIL updates that have it; NaN without any."""
        values = [value for _, value in self.curves[name][-TAIL:]]
        return fmean(values) if values else math.nan

    def whole(self, name: str) -> float:
        """Mean of a curve over all updates."""
        values = [value for _, value in self.curves[name]]
        return fmean(values) if values else math.nan


def read_result(folder: Path) -> Result | None:
    """The result in a run folder; None when it is no finished cell."""
    cell = cell_of(folder.name)
    if cell is None or not is_finished(folder):
        return None
    facts = json.loads((folder / FACTS).read_text())
    return result_of(cell, timeline(read_jsonl(folder / "metrics.jsonl")), facts)


def result_of(cell: Cell, records: Sequence[dict[str, float]], facts: dict[str, float]) -> Result:
    """The result of the records of a run."""
    found = sorted((r for r in records if "eval/sampled_accuracy" in r), key=lambda r: r["update"])
    evals = [(int(r["update"]), r["eval/sampled_accuracy"], r.get("eval/greedy_accuracy", math.nan)) for r in found]
    updates = [r for r in records if "policy/reward" in r]
    curves = {
        name: [(int(r["update"]), r[key]) for r in updates if key in r and math.isfinite(r[key])]
        for name, key in CURVES.items()
    }
    return Result(cell, evals, curves, facts["cpu_s"], facts["wall_s"], facts["load"])


def read_all(root: Path) -> list[Result]:
    """Every finished cell below root, by name."""
    found = [read_result(folder) for folder in sorted(root.iterdir()) if folder.is_dir()] if root.is_dir() else []
    return [result for result in found if result is not None]


def read_probe(root: Path) -> list[dict[str, Any]]:
    """Every measured batch of the gradient probe."""
    return [json.loads(file.read_text()) for file in sorted((root / "probe").glob("s*-b*.json"))]
