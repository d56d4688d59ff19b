"""The learner role of a rank, which kills itself with SIGKILL behind a commit when KILL=RANK:BATCH is set.

Usage (under torchrun): killed_learner.py CONFIG. It dies when the journal of replay holds that batch, and before it
does anything else: what the host or the kernel's memory killer may do to it at any time.
"""

import os
import signal
import sys
import time

from asyncrl.config import load_config
from asyncrl.learner import loop
from asyncrl.replay.journal import FILE

WAIT_S = 120


class Mortal(loop.Learner):
    def _commit(self, take_id, outcome):
        super()._commit(take_id, outcome)
        rank, _, batch = os.environ.get("KILL", "").partition(":")
        if rank != str(self.world.rank) or int(batch) != self.batches - 1:
            return
        deadline = time.monotonic() + WAIT_S
        while f'"batch": {batch}}}' not in (self.run_dir / FILE).read_text():
            assert time.monotonic() < deadline, "rank 0 did not commit"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    config = load_config(sys.argv[1], [])
    loop.Learner = Mortal
    loop.run(config, config.run_dir)
