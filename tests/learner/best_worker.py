"""Two ranks that publish and keep the best policy. Usage: best_worker.py RANK PORT RUN MODEL."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.config import validate
from asyncrl.learner.best import Best
from asyncrl.learner.publishing import Due, Publishing
from asyncrl.learner.shard import build_policy, init_world
from asyncrl.process import end
from asyncrl.types import Version


class Told:
    """A publisher that writes nothing."""

    def __init__(self):
        self.counters = {}

    def publish(self, version, weights):
        return f"source of {version}"

    def close(self):
        pass


def main() -> None:
    rank, port, run, model = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world = init_world(120, "cpu")
    run_dir, metric = Path(run), "eval/greedy_accuracy"
    config = validate(
        {
            "run": {"dir": str(run_dir.parent), "name": run_dir.name}, "model": {"path": model},
            "learner": {"keep_best": metric, "updates": 20}, "eval": {"every": 10},
        }
    )  # fmt: skip
    policy = build_policy(config.model, config.learner, False, world)
    publishing = Publishing(Told() if world.is_writer else None, world, Due(5, 8), 60.0, lambda *_: None)
    best = Best(config, 0, 0, False) if world.is_writer else None
    publishing.keeper = best
    for update, value in ((0, 0.1), (5, 0.9), (10, 0.5), (20, 0.3)):
        publishing.publish_if_due(policy, Version(0, update), update, 8)
        if best is not None and update != 5:  # which is not evaluated
            best.measured(Version(0, update), {metric: value}, True)
            assert best._job is None or best._job.done.wait(60)
            best.settle(update)
        if update == 5:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.to_local().add_(1.0)
        if update == 10:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.to_local().add_(1.0)
    if best is not None:
        best.finish()
    dist.barrier()
    dist.destroy_process_group()
    end(0)


if __name__ == "__main__":
    main()
