"""A save that kills its process with SIGKILL before one line of the code that saves, on whichever thread that runs.

Usage: killed_save.py MODEL RUN LINE. Fills the output matrix with 4.0 and saves that as update 4. Ends with 0 when it
was done before LINE lines had run.
"""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from asyncrl.learner import checkpoint, shards, stored

TRACED = {checkpoint.__file__, shards.__file__, stored.__file__, shutil.__file__}


def at_each_line(act):
    """Call act(n) before the n-th line of that code, of all threads that begin from now on and of this one."""
    seen, turn = [0], threading.RLock()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            with turn:
                seen[0] += 1
                act(seen[0])
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def stop():
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]


def main(model, run, line):
    import torch
    import torch.distributed as dist

    from asyncrl.config import validate
    from asyncrl.learner.shard import World, build_policy
    from asyncrl.learner.step import Updater
    from asyncrl.process import end

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{run}.store-{line}", rank=0, world_size=1)
    world = World(0, 1, torch.device("cpu"))
    settings = validate({"model": {"path": model}})
    policy = build_policy(settings.model, settings.learner, False, world)
    updater = Updater(policy, settings.learner, settings.algorithm, world)
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(4.0)
    shards.BLOCK = 1 << 14

    def kill(number):
        if number == line:
            os.kill(os.getpid(), signal.SIGKILL)

    at_each_line(kill)
    saved = checkpoint.Checkpoints(Path(run), "f", 1, world).save(policy, updater, stored.Progress(0, 4, 4, 0.0))
    stop()
    end(0 if saved else 3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
