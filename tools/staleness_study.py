"""Does filtering by router drift pay? Training runs and a gradient probe at the scale of a small machine.

    python tools/staleness_study.py train --dry-run                    # the cells, and the CPU time they will take
    python tools/staleness_study.py train --jobs 2                     # 6 methods x 2 regimes x 4 seeds
    python tools/staleness_study.py train --methods tis,rdc_tis --regimes async8 --seeds 1,2 --precisions fp8
    python tools/staleness_study.py probe --jobs 2                     # gradients under each filter, in one process
    python tools/staleness_study.py report --docs docs                 # tables, curves, docs/study.html

Each part goes on where it was stopped: finished cells are not run again, and what was cut off is run anew.
Runs lie in --dir (runs/study). docs/study.md says what came out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from study.plan import FLEETS, METHODS, PRECISIONS, REGIMES, Cell, PlanError, Size, cells
from study.runs import carry_out

DEFAULT_METHODS = "grpo,r3,tis,rdc_tis,random_tis,log_ratio_tis,behaviour"


def main(words: list[str] | None = None) -> int:
    """Returns 0, 1 when a cell failed, 2 for a selection that cannot be."""
    given = _parser().parse_args(words)
    try:
        return int(given.part(given))
    except PlanError as exc:
        print(f"study: {exc}", file=sys.stderr)
        return 2


def train(given: argparse.Namespace) -> int:
    """Run the selected cells."""
    size = Size(lr=given.lr, q=given.q, eval_size=given.eval_size, updates=given.updates)
    chosen: list[Cell] = cells(given.methods, given.regimes, given.fleets, given.precisions, given.seeds)
    return carry_out(chosen, given.dir, size, given.jobs, given.dry_run)


def probe(given: argparse.Namespace) -> int:
    """Run the gradient probe."""
    from study.probing import run_probe  # torch

    return run_probe(given.dir, given.seeds, given.batches, given.jobs, given.dry_run)


def report(given: argparse.Namespace) -> int:
    """Write tables, curves and the page."""
    from study.report import write_report  # matplotlib

    return write_report(given.dir, given.docs)


def words_of(text: str) -> list[str]:
    """The words of a comma list."""
    return [word for word in text.split(",") if word]


def numbers_of(text: str) -> list[int]:
    """The numbers of a comma list. Raises argparse's error for anything else."""
    try:
        return [int(word) for word in words_of(text)]
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,2,3") from exc


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True, metavar="PART")
    one = parts.add_parser("train", help="real runs")
    one.set_defaults(part=train)
    one.add_argument("--methods", type=words_of, default=words_of(DEFAULT_METHODS), help=f"of {', '.join(METHODS)}")
    one.add_argument("--regimes", type=words_of, default=["async16", "batch_over_16"], help=f"of {', '.join(REGIMES)}")
    one.add_argument("--fleets", type=words_of, default=["healthy"], help=f"of {', '.join(FLEETS)}")
    one.add_argument("--precisions", type=words_of, default=["fp32"], help=f"of {', '.join(PRECISIONS)}")
    one.add_argument("--seeds", type=numbers_of, default=[1, 2, 3, 4], help="with commas between them")
    one.add_argument("--lr", type=float, default=Size().lr, help="learning rate of all cells (%(default)g)")
    one.add_argument("--q", type=float, default=Size().q, help="share that filters drop (%(default)g)")
    one.add_argument("--eval-size", type=int, default=Size().eval_size, help="held-out problems (%(default)d)")
    one.add_argument("--updates", type=int, default=0, help="of every cell; default: 100, 96 under batch_over_16")
    two = parts.add_parser("probe", help="cosine of filtered gradients with an on-policy gradient")
    two.set_defaults(part=probe)
    two.add_argument("--seeds", type=numbers_of, default=[1, 2, 3], help="weight trajectories")
    two.add_argument("--batches", type=int, default=8, help="batches per trajectory (%(default)d)")
    for part in (one, two):
        part.add_argument("--jobs", type=int, default=1, help="at a time (%(default)d)")
        part.add_argument("--dry-run", action="store_true", help="say what would run and what it costs")
    three = parts.add_parser("report", help="tables, curves, page")
    three.set_defaults(part=report)
    three.add_argument("--docs", type=Path, default=Path("docs"), help="folder for study.md and study.html")
    for part in (one, two, three):
        part.add_argument("--dir", type=Path, default=Path("runs/study"), help="where runs lie (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
