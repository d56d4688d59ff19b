"""The tables of a report, as headings and cells of text: the page and the terminal show the same ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

Numbers = Mapping[str, Any]


class Table(NamedTuple):
    """text: what it says, in a sentence or two. short: whether the terminal shows it, too."""

    title: str
    text: str
    head: list[str]
    rows: list[list[str]]
    short: bool = False


def tables(n: Numbers) -> list[Table]:
    """All tables, in the order of the page."""
    found = [_dumps(n), _correlations(n), _by("lag", n), _by("length", n), _by("reward", n), _layers(n), _what_if(n)]
    if len(n["by_generator"]) > 1:
        found.append(_generators(n))
    return [*found, *(_usage(u) for u in n["usage"]), *([_agreement(n)] if n["agreement"] else [])]


def number(value: Any, digits: int = 3) -> str:
    """A cell: a dash for what is not known."""
    if isinstance(value, int) or not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "-"
    return f"{value:.{digits}g}" if abs(value) < 1e4 else f"{value:.0f}"


def _dumps(n: Numbers) -> Table:
    head = ["update", "epoch", "responses", "with drift", "dropped", "mean lag", "drift"]
    head += [f"drift, {step}" for step in n["against"]] + ["computed again, largest difference"]
    rows = []
    for d in n["dumps"]:
        cells = [d["update"], d["epoch"], d["responses"], d["with_drift"], d["dropped"], d["lag"], d["drift"]]
        cells += [d["against"][step] for step in n["against"]] + [d["max_difference"]]
        rows.append([number(c) for c in cells])
    text = f"Drift is that of the rollout against the policy before the update, as it was logged. {_capital(n)}."
    return Table("The dumps", text, head, rows, True)


def _capital(n: Numbers) -> str:
    text = str(n["sanity"]["text"])
    return text[:1].upper() + text[1:]


def _correlations(n: Numbers) -> Table:
    names = {"drift": "drift", "abs_log_ratio": "mean |log pi/mu|"}
    rows = [
        [f"{names.get(c['of'], c['of'])} and {names.get(c['with'], c['with'])}"]
        + [number(c[k], 2) for k in ("responses", "pearson", "spearman", "spearman_at_equal_lag")]
        for c in n["correlations"]
    ]
    text = "Of single responses. At equal lag: the effect of the rank of the lag is taken out of both."
    return Table("Correlations", text, ["", "responses", "Pearson", "Spearman", "Spearman at equal lag"], rows, True)


_COLUMNS = ("responses", "drift", "p50", "p90", "lag", "length", "reward", "abs_log_ratio")
_HEADS = ["responses", "drift", "median", "90th percentile", "lag", "length", "reward", "|log pi/mu|"]


def _by(what: str, n: Numbers) -> Table:
    rows = [[str(line["bin"]), *_cells(line, n)] for line in n[f"by_{what}"]]
    return Table(f"By {what}", "", [what, *_HEADS, *(f"drift, {s}" for s in n["against"])], rows, what == "lag")


def _generators(n: Numbers) -> Table:
    rows = [[line["generator"], *_cells(line, n)] for line in n["by_generator"]]
    return Table("By generator", "", ["generator", *_HEADS, *(f"drift, {s}" for s in n["against"])], rows)


def _cells(line: Numbers, n: Numbers) -> list[str]:
    return [number(line[k]) for k in _COLUMNS] + [number(line["against"][s]) for s in n["against"]]


def _layers(n: Numbers) -> Table:
    head = ["layer", "drift", "median", "90th percentile", "max", *(f"drift, {s}" for s in n["against"])]
    rows = [
        [number(line[k]) for k in ("layer", "drift", "p50", "p90", "max")]
        + [number(line["against"][s]) for s in n["against"]]
        for line in n["by_layer"]
    ]
    return Table("By layer", "", head, rows)


def _what_if(n: Numbers) -> Table:
    head = ["q", "buckets", "dropped", "length", "of kept", "reward", "of kept", "|log pi/mu|", "of kept"]
    head += ["shortest quarter", "longest quarter", "overlap with |log pi/mu|", "by chance"]
    rows = []
    for w in n["what_if"]:
        cells = [w["q"], w["buckets"], w["count"]]
        for key in ("length", "reward", "abs_log_ratio"):
            cells += [w["dropped"][key], w["kept"][key]]
        rows.append([number(c) for c in (*cells, w["by_length"][0], w["by_length"][3], w["overlap"], w["by_chance"])])
    text = (
        "Top q of each update by itself, without a carry. Means of what would have been dropped, and of the rest. "
        "Quarters: share of the dropped among the shortest and the longest quarter of responses; 0.25 is neutral. "
        "Overlap: share of the dropped that the same rule would drop by mean |log pi/mu|."
    )
    return Table("What the filter would have dropped", text, head, rows, True)


def _usage(u: Numbers) -> Table:
    head = ["layer", "total variation", "dead before", "dead after", "newly dead", "newly rare", "revived"]
    rows = [
        [number(line[k]) for k in ("layer", "total_variation", "dead_before", "dead_after")]
        + [", ".join(map(str, line[k])) or "none" for k in ("newly_dead", "newly_rare", "revived")]
        for line in u["layers"]
    ]
    text = (
        "Share of choices per expert on the same tokens. Dead: chosen by none of them; rare: under a tenth of an even "
        "share."
    )
    return Table(f"Expert usage, from the policies of the dumps to {u['after']}", text, head, rows)


def _agreement(n: Numbers) -> Table:
    head = ["layer"]
    for pair in n["agreement"]:
        name = " and ".join(pair["between"])
        head += [f"equal sets: {name}", "Jaccard"]
    rows = []
    for i, layer in enumerate(n["layers"]):
        cells = [pair["layers"][i][k] for pair in n["agreement"] for k in ("equal_sets", "jaccard")]
        rows.append([str(layer), *(number(c, 4) for c in cells)])
    text = f"Share of counted tokens ({n['agreement'][0]['tokens']} of the first pair) whose experts are the same set."
    return Table("Expert sets, token by token", text, head, rows, True)
