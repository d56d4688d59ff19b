"""From the answers to OUT/table.json, OUT/table.md and the table on the terminal. Pure but for `write`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from asyncrl.evaluate.answers import Record
from asyncrl.tasks.estimates import Answer, Estimate, estimates, summary
from asyncrl.tasks.held_out import Asked

JSON, MARKDOWN = "table.json", "table.md"
COLUMNS = (
    "set", "prompts", "answers", "k", "avg@k", "pass@k", "maj@k", "greedy", "length", "truncated", "no answer",
    "failed",
)  # fmt: skip
LABEL, CELL = 14, 24
"""Columns of a terminal for the names of the measures, and for each set."""
PASS = "pass_at_"
REASONS = 10
"""Lines of reasons why answers have no reward."""


def numbers(
    records: Sequence[Record], asked: Mapping[str, Asked], prompts: Mapping[str, int], names_answers: bool = True
) -> dict[str, Any]:
    """All numbers by set. prompts: how many each set has. names_answers: as `summary` takes it.

    Answers without a reward are in `failed` and nowhere else.
    """
    sets: dict[str, Any] = {}
    for name, (samples, greedy) in asked.items():
        own = [r for r in records if r["set"] == name]
        scored = [_answer(r) for r in own if r["reward"] is not None]
        sets[name] = {
            "asked": {"prompts": prompts[name], "samples": samples, "greedy": greedy},
            "missing": prompts[name] * (samples + greedy) - len(own),
            "failed": len(own) - len(scored),
            **summary(scored, samples, names_answers),
            "intervals": {n: _interval(e) for n, e in estimates(scored, samples).items()},
        }
    failures = [
        {
            "prompt_id": r["prompt_id"],
            "set": r["set"],
            "sample": r["sample"],
            "greedy": r["greedy"],
            "error": r["error"],
        }
        for r in records
        if r["reward"] is None and r["set"] in asked
    ]
    return {"sets": sets, "failures": failures}


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row of COLUMNS for every set; pass@k is of the largest k that was asked for."""
    out: list[tuple[str, ...]] = []
    for name, s in found["sets"].items():
        k, intervals = s["asked"]["samples"], s["intervals"]
        largest = max((_j(n) for n in intervals if n.startswith(PASS)), default=0)
        out.append(
            (
                name, f"{s['prompts']:.0f}", f"{s['count']:.0f}", str(k), _cell(intervals.get(f"avg_at_{k}")),
                _cell(intervals.get(f"{PASS}{largest}")), _cell(intervals.get(f"maj_at_{k}")),
                _cell(intervals.get("greedy")), f"{s['length']:.1f}" if "length" in s else "-",
                _share(s, "truncated"), _share(s, "no_answer"), str(s["failed"]),
            )
        )  # fmt: skip
    return out


def markdown(found: Mapping[str, Any], title: str) -> str:
    """The table, the other pass@j, parts, and what failed."""
    lines = [f"# {title}", "", *_table(COLUMNS, rows(found)), "", "95 % intervals over prompts in brackets.", ""]
    for name, s in found["sets"].items():
        more = [f"pass@{_j(n)} {_cell(i)}" for n, i in s["intervals"].items() if n.startswith(PASS)]
        more += [f"{n[len('part/') :]} {v:.3f}" for n, v in s.items() if n.startswith("part/")]
        lines += [f"- {name}: {', '.join(more)}"] if more else []
    failures = found["failures"]
    if failures:
        lines += ["", f"{len(failures)} answers have no reward and count nowhere:", ""]
        lines += [f"- {line}" for line in reasons(failures)]
    return "\n".join(lines) + "\n"


