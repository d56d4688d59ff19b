"""A run in which any process may be killed, frozen or cut off at any time, and the proof that nothing was lost.

    python tools/chaos.py --minutes 10 --seed 1        # the quickstart's model; `make model` builds it
    python tools/chaos.py --verify runs/chaos-1        # prove a finished run again

Starts the roles by their ordinary commands, with a proxy between replay and everybody else; see docs/testing.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from chaos_lib import faults
from chaos_lib.evidence import load
from chaos_lib.run import play
from chaos_lib.stage import Plan
from chaos_lib.verify import table, verify

ROOT = Path(__file__).parents[1]

SETTINGS = {
    "task.train_size": 512,
    "task.eval_size": 64,
    "algorithm.groups_per_update": 16,
    "generator.groups_in_flight": 16,
    "learner.checkpoint_every": 4,
    "replay.heartbeat_timeout_s": 8,
    "replay.lease_timeout_s": 60,
    "replay.capacity_bytes": 150_000,
    "run.shutdown_s": 20,
}
"""The quickstart, with data epochs that end within the run and a cap that is felt."""


def main(words: list[str] | None = None) -> int:
    """Play and prove. Returns 0 when every claim holds, 1 else."""
    options = parse(words)
    if options.verify:
        return judge(Path(options.verify))
    settings = SETTINGS | {
        "run.seed": options.seed,
        "run.name": options.name or f"chaos-{options.seed}",
        "run.dir": options.dir,
        "weights.carrier": options.carrier or ("shm", "zmq")[options.seed % 2],
        "generator.count": options.generators,
    }
    settings |= dict(word.partition("=")[::2] for word in options.change)
    plan = Plan(
        [str(ROOT / "configs/quickstart.yaml")],
        settings,
        options.minutes * 60,
        options.seed,
        faults.CARDS,
        faults.Pace(),
        generators=options.generators,
        spare=frozenset(options.spare),
    )
    return judge(play(plan))


def judge(run_dir: Path) -> int:
    """Print the proof of a finished run; 0 when every claim holds."""
    lines = verify(load(run_dir))
    text = table(lines)
    (run_dir / "chaos" / "proof.txt").write_text(text + "\n")
    broken = sum(not line.ok for line in lines)
    print(text)
    print(f"{run_dir}: {len(lines) - broken} of {len(lines)} claims hold" + f", {broken} FAILED" * bool(broken))
    return int(broken > 0)


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults come; the run ends after them")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and of the run")
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--carrier", choices=("shm", "zmq"), help="of the weights; default: shm for even seeds")
    parser.add_argument(
        "--spare", action="append", default=[], help="leave a role alone: replay, generator, learner, rank"
    )
    parser.add_argument("--dir", default="runs", help="where the run's folder is made")
    parser.add_argument("--name", default="", help="of the run; default: chaos-SEED")
    parser.add_argument("--verify", metavar="RUN", help="only prove this finished run")
    parser.add_argument("change", nargs="*", metavar="KEY=VALUE", help="changes of the config")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
