"""torchrun for a learner: dies with a supervising parent, and ends in order when it is told to.

`python -m asyncrl.launcher TORCHRUN_ARGUMENTS`
"""

from __future__ import annotations

import os
import sys

from asyncrl.process import die_with_parent


def main() -> int:
    """Run torchrun. Returns 128 + n after signal n instead of its traceback."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    if os.environ.get("ASYNCRL_SUPERVISED") == "1":
        die_with_parent()
    try:
        torchrun()
    except SignalException as exc:
        print(f"learner: stopped by signal {exc.sigval.value}", file=sys.stderr)
        return 128 + int(exc.sigval.value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
