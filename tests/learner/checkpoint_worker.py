"""Trains on synthetic groups in every rank of a torchrun, and saves or loads a checkpoint on the way.

Usage (under torchrun): checkpoint_worker.py MODEL_DIR BASE_YAML RUN_DIR OUT save|load. Update u trains the groups of
seed u. save: 3 updates, a checkpoint, 3 more. load: the checkpoint, 3 more. OUT gets the state then and at the end.
"""

import sys
from pathlib import Path

import torch

from asyncrl.config import load_config
from asyncrl.learner import checkpoint
from asyncrl.learner.batch import rows_of
from asyncrl.learner.checkpoint import Checkpoints, Progress
from asyncrl.learner.shard import build_policy, init_world
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from tests.learner.groups import make_groups


def whole(policy, updater):
    tensors = {n: p.detach() for n, p in policy.named_parameters()} | updater.state()
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in tensors.items()}


def main():
    model_dir, base, run_dir, out, mode = sys.argv[1:6]
    torch.set_num_threads(1)
    world = init_world(60)
    # Many slices, of which the ranks need different numbers.
    checkpoint._SLICE_S, checkpoint._BLOCK = 0.0, 4096 * (1 + world.rank)
    config = load_config(base, [f"model.path={model_dir}"])
    info = describe(model_dir)
    policy = build_policy(model_dir, config.model.dtype, "sdpa", config.model.experts, 64, False, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    checkpoints = Checkpoints(Path(run_dir), "f", 2, world)
    carry, start, states = 0.0, 0, []
    if mode == "load":
        progress = checkpoints.load(policy, updater)
        carry, start = progress.carry, progress.update
        states.append(whole(policy, updater))
    drawn = torch.get_rng_state()
    for u in range(start, 6):
        if mode == "save" and u == 3:
            states.append(whole(policy, updater))
            assert checkpoints.save(policy, updater, Progress(0, 3, 4, carry))
        groups = make_groups(info, 5, 4, seed=u, version=u)
        rows = rows_of(groups[world.rank :: world.size], u, u - config.staleness.max_lag, info)
        outcome = run_update(policy, updater, rows, u, carry, None, config, info, world)
        assert outcome.step.outcome == "stepped"
        carry = outcome.selection.carry
    states.append(whole(policy, updater))
    assert torch.equal(torch.get_rng_state(), drawn), "an update drew a random number: checkpoints must save the state"
    if world.rank == 0:
        torch.save({"states": states, "carry": carry}, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
