"""Puts a fault into rank 1 of a torchrun, one kind after the other, and writes down what every rank did.

Usage (under torchrun): fault_worker.py MODEL_DIR OUT_DIR. Every rank writes OUT_DIR/<rank>.json after the last kind it
survives: for each kind what became of the update, and what moved. The real publisher and the real checkpoints look at
the weights behind each. At the end gradients are broken for ever, until the learner stops.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from asyncrl.config import validate
from asyncrl.errors import TrainingError
from asyncrl.learner.batch import rows_of
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.health import Skips
from asyncrl.learner.loop import Learner
from asyncrl.learner.publishing import Due, Publishing
from asyncrl.learner.shard import build_policy, init_world
from asyncrl.learner.step import Updater
from asyncrl.learner.stored import Progress
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from asyncrl.types import Version
from asyncrl.weights.shm import Publisher
from tests.learner.groups import make_groups

NAN, INF = float("nan"), float("inf")


class Faulty(Updater):
    """`broken`: left in one element of one gradient of rank 1, as a broken kernel would."""

    broken: float | None = None

    def backward(self, *args):
        sums = super().backward(*args)
        if self.broken is not None and self._world.rank == 1:
            next(p for p in self._policy.parameters() if p.grad.to_local().numel()).grad.to_local().view(-1)[3] = (
                self.broken
            )
        return sums


class Rank:
    """One rank with everything that a fault must not reach."""

    def __init__(self, model_dir, out, routes, world):
        self.world = world
        self.config = validate(
            {
                "model": {"path": model_dir, "dtype": "float32"},
                "algorithm": {"routes": routes, "advantage": "dr_grpo", "rdc": {"q": 0.2}},
                "staleness": {"sync_every": 1},
                "learner": {"max_skipped_updates": 3, "warmup_updates": 0},
            }
        )
        self.info = describe(model_dir)
        self.policy = build_policy(self.config.model, self.config.learner, routes == "r3", world)
        self.updater = Faulty(self.policy, self.config.learner, self.config.algorithm, world)
        self.told = []
        publisher = Publisher(out / f"weights-{routes}", 2) if world.is_writer else None
        self.publishing = Publishing(publisher, world, Due(1, 8), 60.0, lambda v, *_: self.told.append(v.update))
        self.checkpoints = Checkpoints(out / routes, "f", 9, world)
        self.learner = Learner.__new__(Learner)
        self.learner.config, self.learner.update, self.learner.carry = self.config, 0, 0.0
        self.learner.skips, self.learner.unforced_in_a_row = Skips(self.config.learner.max_skipped_updates, {}), 0

    def state(self):
        """This rank's part of weights and moments, as bytes: NaN equals NaN."""
        tensors = {n: p.detach() for n, p in self.policy.named_parameters()} | self.updater.state()
        local = {n: t.to_local() if hasattr(t, "to_local") else t for n, t in tensors.items()}
        return {n: t.contiguous().view(torch.uint8).numpy().tobytes() for n, t in local.items()}

    def update(self, groups):
        """One update on whole groups, every second one on this rank, and what a learner does behind it."""
        rows = rows_of(groups[self.world.rank :: self.world.size], 0, 0, self.info)
        u = self.learner.update
        out = run_update(
            self.policy, self.updater, rows, u, self.learner.carry, None, self.config, self.info, self.world
        )
        self.learner._advance(out)
        if out.step.outcome == "stepped":
            self.checkpoints.save(self.policy, self.updater, Progress(0, self.learner.update, u, 0.0))
        self.publishing.publish_if_due(self.policy, Version(0, self.learner.update), 0, 1, final=True)
        return out

    def fault(self, groups):
        """An update with a fault: what became of it, and what moved."""
        before, told, u = self.state(), len(self.told), self.learner.update
        out = self.update(groups)
        return {
            "outcome": out.step.outcome, "reason": out.step.reason, "moved": self.state() != before,
            "clock": self.learner.update - u, "told": len(self.told) - told, "saved": self.checkpoints.newest,
            "kept": bool(out.keep.all()), "undefined": int(torch.isnan(torch.tensor(out.table["drift"])).sum()),
        }  # fmt: skip

    def good(self, seed):
        """A good update trains: nothing of the fault before is left."""
        before, told = self.state(), len(self.told)
        out = self.update(make_groups(self.info, 4, 4, seed))
        assert out.step.outcome == "stepped" and self.state() != before, out.step
        assert len(self.told) - told == self.world.is_writer and self.checkpoints.newest == self.learner.update


