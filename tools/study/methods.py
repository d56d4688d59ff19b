"""The methods study in tables: which methods are compared, a row for each, and differences. Knows no run and no figure.

docs/methods_study.md holds the tables between two markers; its prose is kept.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from study.plan import FILES, METHODS
from study.results import Result
from study.tables import Estimate, Rows, estimate, markdown, paired

BEGIN = "<!-- tables: written by tools/methods_study.py report, do not edit -->"
END = "<!-- end of tables -->"
REGIME = "async16x4"
LR = 5e-4
"""At which plain GRPO falls and TIS holds in a pilot with seed 99; at 4e-4 both hold, at 8e-4 both fall."""
BASELINE = "tis"
"""What differences are taken to."""

NAMED: Mapping[str, str] = {
    "grpo": "GRPO",
    "behaviour": "behaviour ratio",
    "tis": "GRPO + TIS",
    "rdc": "GRPO + TIS + RDC",
    "r3": "GRPO + R3",
    "gspo_r3": "GSPO + R3",
    "gspo_tis_rdc": "GSPO + TIS + RDC",
    "r2": "R2",
    "rspo": "RSPO",
}
"""The methods of the first table, by the name of the file in configs/methods."""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "ratio and surrogate": ("grpo", "behaviour", "gspo", "cispo", "gmpo"),
    "correction": ("tis", "tis_sequence", "mask", "trm", "sis", "ctpo", "rspo"),
    "filter": ("rdc", "random"),
    "routes": ("r3", "r2"),
    "surrogate with correction, routes, filter": ("gspo_tis", "gspo_r3", "gspo_tis_rdc"),
    "advantage": ("dr_grpo", "rloo", "reinforce_pp"),
    "aggregation": ("tis_sequence_mean", "tis_constant"),
    "KL to a reference policy": ("kl_loss", "kl_reward"),
}
"""How the rows of the second table are ordered; a file that is in none comes last."""

EXTRA = ("tis_sequence_mean", "tis_constant")
"""Of study.plan.METHODS: aggregations that are in no file of their own."""

Methods = Mapping[str, Mapping[int, Result]]


def ordered(methods: Sequence[str] = (*FILES, *EXTRA)) -> list[str]:
    """The methods in the order of their families; without an argument all of the study."""
    known = [m for family in FAMILIES.values() for m in family]
    return [m for m in known if m in methods] + [m for m in methods if m not in known]


def family_of(method: str) -> str:
    """The family of a method."""
    return next((family for family, members in FAMILIES.items() if method in members), "other")


def by_method(results: Sequence[Result], regime: str = REGIME) -> dict[str, dict[int, Result]]:
    """Results of a regime by method, in the order of the families, then seed."""
    out: dict[str, dict[int, Result]] = {m: {} for m in ordered(tuple(METHODS))}
    for r in sorted(results, key=lambda r: r.cell.seed):
        if r.cell.regime == regime:
            out[r.cell.method][r.cell.seed] = r
    return {m: runs for m, runs in out.items() if runs}


def over(runs: Mapping[int, Result], get: Callable[[Result], float]) -> Estimate:
    """Mean over the runs that have it."""
    return estimate([value for r in runs.values() if math.isfinite(value := get(r))])


def early(r: Result) -> float:
    """Sampled accuracy of the first evaluation after the start."""
    return r.evals[1][1] if len(r.evals) > 1 else math.nan


HEAD = (
    "seeds", "last acc", "best acc", "mean acc", "early acc", "last greedy", "kl_k3", "F(2)", "grad norm",
    "max grad norm", "clipped", "weight", "lag", "CPU s",
)  # fmt: skip


def method_row(runs: Mapping[int, Result]) -> list[str]:
    """A row: means over seeds +- standard error."""
    weight = over(runs, lambda r: r.whole("weight"))
    return [
        str(len(runs)), str(over(runs, lambda r: r.last)), str(over(runs, lambda r: r.best)),
        str(over(runs, lambda r: r.area)), str(over(runs, early)), f"{over(runs, lambda r: r.greedy).mean:.3f}",
        str(over(runs, lambda r: r.tail("kl_k3"))), f"{over(runs, lambda r: r.tail('F(2)')).mean:.3f}",
        str(over(runs, lambda r: r.tail("gradient norm"))), f"{max(r.max_grad for r in runs.values()):.1f}",
        f"{over(runs, lambda r: r.whole('clipped')).mean:.4f}", f"{weight.mean:.3f}" if weight.n else "",
        f"{over(runs, lambda r: r.whole('lag')).mean:.1f}", f"{over(runs, lambda r: r.cpu_s).mean:.0f}",
    ]  # fmt: skip


def named_table(methods: Methods) -> Rows:
    """The methods of NAMED."""
    return [["method", *HEAD], *([NAMED[m], *method_row(methods[m])] for m in NAMED if m in methods)]


def family_table(methods: Methods) -> Rows:
    """Every method, family by family."""
    return [["family", "file", *HEAD], *([family_of(m), f"`{m}`", *method_row(runs)] for m, runs in methods.items())]


def differences(methods: Methods) -> Rows:
    """Paired differences to the baseline, same seed: accuracies, and log10 of kl_k3."""
    if BASELINE not in methods:
        return [["no run of", BASELINE]]
    parts: dict[str, Callable[[Result], float]] = {
        "last acc": lambda r: r.last,
        "mean acc": lambda r: r.area,
        "early acc": early,
        "best acc": lambda r: r.best,
        "log10 kl_k3": lambda r: math.log10(max(r.tail("kl_k3"), 1e-9)),
    }
    rows = [["method", *(f"{title} - {BASELINE}" for title in parts)]]
    for method, runs in methods.items():
        if method != BASELINE:
            found = []
            for get in parts.values():
                mine, other = ({s: get(r) for s, r in which.items()} for which in (runs, methods[BASELINE]))
                found.append(str(paired(mine, other)))
            rows.append([NAMED.get(method, f"`{method}`"), *found])
    return rows


def far_apart(methods: Methods) -> Rows:
    """How many differences of the last, the mean and the early accuracy have a p below a bound, how many would by
    chance, and how large their standard errors are."""
    if BASELINE not in methods:
        return [["no run of", BASELINE]]
    parts: dict[str, Callable[[Result], float]] = {
        "last acc": lambda r: r.last,
        "mean acc": lambda r: r.area,
        "early acc": early,
    }
    found = {}
    for title, get in parts.items():
        base = {s: get(r) for s, r in methods[BASELINE].items()}
        pairs = [paired({s: get(r) for s, r in runs.items()}, base) for m, runs in methods.items() if m != BASELINE]
        found[title] = [p for p in pairs if math.isfinite(p.p)]
    count = len(found["last acc"])
    rows = [["p below", *(f"{title}: of {len(pairs)}" for title, pairs in found.items()), "by chance"]]
    for bound in (0.05, 0.01, 0.05 / max(1, count)):
        hits = [str(sum(p.p < bound for p in pairs)) for pairs in found.values()]
        rows.append([f"{bound:.2g}", *hits, f"{bound * count:.1f}"])
    errors = [f"{median(p.estimate.se for p in pairs):.3f}" if pairs else "" for pairs in found.values()]
    return [*rows, ["median standard error", *errors, ""]]


def conditions(results: Sequence[Result]) -> str:
    """Machine, load and how much was run, in sentences."""
    cpu, wall = (fmean(getattr(r, k) for r in results) for k in ("cpu_s", "wall_s"))
    loads = [r.load for r in results]
    lags = [r.whole("lag") for r in results]
    return (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}. {len(results)} runs: "
        f"{cpu:.0f} CPU s and {wall:.0f} wall s each in the mean; load average at their start {min(loads):.1f} to "
        f"{max(loads):.1f}, median {median(loads):.1f}. Mean lag of a run: {min(lags):.1f} to {max(lags):.1f} updates, "
        f"mean {fmean(lags):.1f}; over its last 10 updates {fmean(r.tail('lag') for r in results):.1f}."
    )


def tables_text(results: Sequence[Result], others: Mapping[str, Sequence[Result]] | None = None) -> str:
    """All tables, with what they were made from. others: results under other settings, by what these are; only the
    methods of NAMED are shown of them."""
    methods = by_method(results)
    used = [r for runs in methods.values() for r in runs.values()]
    asked = {m: methods[m] for m in NAMED if m in methods}
    parts = [
        conditions(used),
        "### Nine methods",
        markdown(named_table(methods)),
        "Paired differences, same seed:",
        markdown(differences(asked)),
        "### Every method",
        markdown(family_table(methods)),
        "Paired differences, same seed:",
        markdown(differences(methods)),
        f"How many of them are far from {BASELINE}:",
        markdown(far_apart(methods)),
    ]
    for title, found in (others or {}).items():
        again = {m: runs for m, runs in by_method(found).items() if m in NAMED}
        parts += [f"### Nine methods, {title}", markdown(named_table(again)), markdown(differences(again))]
    return "\n\n".join(parts)


def write_page(results: Sequence[Result], page: Path, others: Mapping[str, Sequence[Result]] | None = None) -> None:
    """Put the tables into the page; arguments as in `tables_text`. ValueError when a marker is missing."""
    text = page.read_text() if page.is_file() else f"# Methods study\n\n{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} needs the lines {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{tables_text(results, others)}\n\n{END}{after}")
