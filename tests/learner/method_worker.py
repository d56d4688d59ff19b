"""Trains one take of two updates with every method and saves what rank 0 sees.

Usage: method_worker.py NUMBER SIZE PORT MODEL_DIR OUT_FILE, once for each of SIZE processes.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from asyncrl.algos.registry import CORRECTIONS, SURROGATES
from asyncrl.config import validate
from asyncrl.learner.batch import rows_of
from asyncrl.learner.publish import host_copy
from asyncrl.learner.records import update_scalars
from asyncrl.learner.reference import open_reference
from asyncrl.learner.shard import build_policy, init_world
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update, score_take
from asyncrl.models.describe import describe
from asyncrl.process import end
from tests.learner.groups import make_groups

METHODS = {
    **{f"surrogate {name}": {"surrogate": name, "correction": {"kind": "none"}} for name in SURROGATES},
    **{f"correction {name}": {"correction": {"kind": name}} for name in CORRECTIONS},
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "tis by response": {"correction": {"kind": "tis", "level": "sequence"}},
    "r2": {"routes": "r2"},
    "r3": {"routes": "r3", "correction": {"kind": "none"}},
    "gspo on r2": {"surrogate": "gspo", "aggregation": "sequence_mean", "routes": "r2", "correction": {"kind": "none"}},
    # The second rank has no response at all.
    "r2 alone": {"routes": "r2"},
    "rspo alone": {"correction": {"kind": "rspo"}},
    "kl alone": {"kl": {"coef": 0.1}},
}


def batches_of(info):
    """Two batches of four groups. Rollout log-probs of every other group are missing: their ratio to mu is 1, and no
    correction touches them. Those of the others are far above what the policy gives: mask and trm leave them out."""
    out = []
    for seed in (1, 2):
        groups = make_groups(info, 4, 4, seed)
        for g in (0, 2):
            bare = [replace(t, logprobs=np.full_like(t.logprobs, np.nan)) for t in groups[g].trajectories]
            groups[g] = replace(groups[g], trajectories=tuple(bare))
        out.append([replace(g, group_id=f"{seed}/{g.group_id}", trajectories=named(g, seed)) for g in groups])
    return out


def named(group, seed):
    """Ids that differ between batches, and rewards that differ in every group."""
    return tuple(
        replace(t, trajectory_id=f"{seed}/{t.trajectory_id}", reward=float(i == 0) + i / 8)
        for i, t in enumerate(group.trajectories)
    )


def train(model_dir, name, world):
    """Weights after the take, and the scalars of its updates."""
    config = validate(
        {
            "model": {"path": model_dir, "dtype": "float64", "experts": "eager"},
            "learner": {"lr": 1e-2, "warmup_updates": 0, "weight_decay": 0.0},
            "staleness": {"sync_every": 1, "updates_per_take": 2},
            "algorithm": {**METHODS[name], "native_drift_every": 0, "rdc": {"mode": "off"}},
        }
    )
    policy = build_policy(config.model, config.learner, config.algorithm.replays, world)
    reference = open_reference(config, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    info = describe(model_dir)
    first = name.endswith("alone")
    shares = [
        (b if world.rank == 0 else []) if first else b[world.rank :: world.size] for b in batches_of(info)
    ]  # fmt: skip
    state = score_take(policy, rows_of([g for s in shares for g in s], 0, 0, info), config, info, world)
    results = []
    for u, mine in enumerate(shares):
        rows = rows_of(mine, u, 0, info)
        out = run_update(policy, updater, rows, u, 0.0, state, config, info, world, reference=reference)
        results.append({"outcome": out.step.outcome, "loss": out.step.loss, **update_scalars(out, info)})
    return {"weights": host_copy(policy, world), "updates": results}


def main() -> None:
    rank, size, port, model_dir, out = sys.argv[1:6]
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    world = init_world(120, "cpu")
    results = {name: train(model_dir, name, world) for name in METHODS}
    if world.rank == 0:
        torch.save(results, Path(out))


if __name__ == "__main__":
    main()
    # As a role ends: gloo's threads may abort a process that takes itself apart.
    end(0)
