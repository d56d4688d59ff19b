"""Print one line per run folder: accuracy before and after, KL, F(2), lag and what the run cost.

    python tools/compare.py RUN_DIR [RUN_DIR ...]

Means are over the last 10 updates; "max lag" and "overlap" are over the whole run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from asyncrl.metrics.sink import read_jsonl, timeline

LAST = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table for the folders in `arguments` (default: the command line). Returns 1 when one is no run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", metavar="RUN_DIR", nargs="+", type=Path, help="a run folder, such as runs/quickstart"
    )
    status = 0
    found = []
    for folder in parser.parse_args(arguments).folders:
        if (folder / "metrics.jsonl").is_file():
            found.append(folder)
        else:
            print(f"{folder}: no metrics.jsonl; not a run folder, or stopped before its first update", file=sys.stderr)
            status = 1
    if found:
        print_table(found)
    return status


def print_table(folders: Sequence[Path]) -> None:
    """One line per run, as Markdown."""
    head = (
        "run",
        "updates",
        "acc 0",
        "acc last",
        "greedy",
        "kl_k3",
        "F(2)",
        "grad",
        "lag",
        "max lag",
        "drift",
        "drift>0",
        "overlap",
    )
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for folder in folders:
        print("| " + " | ".join(row(folder)) + " |")


def row(folder: Path) -> list[str]:
    """The cells of one run."""
    records = timeline(read_jsonl(folder / "metrics.jsonl"))
    updates = [r for r in records if "policy/reward" in r]
    evals = sorted((r for r in records if "eval/sampled_accuracy" in r), key=lambda r: r["update"])
    tail = updates[-LAST:]
    cells = [folder.name, str(len(updates))]
    cells += [f"{e['eval/sampled_accuracy']:.3f}" for e in (evals[0], evals[-1])] if evals else ["-", "-"]
    cells.append(f"{evals[-1].get('eval/greedy_accuracy', math.nan):.3f}" if evals else "-")
    for key in ("mismatch/kl_k3", "mismatch/f_2", "optim/grad_norm"):
        cells.append(f"{mean(tail, key):.4f}")
    cells.append(f"{mean(updates, 'staleness/lag_mean'):.2f}")
    cells.append(f"{max((r.get('staleness/lag_max', 0) for r in updates), default=math.nan):.0f}")
    cells += [f"{mean(tail, 'drift/mean'):.4f}", f"{mean(updates, 'drift/nonzero_fraction'):.2f}"]
    cells.append(f"{mean(updates[-1:], 'throughput/overlap_fraction'):.2f}")
    return cells


def mean(records: list[dict[str, float]], key: str) -> float:
    """Mean of a metric over the records that have it."""
    values = [r[key] for r in records if key in r and math.isfinite(r[key])]
    return fmean(values) if values else math.nan


if __name__ == "__main__":
    sys.exit(main())
