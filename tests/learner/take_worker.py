"""Takes in every rank of a torchrun whose collectives may take 10 s. Usage: take_worker.py ADDRESS_FILE OUT_DIR"""

import os
import sys
import time
from pathlib import Path

import torch

from asyncrl.learner.client import ReplayClient
from asyncrl.learner.shard import init_world
from asyncrl.learner.taking import take_together
from asyncrl.types import ModelInfo


def meet(out, num_ranks=2, limit_s=120.0):
    """Waits until every rank has imported what it needs, at most limit_s: on a busy host that takes some longer."""
    (out / f"ready-{os.environ['RANK']}").touch()
    deadline = time.monotonic() + limit_s
    while len(list(out.glob("ready-*"))) < num_ranks:
        assert time.monotonic() < deadline, "the other rank never came"
        time.sleep(0.05)


def main():
    file, out = Path(sys.argv[1]), Path(sys.argv[2])
    meet(out)
    world = init_world(10, "cpu")
    client = ReplayClient(file, world.rank, ModelInfo((0, 1), 8, 2, 32, "f00d"), 60.0)
    shard = take_together(client, 0, 1, world, 300.0, 10.0)
    (out / str(world.rank)).write_text(str(shard.bounds))
    client.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
