"""Print one line per run folder: accuracy before and after, KL, F(2), lag and what the run cost.

Usage: python tools/compare.py RUN_DIR [RUN_DIR ...]
Means are over the last 10 updates; "max lag" and "overlap" are over the whole run.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import fmean

from asyncrl.metrics.sink import read_jsonl

LAST = 10


def main() -> None:
    """Print the table for the folders named on the command line."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
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
    for folder in map(Path, sys.argv[1:]):
        print("| " + " | ".join(row(folder)) + " |")


def row(folder: Path) -> list[str]:
    """The cells of one run."""
    records = read_jsonl(folder / "metrics.jsonl")
    updates = [r for r in records if "policy/reward" in r]
    evals = sorted((r for r in records if "eval/sampled_accuracy" in r), key=lambda r: r["update"])
    tail = updates[-LAST:]
    cells = [folder.name, str(len(updates))]
    cells += [f"{e['eval/sampled_accuracy']:.3f}" for e in (evals[0], evals[-1])] if evals else ["-", "-"]
    cells.append(f"{evals[-1].get('eval/greedy_accuracy', math.nan):.3f}" if evals else "-")
    for key in ("mismatch/kl_k3", "mismatch/f_2", "optim/grad_norm"):
        cells.append(f"{mean(tail, key):.4f}")
    cells.append(f"{mean(updates, 'staleness/lag_mean'):.2f}")
    cells.append(f"{max(r.get('staleness/lag_max', 0) for r in updates):.0f}")
    cells += [f"{mean(tail, 'drift/mean'):.4f}", f"{mean(updates, 'drift/nonzero_fraction'):.2f}"]
    cells.append(f"{updates[-1].get('throughput/overlap_fraction', math.nan):.2f}")
    return cells


def mean(records: list[dict[str, float]], key: str) -> float:
    """Mean of a metric over the records that have it."""
    values = [r[key] for r in records if key in r and math.isfinite(r[key])]
    return fmean(values) if values else math.nan


if __name__ == "__main__":
    main()
