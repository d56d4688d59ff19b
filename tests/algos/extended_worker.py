"""Trains with a method that is not in this repository, for test_extending: in a process that imports a changed copy.

Usage: extended_worker.py COPY MODEL_DIR STORE key=value... Prints what came of two updates of one take as JSON, and the
loss of six tokens: `losses`, of one token each.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import asyncrl
from asyncrl.config import load_config
from asyncrl.learner.batch import rows_of
from asyncrl.learner.objective import LossSums, Tokens, Totals, batch_loss
from asyncrl.learner.shard import World, build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update, score_take
from asyncrl.models.describe import describe
from tests.learner.groups import make_groups


def losses(algorithm):
    """Loss of a token of ratio 1, 2 and 1/2 under advantage 1, and under -3; mu is pi_old."""
    found = []
    for advantage in (1.0, -3.0):
        for ratio in (1.0, 2.0, 0.5):
            old = torch.full((1, 1), -1.0)
            mask = torch.ones(1, 1, dtype=torch.bool)
            x = Tokens(old + math.log(ratio), old, old, torch.tensor([advantage]), mask)
            found.append(float(batch_loss(x, algorithm, Totals(1.0, 1.0, 1.0), LossSums())))
    return found


def updates(config, world):
    """Norm of the gradient and outcome of two updates of one take; in the second pi is not pi_old any more."""
    info = describe(config.model.path)
    policy = build_policy(config.model, config.learner, config.algorithm.routes == "r3", world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    batches = [rows_of(make_groups(info, 4, 4, seed), 0, 0, info) for seed in (1, 2)]
    # Ids are those of the groups' places; each batch keeps its own state.
    states = [score_take(policy, rows, config, info, world) for rows in batches]
    found = []
    for update, (rows, state) in enumerate(zip(batches, states, strict=True)):
        out = run_update(policy, updater, rows, update, 0.0, state, config, info, world)
        found.append((out.step.outcome, out.step.grad_norm))
    return found


def main(copy, model, store, *overrides):
    assert Path(asyncrl.__file__).is_relative_to(copy), f"imported from {asyncrl.__file__}"
    config = load_config(Path(copy) / "configs/quickstart.yaml", [f"model.path={model}", *overrides])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        made = updates(config, World(0, 1, torch.device("cpu")))
    finally:
        dist.destroy_process_group()
    print(json.dumps({"losses": losses(config.algorithm), "updates": made}))


if __name__ == "__main__":
    main(*sys.argv[1:])
