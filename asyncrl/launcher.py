"""torchrun for a learner: dies with a supervising parent, and ends in order when it is told to.

`python -m asyncrl.launcher TORCHRUN_ARGUMENTS`
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

from asyncrl.parent import die_with_parent
from asyncrl.process import end

STANDALONE = ("--standalone", "--local-addr", "127.0.0.1")
"""torchrun for the ranks of one host. The address spares a look-up of the host's name, which may mean nothing."""


def main() -> int:
    """Run torchrun. Returns 128 + n after signal n, to it or to a rank, and 1 after an error of a rank."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if os.environ.get("ASYNCRL_SUPERVISED") == "1":
        die_with_parent()
    try:
        torchrun()
    except SignalException as exc:
        print(f"learner: stopped by signal {exc.sigval.value}", file=sys.stderr)
        return 128 + int(exc.sigval.value)
    except ChildFailedError as exc:
        codes = {rank: failure.exitcode for rank, failure in sorted(exc.failures.items())}
        print(f"learner: exit statuses by rank: {codes}", file=sys.stderr)
        return status_of(codes.values())
    return 0


def status_of(exit_codes: Iterable[int]) -> int:
    """One status for several ranks: 128 + n when one was killed by signal n, 2 when one refused the config, else 1.

    A killed rank makes the others fail as well, and torchrun ends what is left with SIGTERM.
    """
    codes = list(exit_codes)
    signals = [-c if c < 0 else c - 128 for c in codes if c < 0 or c > 128]
    # That of torchrun says nothing when another rank ended by itself.
    first = [n for n in signals if n != signal.SIGTERM] or (signals if len(signals) == len(codes) else [])
    if first:
        return 128 + first[0]
    return 2 if 2 in codes else 1


if __name__ == "__main__":
    end(main())
