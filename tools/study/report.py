"""docs/study.md and docs/study.html out of what was run. The prose of study.md is kept, its tables are replaced."""

from __future__ import annotations

import html
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from markdown import markdown as to_html

from study.figures import all_figures
from study.probe import QS
from study.results import Result, read_all, read_probe
from study.tables import (
    detection_table,
    difference_table,
    grouped,
    hits_table,
    markdown,
    outcome_table,
    probe_table,
    tally_table,
)

BEGIN = "<!-- tables: written by tools/staleness_study.py report, do not edit -->"
END = "<!-- end of tables -->"

STYLE = """body { font: 14px/1.5 sans-serif; margin: 2em auto; max-width: 1250px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 12px }
td, th { border: 1px solid #ccc; padding: 2px 7px; text-align: left }
th { background: #f2f2f2 } img { max-width: 100% } code { background: #f4f4f4 } figure { margin: 2em 0 }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto }"""


def write_report(root: Path, docs: Path) -> int:
    """Write both files. Returns 1 when there is nothing to report."""
    results, batches = read_all(root), read_probe(root)
    if not results and not batches:
        print(f"study: {root} holds no finished cell; run `train` or `probe` first", file=sys.stderr)
        return 1
    page = docs / "study.md"
    text = page.read_text() if page.is_file() else f"# Staleness study\n\n{BEGIN}\n{END}\n"
    text = replaced(text, tables_text(results, batches))
    page.write_text(text)
    (docs / "study.html").write_text(html_page(text, all_figures(results, batches)))
    print(f"{page} and {docs / 'study.html'}: {len(results)} runs, {len(batches)} batches of the probe")
    return 0


def replaced(text: str, tables: str) -> str:
    """The page with other tables. ValueError when a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"study.md needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def tables_text(results: Sequence[Result], batches: Sequence[dict[str, Any]]) -> str:
    """All tables, with what they were made from."""
    parts = [conditions(results, batches)]
    for key, methods in grouped(results).items():
        title = f"{key[0]}, {key[1]} fleet, {key[2]} rollouts"
        parts += [f"### {title}", markdown(outcome_table(methods))]
        if len(methods) > 1:
            parts += [f"Paired differences, same seed ({title}):", markdown(difference_table(methods))]
    if batches:
        parts += ["### Gradient probe: the batches", markdown(detection_table(batches))]
        for q in QS:
            parts += [f"### Gradient probe: gate top_q, q {q:g}", markdown(probe_table(batches, "top_q", q))]
        parts += ["### Gradient probe: gate outlier (median + 4 MAD)", markdown(probe_table(batches, "outlier", None))]
        parts += ["### Gradient probe: how many comparisons are beyond two standard errors"]
        parts += [markdown(tally_table(batches)), "### Gradient probe: what is caught", markdown(hits_table(batches))]
    return "\n\n".join(parts)


def conditions(results: Sequence[Result], batches: Sequence[dict[str, Any]]) -> str:
    """Machine, load and how much was run, in sentences."""
    lines = [f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}."]
    if results:
        cpu, wall, load = (fmean(getattr(r, k) for r in results) for k in ("cpu_s", "wall_s", "load"))
        lines.append(
            f"{len(results)} training runs: {cpu:.0f} CPU s and {wall:.0f} wall s each in the mean; load average at "
            f"their start {min(r.load for r in results):.0f} to {max(r.load for r in results):.0f}, mean {load:.0f}."
        )
    if batches:
        seeds = len({b["seed"] for b in batches})
        lines.append(
            f"Gradient probe: {len(batches)} batches from {seeds} weight trajectories, "
            f"{fmean(b['cpu_s'] for b in batches):.0f} CPU s each; cosine between the two halves of the on-policy "
            f"reference {fmean(b['reference'] for b in batches):.2f}."
        )
    return " ".join(lines)


def html_page(text: str, figures: Sequence[tuple[str, str]]) -> str:
    """The page in one file: prose, figures, tables."""
    before, _, after = text.partition(BEGIN)
    parts = [to_html(before, extensions=["tables", "fenced_code", "sane_lists"])]
    for caption, image in figures:
        words = html.escape(caption)
        parts.append(f'<figure><figcaption><b>{words}</b></figcaption><img alt="{words}" src="{image}"></figure>')
    parts.append(to_html(after.replace(END, ""), extensions=["tables", "fenced_code", "sane_lists"]))
    head = f'<head><meta charset="utf-8"><title>Staleness study</title><style>{STYLE}</style></head>'
    return f'<!doctype html><html lang="en">{head}<body>{"".join(parts)}</body></html>' + "\n"
