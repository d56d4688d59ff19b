"""Updates with a KL term in process groups of several sizes; what rank 0 sees is saved.

Usage: reference_worker.py NUMBER MODEL_DIR OUT_DIR SPECS.json, once for each process; as rank_worker.py, whose groups
these are. A spec has `overrides`, `worlds`, `updates`, and `broken`: an update in which the last rank's reference
policy gives a log-prob that is none. With `updates` 0 it only opens the reference policy.
Results go to OUT_DIR/WORLD/NAME.pt.
"""

import torch
import torch.distributed as dist

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import rows_of
from asyncrl.learner.publish import host_copy
from asyncrl.learner.records import update_scalars
from asyncrl.learner.reference import open_reference
from asyncrl.learner.shard import build_policy
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from tests.learner.rank_worker import Spy, deal, groups_of
from tests.learner.worlds import main


def spoil(reference):
    """Its next forwards give NaN at the first counted position."""

    def hook(_module, args, output):
        logp, *rest = output
        at = args[0].predict_mask.nonzero()
        return (logp.index_put(tuple(at[0]), torch.tensor(torch.nan, dtype=logp.dtype)) if len(at) else logp, *rest)

    return reference.register_forward_hook(hook)


def run(model_dir, spec, world):
    """Some updates as the loop makes them."""
    config, info = load_config(spec["base"], [f"model.path={model_dir}", *spec["overrides"]]), describe(model_dir)
    policy = build_policy(config.model, config.learner, config.algorithm.replays, world)
    reference = open_reference(config, world)
    updater = Spy(policy, config.learner, config.algorithm, world)
    carry, results = 0.0, []
    for u in range(spec["updates"]):
        rows = rows_of(deal(spec, groups_of(spec, info, u), world), u, u - config.staleness.max_lag, info)
        hook = spoil(reference) if spec.get("broken") == u and world.rank == world.size - 1 else None
        outcome = run_update(policy, updater, rows, u, carry, None, config, info, world, reference=reference)
        if hook is not None:
            hook.remove()
        carry, table = outcome.selection.carry, outcome.table
        results.append(
            {
                "keep": {i: bool(k) for i, k in zip(table.ids, outcome.keep, strict=True)},
                "bucket": {i: int(b) for i, b in zip(table.ids, outcome.selection.bucket, strict=True)},
                "drift": dict(zip(table.ids, table["drift"].tolist(), strict=True)),
                "scalars": update_scalars(outcome, info),
                "advantages": outcome.advantages,
                "outcome": outcome.step.outcome,
                "reason": outcome.step.reason,
                "fused": outcome.fused,
                "carry": carry,
            }
        )
    return {"results": results, "weights": host_copy(policy, world), "gradients": updater.gradients}


def opened(model_dir, spec, world):
    """What every rank says about a reference policy that cannot be used."""
    config = load_config(spec["base"], [f"model.path={model_dir}", *spec["overrides"]])
    said, mine = [None] * world.size, ""
    try:
        open_reference(config, world)
    except ConfigError as exc:
        mine = str(exc)
    dist.all_gather_object(said, mine)
    return {"said": said}


if __name__ == "__main__":
    main(lambda model_dir, spec, world: (run if spec["updates"] else opened)(model_dir, spec, world))