def spoil_log_prob(rank):
    def hook(_module, args, output):
        logp, *rest = output
        at = args[0].predict_mask.nonzero()
        return (logp.index_put(tuple(at[0]), torch.tensor(NAN)) if len(at) else logp, *rest)

    return rank.policy.register_forward_hook(hook) if rank.world.rank == 1 else None


def all_kinds(rank):
    results, second = {}, rank.world.rank == 1
    groups = make_groups(rank.info, 4, 4, 50)
    rank.good(60)
    for name, value in (("gradient nan", NAN), ("gradient inf", INF)):
        rank.updater.broken = value
        results[name] = rank.fault(groups)
        rank.updater.broken = None
        rank.good(61 + len(results))
    hook = spoil_log_prob(rank)
    results["log_prob"] = rank.fault(groups)
    if hook is not None:
        hook.remove()
    rank.good(70)
    # The groups of rank 1 are those of odd place: an advantage that overflows float32 there makes its loss infinite.
    rich = [changed(g, lambda j, i=i: {"reward": 1e300 * (i % 2) * (j == 0)}) for i, g in enumerate(groups)]
    results["loss"] = rank.fault(rich)
    rank.good(71)
    _, parameter = next((n, p) for n, p in rank.policy.named_parameters() if n.endswith("embed_tokens.weight"))
    kept = parameter.to_local().detach().clone()
    if second:
        parameter.to_local().data[0, 0] = INF
    results["weight"] = rank.fault(groups)
    # Not even asked to may anybody publish or save it.
    rank.publishing.publish_if_due(rank.policy, Version(0, rank.learner.update + 1), 0, 1, final=True)
    told, saved = len(rank.told), rank.checkpoints.save(rank.policy, rank.updater, Progress(0, 99, 99, 0.0))
    results["weight"] |= {"published anyway": len(rank.told) - told, "saved anyway": saved}
    parameter.to_local().data.copy_(kept)
    rank.good(72)
    # Undefined drift is dropped by setting, and no response has another.
    drop = rank.config.algorithm.rdc.model_copy(update={"on_undefined": "drop"})
    kept, rank.config = rank.config, with_rdc(rank.config, drop)
    results["filtered"] = rank.fault([changed(g, lambda _: {"route_counts": None}) for g in groups])
    rank.config = kept
    rank.good(73)
    results["counts"] = dict(rank.learner.skips.by_reason)
    return results


def under_replay(rank):
    """The kinds for which it matters whose routes a forward used."""
    results, groups = {}, make_groups(rank.info, 4, 4, 50)
    rank.good(60)
    hook = spoil_log_prob(rank)
    results["log_prob"] = rank.fault(groups)
    if hook is not None:
        hook.remove()
    rank.good(70)
    rank.updater.broken = NAN
    results["gradient nan"] = rank.fault(groups)
    rank.updater.broken = None
    rank.good(71)
    return results


def changed(group, change):
    """A group whose responses j get the fields change(j)."""
    return replace(group, trajectories=tuple(replace(t, **change(j)) for j, t in enumerate(group.trajectories)))


def with_rdc(config, rdc):
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"rdc": rdc})})


def main() -> None:
    model_dir, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    world = init_world(60, "cpu")
    results = {}
    for routes, kinds in (("r3", under_replay), ("native", all_kinds)):
        rank = Rank(model_dir, out, routes, world)
        results[routes] = kinds(rank)
    # Damaged memory: a second moment below 0 on rank 1 gives a finite gradient and a weight that is none.
    moments = next(t for n, t in rank.updater.state().items() if "exp_avg_sq" in n and "lm_head" in n)
    kept = moments.to_local().clone(), {n: p.to_local().detach().clone() for n, p in rank.policy.named_parameters()}
    if world.rank == 1:
        moments.to_local()[0, 3] = -1e9
    u, told = rank.learner.update, len(rank.told)
    try:
        rank.update(make_groups(rank.info, 4, 4, 80))
        results["step"] = "went on"
    except TrainingError as exc:
        results["step"] = str(exc)
    results["step clock"], results["step told"] = rank.learner.update - u, len(rank.told) - told
    with torch.no_grad():
        moments.to_local().copy_(kept[0])
        for name, parameter in rank.policy.named_parameters():
            parameter.to_local().copy_(kept[1][name])
    (out / f"{world.rank}.json").write_text(json.dumps(results))
    rank.updater.broken = NAN
    while True:
        rank.update(make_groups(rank.info, 4, 4, 81))


if __name__ == "__main__":
    main()
