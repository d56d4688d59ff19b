"""What workers have in common that run specs in process groups of several sizes and save what rank 0 sees.

Usage of such a worker: WORKER.py NUMBER MODEL_DIR OUT_DIR SPECS.json, once for each process; those of a smaller group
serve in the larger ones too, so that torch is imported once. SPECS has `ports`, where the ranks of each world size
meet, and `specs` by name, each with its `worlds`. Results go to OUT_DIR/WORLD/NAME.pt.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.learner.shard import init_world
from asyncrl.process import end


def serve(number, world_size, port, model_dir, out, specs, run):
    """All specs of one world size, in a process group of their own."""
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(number), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    world = init_world(120, "cpu")
    for name, spec in specs.items():
        if world_size in spec["worlds"]:
            result = run(model_dir, spec, world)
            if world.rank == 0:
                torch.save(result, out / str(world_size) / f"{name}.pt")
    dist.destroy_process_group()


def main(run) -> None:
    """run(model_dir, spec, world) gives the result of a spec. Ends the process."""
    number, model_dir, out, file = int(sys.argv[1]), *sys.argv[2:5]
    torch.set_num_threads(1)
    given = json.loads(Path(file).read_text())
    for size, port in given["ports"].items():
        if number < int(size):
            serve(number, int(size), port, model_dir, Path(out), given["specs"], run)
    # As a role ends: gloo's threads may abort a process that takes itself apart.
    end(0)
