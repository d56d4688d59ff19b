"""Runs updates on synthetic groups in process groups of several sizes and saves what rank 0 sees.

Usage: rank_worker.py NUMBER MODEL_DIR OUT_DIR SPECS.json, once for each process; those of a smaller group serve in the
larger ones too, so that torch is imported once. SPECS has `ports`, where the ranks of each world size meet, and
`specs` by name: dicts with `kind` updates (see `run`) or by_hand, `worlds`, and what `groups_of` and `deal` read.
Results go to OUT_DIR/WORLD/NAME.pt.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from asyncrl.config import load_config
from asyncrl.learner.batch import rows_of
from asyncrl.learner.objective import Totals
from asyncrl.learner.publish import host_copy
from asyncrl.learner.records import update_scalars
from asyncrl.learner.score import plan, score
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import RowValues, Updater, row_logprobs
from asyncrl.learner.update import run_update, score_take
from asyncrl.models.describe import describe
from asyncrl.models.override import in_backward
from asyncrl.types import Group, Prompt
from tests.learner.groups import make_groups, make_trajectory
from tests.learner.takes import renamed
from tests.learner.worlds import main


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


def groups_of(spec, info, update):
    """`lengths` gives the input length of every response of every group; `uncounted` names groups without counts."""
    if "lengths" not in spec:
        groups = make_groups(info, spec["groups"], spec["group_size"], seed=update, version=update)
    else:
        rng, groups = np.random.default_rng(update), []
        for g, lengths in enumerate(spec["lengths"]):
            prompt = Prompt(f"p{g}", rng.integers(0, info.vocab_size, 4).astype(np.int32), "", "", "test")
            made = [
                make_trajectory(f"0/p{g}#0.{i}", 4, n - 4, info, rng, reward=float(i == 0))
                for i, n in enumerate(lengths)
            ]
            groups.append(Group(f"0/p{g}", prompt, f"g{g}", 0, 1.0, tuple(made), 1.0))
    for g in spec.get("uncounted", []):
        bare = tuple(replace(t, route_counts=None) for t in groups[g].trajectories)
        groups[g] = replace(groups[g], trajectories=bare)
    return groups


def deal(spec, groups, world):
    """This rank's groups: in turn, all to rank 0 (`first`), or all but one to the last (`uneven`)."""
    how = spec.get("deal", "in turn")
    if how == "in turn":
        return groups[world.rank :: world.size]
    if how == "first":
        return groups if world.rank == 0 else []
    assert how == "uneven"
    return {0: groups[:1], world.size - 1: groups[1:]}.get(world.rank, [])


class NoisyLogits(TorchFunctionMode):
    """Adds noise of 1e-9 to every linear layer's output, which breaks an exact tie either way."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + 1e-9 * torch.randn_like(out) if func is torch.nn.functional.linear else out


def tie(policy, noisy):
    """All experts of a rank's shard get one router row, so that their logits are equal to the bit, and only some of
    them are chosen; a router that runs again in backward gets noisy ones. noisy counts these runs."""

    def disturbed(forward):
        def run_it(*args, **kwargs):
            if not in_backward():
                return forward(*args, **kwargs)
            noisy.append(1)
            with NoisyLogits():
                return forward(*args, **kwargs)

        return run_it

    for router in policy.hook.routers.values():
        rows = router.weight.to_local()
        with torch.no_grad():
            rows[1:] = rows[:1].clone()
        router.forward = disturbed(router.forward)


def setup(model_dir, spec, world, noisy=()):
    settings = [f"model.path={model_dir}", "learner.logprob_chunk=64", *spec["overrides"]]
    config = load_config(spec["base"], settings)
    policy = build_policy(config.model, config.learner, config.algorithm.replays, world)
    if spec.get("ties"):
        tie(policy, noisy)
    calls = []
    policy.register_forward_pre_hook(lambda module, args: calls.append(1))
    return config, policy, Spy(policy, config.learner, config.algorithm, world), calls


def run(model_dir, spec, world):
    """Some updates as the loop makes them, `take` of a spec from each take. forwards: how many each rank ran in all."""
    noisy, state, take = [], None, spec.get("take", 0)
    config, policy, updater, calls = setup(model_dir, spec, world, noisy)
    info = describe(model_dir)
    carry, results = 0.0, []

    def rows_at(u):
        groups = groups_of(spec, info, u)
        mine = deal(spec, renamed(groups, u) if take else groups, world)
        return rows_of(mine, u, u - config.staleness.max_lag, info)

    for u in range(spec["updates"]):
        if take and u % take == 0:
            state = score_take(policy, [r for v in range(u, u + take) for r in rows_at(v)], config, info, world)
        outcome = run_update(policy, updater, rows_at(u), u, carry, state, config, info, world)
        carry = outcome.selection.carry
        table = outcome.table
        results.append(
            {
                "keep": {i: bool(k) for i, k in zip(table.ids, outcome.keep, strict=True)},
                "bucket": {i: int(b) for i, b in zip(table.ids, outcome.selection.bucket, strict=True)},
                "drift": dict(zip(table.ids, table["drift"].tolist(), strict=True)),
                "scalars": update_scalars(outcome, info),
                "outcome": outcome.step.outcome,
                "fused": outcome.fused,
                "forced": outcome.forced_fraction,
                "carry": carry,
                "work": tuple(outcome.work),
            }
        )
    forwards = [None] * world.size
    dist.all_gather_object(forwards, len(calls))
    out = {"results": results, "weights": host_copy(policy, world), "gradients": updater.gradients}
    return out | {"forwards": forwards, "rerun": len(noisy)}


def by_hand(model_dir, spec, world):
    """Ten tokens of loss 1 on the first rank and two of loss 4 on the last: pi_old = pi, advantages -1 and -4."""
    config, policy, updater, _ = setup(model_dir, spec, world)
    info = describe(model_dir)
    rng = np.random.default_rng(0)
    prompt = Prompt("p", rng.integers(0, info.vocab_size, 3).astype(np.int32), "", "", "test")
    long, short = (make_trajectory(f"0/p#0.{n}", 3, n, info, rng) for n in (10, 2))
    mine = [t for rank, t in ((0, long), (world.size - 1, short)) if rank == world.rank]
    rows = rows_of([Group("0/p", prompt, "g", 0, 1.0, tuple(mine))], 0, 0, info) if mine else []
    budget = config.learner.micro_batch_tokens
    batches, fused = plan(rows, [False] * len(rows), info, budget, True, policy.replay, world)
    scores = score(policy, rows, batches, fused, info, world)
    advantages = torch.tensor([-1.0 if r.trajectory.num_tokens == 10 else -4.0 for r in rows])
    keep = torch.ones(len(rows), dtype=torch.bool)
    old = row_logprobs(rows, scores)
    step = updater.update(0, rows, scores, RowValues(old), advantages, keep, Totals(12.0, 2.0, 24.0), info)
    return {"loss": step.loss, "norm": step.grad_norm, "gradients": updater.gradients, "fused": fused}


KINDS = {"updates": run, "by_hand": by_hand}

if __name__ == "__main__":
    main(lambda model_dir, spec, world: KINDS[spec["kind"]](model_dir, spec, world))
