"""Means, standard errors and paired differences, and the tables made of them. Knows no file and no figure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from study.plan import METHODS, REGIMES
from study.results import Result

Rows = list[list[str]]


class Estimate(NamedTuple):
    """Mean of n values with its standard error (NaN for one value)."""

    mean: float
    se: float
    n: int

    def __str__(self) -> str:
        if not self.n:
            return "-"
        return f"{self.mean:.3f}" + ("" if math.isnan(self.se) else f" +- {self.se:.3f}")


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error s / sqrt(n) with n - 1 in s."""
    if not values:
        return Estimate(math.nan, math.nan, 0)
    return Estimate(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan, len(values))


class Paired(NamedTuple):
    """Differences of pairs: their estimate, how many are above 0, and the two-sided p of a paired t-test."""

    estimate: Estimate
    above: int
    p: float

    def __str__(self) -> str:
        e = self.estimate
        if not e.n:
            return "-"
        sign = f"{e.mean:+.3f}" + ("" if math.isnan(e.se) else f" +- {e.se:.3f}")
        return f"{sign} ({self.above}/{e.n}{'' if math.isnan(self.p) else f', p {self.p:.2g}'})"


def paired(first: Mapping[Any, float], second: Mapping[Any, float]) -> Paired:
    """first - second over the keys (seeds, batches) that both have."""
    keys = sorted(first.keys() & second.keys())
    differences = [first[k] - second[k] for k in keys]
    found = estimate(differences)
    p = p_value(found.mean / found.se, found.n - 1) if found.n > 1 and found.se > 0 else math.nan
    return Paired(found, sum(d > 0 for d in differences), p)


def p_value(t: float, df: int) -> float:
    """Two-sided p of Student's t, by the trapezoid rule over the density."""
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    steps = 2000
    width = abs(t) / steps
    density = [math.exp(log_scale - (df + 1) / 2 * math.log1p((i * width) ** 2 / df)) for i in range(steps + 1)]
    inside = width * (sum(density) - 0.5 * (density[0] + density[-1]))
    return max(0.0, 1 - 2 * inside)


def grouped(results: Sequence[Result]) -> dict[tuple[str, str, str], dict[str, dict[int, Result]]]:
    """Results by (regime, fleet, precision), then method, then seed, in the order of the plan."""
    out: dict[tuple[str, str, str], dict[str, dict[int, Result]]] = defaultdict(lambda: defaultdict(dict))
    methods, regimes = list(METHODS), list(REGIMES)
    order = sorted(results, key=lambda r: (regimes.index(r.cell.regime), r.cell[2:4], methods.index(r.cell.method)))
    for r in order:
        out[r.cell.regime, r.cell.fleet, r.cell.precision][r.cell.method][r.cell.seed] = r
    return out


HEAD = (
    "method", "seeds", "best acc", "last acc", "mean acc", "last greedy", "kl_k3", "F(2)", "updates F(2)>0.1",
    "sustained", "max grad norm", "drift", "lag", "CPU s",
)  # fmt: skip


def outcome_table(methods: Mapping[str, Mapping[int, Result]]) -> Rows:
    """One line per method: means over seeds +- standard error."""
    rows = [list(HEAD)]
    for method, by_seed in methods.items():
        runs = list(by_seed.values())

        def over(get: Callable[[Result], float], runs: list[Result] = runs) -> Estimate:
            return estimate([value for r in runs if math.isfinite(value := get(r))])

        rows.append([
            method, str(len(runs)), str(over(lambda r: r.best)), str(over(lambda r: r.last)),
            str(over(lambda r: r.area)), str(over(lambda r: r.greedy)), str(over(lambda r: r.tail("kl_k3"))),
            str(over(lambda r: r.tail("F(2)"))), " ".join(str(r.alarms) for r in runs),
            f"{sum(r.sustained >= 0 for r in runs)}/{len(runs)}",
            f"{max(r.max_grad for r in runs):.1f}", str(over(lambda r: r.tail("drift"))),
            f"{over(lambda r: r.whole('lag')).mean:.1f}", f"{over(lambda r: r.cpu_s).mean:.0f}",
        ])  # fmt: skip
    return rows


BASELINES = ("tis", "random_tis")


def difference_table(methods: Mapping[str, Mapping[int, Result]]) -> Rows:
    """Paired differences of last, mean and best accuracy to each baseline, same seed."""
    present = [b for b in BASELINES if b in methods]
    parts = (("last", "last acc"), ("area", "mean acc"), ("best", "best acc"))
    rows = [["method", *(f"{title} - {b}" for b in present for _, title in parts)]]
    for method, by_seed in methods.items():
        cells = [method]
        for baseline in present:
            for name, _ in parts:
                mine = {s: float(getattr(r, name)) for s, r in by_seed.items()}
                other = {s: float(getattr(r, name)) for s, r in methods[baseline].items()}
                cells.append("." if method == baseline else str(paired(mine, other)))
        rows.append(cells)
    return rows


