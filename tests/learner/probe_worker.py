"""One update with and one without probes on rank 0, from the same weights; and the probes as an ordinary batch.

Usage (under torchrun): probe_worker.py MODEL_DIR OUT_DIR. Every rank writes OUT_DIR/<rank>.json.
"""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from asyncrl.config import validate
from asyncrl.learner.batch import rows_of
from asyncrl.learner.probing import score_probes
from asyncrl.learner.shard import build_policy, init_world
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from tests.learner.groups import make_groups


def settings(model_dir, routes):
    return validate(
        {
            "model": {"path": model_dir},
            "algorithm": {"routes": routes, "rdc": {"q": 0.2}},
            "learner": {"micro_batch_tokens": 128, "warmup_updates": 0},
        }
    )


def made(config, world):
    torch.manual_seed(0)
    policy = build_policy(config.model, config.learner, config.algorithm.routes == "r3", world)
    return policy, Updater(policy, config.learner, config.algorithm, world)


def step(config, info, world, groups, probes):
    """An update at 3 and what the probes before it gave; a hash of all weights after it."""
    policy, updater = made(config, world)
    mine = probes if world.is_writer else []
    scored = score_probes(policy, mine, 3, -5, config, info, world)
    rows = rows_of(groups[world.rank :: world.size], 3, -5, info)
    outcome = run_update(policy, updater, rows, 3, 0.0, None, config, info, world)
    found = hashlib.sha256()
    for tensor in policy.parameters():
        found.update(tensor.detach().to_local().contiguous().numpy().tobytes())
    return scored, outcome, found.hexdigest()


def check(model_dir, routes, world):
    config, info = settings(model_dir, routes), describe(model_dir)
    groups = make_groups(info, 8, 4, 0)
    named = [replace(g, group_id=f"probe/{i}", generator_id="bad") for i, g in enumerate(make_groups(info, 5, 4, 1))]
    with_probes, outcome, weights = step(config, info, world, groups, named)
    none, plain, same = step(config, info, world, groups, [])
    _, batch, _ = step(config, info, world, named, [])
    out = {"weights": [weights, same], "none": none is None, "rows": len(with_probes)}
    out["table"] = [outcome.table.names == plain.table.names, len(outcome.table)]
    out["columns"] = all(np.array_equal(outcome.table[c], plain.table[c], equal_nan=True) for c in plain.table.columns)
    order = {name: i for i, name in enumerate(batch.table.names)}
    at = [order[name] for name in with_probes.names]
    names = ("drift", "abs_log_ratio", "tokens", "lag_sum")
    out["apart"] = (
        max((float(np.abs(with_probes[c] - batch.table[c][at]).max()) for c in names), default=0.0) if at else 0
    )
    return out


def main(model_dir, out):
    torch.set_num_threads(1)
    world = init_world(120.0)
    results = {routes: check(model_dir, routes, world) for routes in ("native", "r3")}
    (Path(out) / f"{world.rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
