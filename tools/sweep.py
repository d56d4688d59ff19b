"""Run a config with several seeds, one after the other, then print the table of tools/compare.py.

Usage: python tools/sweep.py NAME SEEDS CONFIG... [KEY=VALUE...]
SEEDS is a comma list. Runs are named NAME-sSEED; one that is already there is not run again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from compare import main as compare

from asyncrl.cli import read


def main() -> int:
    """Returns the number of runs that failed."""
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    name, seeds, *arguments = sys.argv[1:]
    folder = Path(read(arguments).run.dir)
    failed, folders = 0, []
    for seed in seeds.split(","):
        run = f"{name}-s{int(seed)}"
        folders.append(folder / run)
        if (folder / run / "model").is_dir():
            continue
        command = [sys.executable, "-m", "asyncrl", "run", *arguments, f"run.name={run}", f"run.seed={seed}"]
        failed += subprocess.run(command, check=False).returncode != 0
    sys.argv[1:] = [str(f) for f in folders if (f / "metrics.jsonl").exists()]
    compare()
    return failed


if __name__ == "__main__":
    sys.exit(main())