def reasons(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why answers have no reward, by set, the most frequent first, in at most REASONS lines.

    Errors that differ in numbers only are one reason, which is written as the first of them.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for failure in failures:
        groups.setdefault((failure["set"], re.sub(r"\d+", "0", _one_line(failure["error"]))), []).append(failure)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    shown = ordered if len(ordered) <= REASONS else ordered[: REASONS - 1]
    lines = [f"{len(f)} x {name}: {_one_line(f[0]['error'])} ({f[0]['prompt_id']})" for (name, _), f in shown]
    if rest := ordered[len(shown) :]:
        lines.append(f"{sum(len(f) for _, f in rest)} x {len(rest)} other reasons")
    return lines


def drawn(found: Mapping[str, Any], title: str, width: int) -> list[Table]:
    """For a terminal of that width: a measure in each row, a set in each column, in as many tables as it takes."""
    names = list(found["sets"])
    at_once = max(1, (width - LABEL) // CELL)
    tables = []
    for first in range(0, len(names), at_once):
        some = names[first : first + at_once]
        table = Table(title=title if not first else None, title_justify="left")
        table.add_column("")
        for name in some:
            table.add_column(name, justify="right", overflow="fold")
        for label, cells in _measures({name: found["sets"][name] for name in some}):
            table.add_row(label, *cells)
        tables.append(table)
    return tables


def _measures(sets: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """(label, a cell per set) of all that at least one of these sets has."""

    def line(label: str, cell: Callable[[Mapping[str, Any]], str]) -> tuple[str, list[str]]:
        return label, [cell(s) for s in sets.values()]

    def interval(label: str, name: Callable[[int], str]) -> tuple[str, list[str]]:
        return line(label, lambda s: _cell(s["intervals"].get(name(s["asked"]["samples"]))))

    passes = sorted({_j(n) for s in sets.values() for n in s["intervals"] if n.startswith(PASS)})
    parts = sorted({n for s in sets.values() for n in s if n.startswith("part/")})
    lines = [
        line("prompts", lambda s: f"{s['prompts']:.0f}"),
        line("answers", lambda s: f"{s['count']:.0f}"),
        line("samples k", lambda s: str(s["asked"]["samples"])),
        interval("avg@k", lambda k: f"avg_at_{k}"),
        *(interval(f"pass@{j}", lambda k, j=j: f"{PASS}{j}") for j in passes if j > 1),  # type: ignore[misc]
        interval("maj@k", lambda k: f"maj_at_{k}"),
        interval("greedy", lambda k: "greedy"),
        line("length", lambda s: f"{s['length']:.1f}" if "length" in s else "-"),
        line("truncated", lambda s: _share(s, "truncated")),
        line("no answer", lambda s: _share(s, "no_answer")),
        *(line(n[len("part/") :], lambda s, n=n: f"{s[n]:.3f}" if n in s else "-") for n in parts),  # type: ignore[misc]
        line("failed", lambda s: str(s["failed"])),
    ]
    return [(label, cells) for label, cells in lines if set(cells) != {"-"}]


def write(out: Path, found: Mapping[str, Any], about: Mapping[str, Any], title: str) -> None:
    """Both files, each at once."""
    for name, text in (
        (JSON, json.dumps({**about, **found}, indent=1, allow_nan=False) + "\n"),
        (MARKDOWN, markdown(found, title)),
    ):
        aside = out / f"{name}.part"
        aside.write_text(text, encoding="utf-8")
        aside.replace(out / name)


def _answer(record: Record) -> Answer:
    return Answer(
        record["prompt_id"], record["sample"], record["greedy"], float(record["reward"]), record["tokens"],
        record["finish_reason"] == "length", record["extracted"], record["parts"],
    )  # fmt: skip


def _interval(e: Estimate) -> dict[str, float | int | None]:
    """As JSON: what is not known is null."""
    return {k: v if math.isfinite(v) else None for k, v in e._asdict().items()}


def _cell(interval: Mapping[str, Any] | None) -> str:
    """A value with its interval, or a dash for what was not asked."""
    if interval is None:
        return "-"
    value = f"{interval['value']:.3f}"
    return value if interval["low"] is None else f"{value} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _j(name: str) -> int:
    """Of pass_at_<j>."""
    return int(name[len(PASS) :])


def _share(values: Mapping[str, Any], name: str) -> str:
    return f"{100 * values[name]:.1f}%" if name in values else "-"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
