"""Ranks that train on synthetic groups, save, are killed, and load: every scenario in real processes on gloo.

Usage: checkpoint_worker.py RANK SCENARIOS.json, once for each rank. Scenarios run one after the other, each in a
process group of its own. Update u trains the groups of seed u. A scenario is a mapping:

  world, port, model, run, base        how many ranks, where they meet, model folder, run folder and YAML file
  overrides                            key=value settings
  load                                 begin at the newest checkpoint
  to                                   train up to this update
  save                                 updates after which a checkpoint is begun
  background                           false: wait for every checkpoint
  faults                               {"kill": u, "full": u, "blind": true}: rank 1 is killed while it writes the
                                       checkpoint of u; its disk is full then; it sees other files when it loads
  out                                  gets what rank 0 knows at the end
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch

from asyncrl.config import load_config
from asyncrl.learner import checkpoint, shards, stored
from asyncrl.learner.batch import rows_of
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.shard import build_policy, init_world
from asyncrl.learner.step import Updater
from asyncrl.learner.stored import Progress
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from asyncrl.process import end
from tests.learner.groups import make_groups


def whole(policy, updater):
    tensors = {n: p.detach() for n, p in policy.named_parameters()} | updater.state()
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in tensors.items()}


def blind():
    """This rank's listings are those of a disk that lags behind."""
    stored.names = lambda folder: ["u999"]
    Path.exists = lambda self: False


def killed_in_its_write():
    def die(handle):
        os.kill(os.getpid(), signal.SIGKILL)

    shards.os.fsync = die


def scenario(spec, world):
    config = load_config(spec["base"], [f"model.path={spec['model']}", *spec.get("overrides", [])])
    info = describe(spec["model"])
    policy = build_policy(config.model, config.learner, config.algorithm.routes == "r3", world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    checkpoints = Checkpoints(Path(spec["run"]), "f", spec.get("keep", 2), world, 60.0)
    faults = spec.get("faults", {}) if world.rank == 1 else {}
    torch.manual_seed(world.rank)
    out = {"lr": [], "loaded": None, "saved": [], "random": [], "sealed_at": {}}
    progress = Progress(0, 0, 0, 0.0)
    if spec.get("load"):
        if "blind" in faults:
            blind()
        progress = checkpoints.load(policy, updater)
        out["loaded"] = whole(policy, updater)
    carry, start = progress.carry, progress.update
    out["from"], out["carries"] = start, [carry]
    for u in range(start, spec["to"]):
        groups = make_groups(info, 5, 4, seed=u, version=u)
        rows = rows_of(groups[world.rank :: world.size], u, u - config.staleness.max_lag, info)
        drawn = torch.get_rng_state()
        outcome = run_update(policy, updater, rows, u, carry, None, config, info, world)
        assert outcome.step.outcome == "stepped"
        assert torch.equal(torch.get_rng_state(), drawn), "an update drew a random number"
        carry = outcome.selection.carry
        out["carries"].append(carry)
        out["lr"].append(outcome.step.lr)
        out["random"].append(float(torch.rand(())))
        was = checkpoints.newest
        checkpoints.settle()
        if checkpoints.newest != was:
            out["sealed_at"][checkpoints.newest] = u + 1
        if u + 1 in spec.get("save", []):
            if faults.get("kill") == u + 1:
                killed_in_its_write()
            size = resource.getrlimit(resource.RLIMIT_FSIZE)
            if faults.get("full") == u + 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, size[1]))
            saved = checkpoints.begin(policy, updater, Progress(0, u + 1, u + 1, carry))
            if not spec.get("background", True):
                saved = checkpoints.settle(60.0)
            resource.setrlimit(resource.RLIMIT_FSIZE, size)
            out["saved"].append(saved)
    checkpoints.settle(60.0)
    out |= {"end": whole(policy, updater), "newest": checkpoints.newest, "failures": checkpoints.failures}
    out |= {"stood_s": checkpoints.stood_s, "write_s": checkpoints.write_s}
    if world.rank == 0:
        torch.save(out, spec["out"])


def rank(spec, number):
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": str(spec["world"]), "LOCAL_RANK": str(number), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(spec["port"]),
    }  # fmt: skip
    world = init_world(60, "cpu")
    scenario(spec, world)
    torch.distributed.destroy_process_group()


def main(number, file):
    torch.set_num_threads(1)
    # Many slices, of which the ranks need different numbers.
    checkpoint._SLICE_S, shards.BLOCK = 0.0, 4096 * (1 + number)
    for spec in json.loads(Path(file).read_text()):
        if number < spec["world"]:
            rank(spec, number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    # As a role ends: gloo's threads may abort a process that takes itself apart.
    end(0)