# --- the gradient probe ---------------------------------------------------------------------------


def probe_values(batches: Sequence[dict[str, Any]]) -> dict[str, dict[tuple[str, str, float], dict[str, list[float]]]]:
    """By cell and filter (signal, gate, q): per batch the cosine minus none's, minus random's, share dropped, hits."""
    out: dict[str, dict[tuple[str, str, float], dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for batch in batches:
        for cell, found in batch["cells"].items():
            none = next(f["cosine"] for f in found["filters"] if f["signal"] == "none")
            for f in found["filters"]:
                slot = out[cell][f["signal"], f["gate"], f["q"]]
                slot["gain"].append(f["gain"] if "gain" in f else f["cosine"] - none)
                slot["cosine"].append(f.get("cosine", math.nan))
                if "random" in f:
                    slot["control"].append(f["random"] - none)
                    slot["over_random"].append(f["cosine"] - f["random"])
                    slot["dropped"].append(f["dropped"])
                if "hits" in f:
                    slot["hits"].append(f["hits"])
    return out


SIGNALS = ("drift", "log_ratio", "lag", "truth")


def probe_table(batches: Sequence[dict[str, Any]], gate: str, q: float | None) -> Rows:
    """One line per cell at one gate and q: each signal against no filter, and against as many dropped at random."""
    rows = [["batch", "cosine, no filter", "random - none"]]
    rows[0] += [f"{signal} - {other}" for signal in SIGNALS for other in ("none", "random")] + ["oracle - none"]
    for cell, filters in probe_values(batches).items():
        at = {signal: v for (signal, g, its_q), v in filters.items() if g == gate and q in (None, its_q)}
        at["truth"] = next((v for (signal, _, _), v in filters.items() if signal == "truth"), {})
        oracle = filters.get(("oracle", "half", q or 0.0), {})
        rows.append([cell, str(estimate(filters["none", "", 0.0]["cosine"])), signed(at["drift"]["control"])])
        for signal in SIGNALS:
            found = at.get(signal, {})
            rows[-1] += [signed(found.get("gain", [])), signed(found.get("over_random", []))]
        rows[-1].append(signed(oracle.get("gain", [])))
    return rows


def tally_table(batches: Sequence[dict[str, Any]]) -> Rows:
    """How many comparisons of the probe lie two standard errors above and below 0, by signal and gate."""
    counts: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
    for filters in probe_values(batches).values():
        for (signal, gate, _), v in filters.items():
            for name, values in (("none", v["gain"]), ("random", v["over_random"])):
                # A filter that dropped nothing says nothing.
                if signal in SIGNALS and values and any(v["dropped"]):
                    e, slot = estimate(values), counts[signal, gate][name]
                    slot[0] += 1
                    slot[1] += e.mean > 2 * e.se > 0
                    slot[2] += -e.mean > 2 * e.se > 0
    rows = [["signal", "gate", "comparisons", "better than none", "worse than none", "better than random",
             "worse than random"]]  # fmt: skip
    for (signal, gate), by in counts.items():
        rows.append([signal, gate, *map(str, by["none"]), *map(str, by["random"][1:])])
    return rows


def hits_table(batches: Sequence[dict[str, Any]]) -> Rows:
    """Share of the broken generator's responses that each filter drops, and of all."""
    rows = [["batch", "filter", "dropped", "of the broken generator's"]]
    for cell, filters in probe_values(batches).items():
        for (signal, gate, q), v in filters.items():
            if v["hits"] and signal in ("drift", "log_ratio") and (gate == "outlier" or q == 0.125):
                name = f"{signal}, {gate}" + ("" if gate == "outlier" else f" {q:g}")
                rows.append([cell, name, f"{fmean(v['dropped']):.2f}", f"{fmean(v['hits']):.2f}"])
    return rows


def signed(values: Sequence[float]) -> str:
    """Mean +- standard error with its sign, and a star beyond two standard errors."""
    if not values:
        return ""
    e = estimate(values)
    far = e.se > 0 and abs(e.mean) > 2 * e.se
    return f"{e.mean:+.3f} +- {e.se:.3f}{' *' if far else ''}"


def detection_table(batches: Sequence[dict[str, Any]]) -> Rows:
    """What the responses of each cell are like, and how well drift and |log-ratio| find the broken generator's."""
    rows = [["batch", "kl_k3", "F(2)", "drift", "share of drift 0", "AUC drift", "AUC log-ratio"]]
    for cell in dict.fromkeys(name for batch in batches for name in batch["cells"]):
        found = [batch["cells"][cell] for batch in batches]
        means = [f"{fmean(f[k] for f in found):.3f}" for k in ("kl_k3", "f_2", "drift", "drift_zero")]
        aucs = [
            "" if k not in found[0] else f"{fmean(f[k] for f in found):.2f}" for k in ("auc_drift", "auc_log_ratio")
        ]
        rows.append([cell, *means, *aucs])
    return rows


def markdown(rows: Rows) -> str:
    """The table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
