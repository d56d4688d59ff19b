"""Runs updates on synthetic groups in every rank of a torchrun and saves what rank 0 sees.

Usage (under torchrun): rank_worker.py MODEL_DIR OUT_DIR SPECS.json. SPECS maps a name to updates, groups,
group_size, base (a YAML file), overrides (list of key=value) and keep_first_rank (all groups on rank 0).
"""

import json
import sys
from pathlib import Path

import torch

from asyncrl.config import load_config
from asyncrl.learner.batch import rows_of
from asyncrl.learner.publish import host_copy
from asyncrl.learner.records import update_scalars
from asyncrl.learner.shard import build_policy, init_world
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from tests.learner.groups import make_groups


class Spy(Updater):
    """Keeps the whole gradient of every update as it is before clipping."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gradients = []

    def apply(self, update, sums):
        self.gradients.append(
            {n: p.grad.full_tensor().clone() for n, p in self._policy.named_parameters() if p.grad is not None}
        )
        return super().apply(update, sums)


def run(model_dir, spec, world):
    config = load_config(spec["base"], [f"model.path={model_dir}", *spec["overrides"]])
    info = describe(model_dir)
    replay = config.algorithm.routes == "r3"
    policy = build_policy(model_dir, config.model.dtype, "sdpa", config.model.experts, 64, replay, world)
    updater = Spy(policy, config.learner, config.algorithm, world)
    carry, results = 0.0, []
    for u in range(spec["updates"]):
        groups = make_groups(info, spec["groups"], spec["group_size"], seed=u, version=u)
        mine = groups[world.rank :: world.size] if not spec.get("keep_first_rank") else groups
        if spec.get("keep_first_rank") and world.rank:
            mine = []
        rows = rows_of(mine, u, u - config.staleness.max_lag, info)
        outcome = run_update(policy, updater, rows, u, carry, None, config, info, world)
        carry = outcome.selection.carry
        table = outcome.table
        results.append(
            {
                "keep": {i: bool(k) for i, k in zip(table.ids, outcome.keep, strict=True)},
                "drift": dict(zip(table.ids, table["drift"].tolist(), strict=True)),
                "k3": dict(zip(table.ids, table["k3"].tolist(), strict=True)),
                "advantage": dict(zip(table.ids, outcome.advantages.tolist(), strict=True)),
                "scalars": update_scalars(outcome, info),
                "outcome": outcome.step.outcome,
                "fused": outcome.fused,
                "forced": outcome.forced_fraction,
                "carry": carry,
            }
        )
    return {"results": results, "weights": host_copy(policy, world), "gradients": updater.gradients}


def main() -> None:
    model_dir, out, specs = sys.argv[1:4]
    torch.set_num_threads(1)
    world = init_world(60)
    for name, spec in json.loads(Path(specs).read_text()).items():
        result = run(model_dir, spec, world)
        if world.rank == 0:
            torch.save(result, Path(out) / f"{name}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
