"""Two ranks that train on synthetic groups and dump. Usage: dump_worker.py RANK PORT RUN MODEL."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.learner.shard import init_world
from asyncrl.process import end
from tests.helpers.dumped_run import settings, train


def main() -> None:
    rank, port, run_dir, model = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world = init_world(120, "cpu")
    train(settings(Path(run_dir), Path(model)), world, 3)
    dist.barrier()
    dist.destroy_process_group()
    end(0)


if __name__ == "__main__":
    main()
