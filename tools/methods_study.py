"""Every method of configs/methods under lag: real runs, a table, and a curve for each.

    python tools/methods_study.py train --dry-run                       # the cells, and the CPU time they will take
    python tools/methods_study.py train --jobs 2                        # every method, 3 seeds
    python tools/methods_study.py train --methods gspo,gspo_tis --seeds 1
    python tools/methods_study.py report                                # docs/methods_study.md, docs/images/methods

The regime: new weights every 4 updates, max_lag 16, takes of 4 updates, so that pi_old differs from pi. A finished cell
is not run again. docs/methods_study.md says what came out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from staleness_study import numbers_of, words_of
from study.methods import LR, REGIME, by_method, ordered, write_page
from study.plan import PlanError, Size, cells
from study.results import read_all
from study.runs import carry_out


def main(words: list[str] | None = None) -> int:
    """Returns 0, 1 when a cell failed or there is nothing to report, 2 for a selection that cannot be."""
    given = _parser().parse_args(words)
    try:
        return int(given.part(given))
    except PlanError as exc:
        print(f"methods_study: {exc}", file=sys.stderr)
        return 2


def train(given: argparse.Namespace) -> int:
    """Run the selected cells."""
    size = Size(lr=given.lr, updates=given.updates)
    chosen = cells(given.methods, [given.regime], ["healthy"], ["fp32"], given.seeds)
    return carry_out(chosen, given.dir, size, given.jobs, given.dry_run)


def report(given: argparse.Namespace) -> int:
    """Write the tables and the curves."""
    from study.method_figures import write_figures  # matplotlib

    results = read_all(given.dir)
    methods = by_method(results)
    if not methods:
        print(f"methods_study: {given.dir} holds no finished cell of {REGIME}; run `train` first", file=sys.stderr)
        return 1
    page = given.docs / "methods_study.md"
    others = {} if given.second is None else {given.title: read_all(given.second)}
    write_page(results, page, others)
    figures = write_figures(methods, given.docs / "images/methods")
    print(f"{page}: {sum(map(len, methods.values()))} runs; {len(figures)} figures")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True, metavar="PART")
    one = parts.add_parser("train", help="real runs")
    one.set_defaults(part=train)
    one.add_argument("--methods", type=words_of, default=ordered(), help=f"of {', '.join(ordered())}")
    one.add_argument("--seeds", type=numbers_of, default=[1, 2, 3], help="with commas between them")
    one.add_argument("--regime", default=REGIME, help="of tools/study/plan.py (%(default)s)")
    one.add_argument("--lr", type=float, default=LR, help="learning rate of all cells (%(default)g)")
    one.add_argument("--updates", type=int, default=0, help="of every cell; default: 100")
    one.add_argument("--jobs", type=int, default=1, help="at a time (%(default)d)")
    one.add_argument("--dry-run", action="store_true", help="say what would run and what it costs")
    two = parts.add_parser("report", help="tables and curves")
    two.set_defaults(part=report)
    two.add_argument("--docs", type=Path, default=Path("docs"), help="folder of methods_study.md and images/methods")
    two.add_argument("--second", type=Path, help="where runs under other settings lie; the first table again")
    two.add_argument("--title", default="learning rate 4e-4", help="what is other there (%(default)s)")
    for part in (one, two):
        part.add_argument("--dir", type=Path, default=Path("runs/methods"), help="where runs lie (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
