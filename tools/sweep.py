"""Run a config with several seeds, one after the other, then print the table of tools/compare.py.

    python tools/sweep.py NAME SEEDS CONFIG... [KEY=VALUE...]
    python tools/sweep.py tis 1,2,3 configs/quickstart.yaml configs/methods/tis.yaml

Runs are named NAME-sSEED; one that is already finished is not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from compare import main as compare

from asyncrl.cli import read
from asyncrl.errors import ConfigError


def main() -> int:
    """Returns 0 when every run finished, 1 when one failed, 2 when nothing was started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="runs are named NAME-sSEED")
    parser.add_argument("seeds", metavar="SEEDS", type=seeds_of, help="whole numbers with commas between them: 1,2,3")
    parser.add_argument("arguments", metavar="CONFIG", nargs="+", help="and KEY=VALUE words, as for `asyncrl run`")
    given = parser.parse_args()
    try:
        folder = Path(read(given.arguments).run.dir)
    except ConfigError as exc:
        print(f"config error: {exc}", file=sys.stderr)
        return 2
    failed, folders = 0, []
    for seed in given.seeds:
        run = f"{given.name}-s{seed}"
        folders.append(folder / run)
        if (folder / run / "model").is_dir():
            continue
        if (folder / run).exists():
            # `asyncrl run` would take another name, and the table would show the old one.
            print(f"{folder / run} holds a run that did not finish; remove it to run it again", file=sys.stderr)
            failed += 1
            continue
        command = [sys.executable, "-m", "asyncrl", "run", *given.arguments, f"run.name={run}", f"run.seed={seed}"]
        failed += subprocess.run(command, check=False).returncode != 0
    return max(compare([str(f) for f in folders]), int(failed > 0))


def seeds_of(text: str) -> list[int]:
    """The numbers of a comma list. Raises argparse's error for anything else."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,2,3") from exc


if __name__ == "__main__":
    sys.exit(main())
