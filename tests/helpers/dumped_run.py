"""Run folders with dumps: real updates of a tiny model on synthetic groups, without replay and generators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from asyncrl.config import Config, save_config, validate
from asyncrl.learner.batch import rows_of
from asyncrl.learner.dumping import Dumps
from asyncrl.learner.publish import export
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update, score_take
from asyncrl.metrics.sink import to_line
from asyncrl.models.describe import describe
from asyncrl.types import Segment, Version
from tests.learner.groups import make_groups


def settings(run_dir: Path, model: Path, **sections) -> Config:
    """A config of that run folder with a dump of every second update."""
    tree = {
        "run": {"dir": str(run_dir.parent), "name": run_dir.name},
        "model": {"path": str(model)},
        "algorithm": {"rdc": {"q": 0.25}},
        "learner": {"updates": 4, "lr": 0.001, "warmup_updates": 0},
        "logging": {"dump_every": 2},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return validate(tree)


def groups_of(info, update, full_routes=True):
    """Five groups of four; the two versions of a response are as old as its group's number says."""
    found = []
    for g, group in enumerate(make_groups(info, 5, 4, seed=update)):
        old = max(0, update - g)
        responses = tuple(
            replace(
                t, segments=tuple(Segment(Version(0, old), s.start, s.end) for s in t.segments),
                routes=t.routes if full_routes else None,
            )
            for t in group.trajectories
        )  # fmt: skip
        found.append(replace(group, trajectories=responses))
    return found


def train(
    config: Config, world, updates: int, first: int = 0, epoch: int = 0, full_routes=True, taken=0, make=groups_of
):
    """Updates as the loop makes them, dumps included, and the folder's other files. Outcomes, and the metrics of dumps.

    taken: updates of a take, with pi_old of a pass over all of it; 0 is one update without such a pass. make: the
    groups of an update, as groups_of; their names are of one take.
    """
    info, run_dir = describe(config.model.path), config.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    if world.is_writer and not (run_dir / "config.yaml").exists():
        save_config(config, run_dir / "config.yaml")
    policy = build_policy(config.model, config.learner, config.algorithm.replays, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    dumps, carry, outcomes, scalars = Dumps(run_dir, world, info, epoch == 0), 0.0, [], []
    masks, state = config.algorithm.truncated == "mask", None

    def rows_at(u):
        groups, bound = make(info, u, full_routes)[world.rank :: world.size], u - config.staleness.max_lag
        return groups, bound, rows_of(groups, u, bound, info, masks)

    for update in range(first, updates):
        mine, bound, rows = rows_at(update)
        if taken and (update - first) % taken == 0:
            take = [row for u in range(update, min(update + taken, updates)) for row in rows_at(u)[2]]
            state = score_take(policy, take, config, info, world)
        dumps.begin(policy, update, epoch, carry, config)
        outcome = run_update(policy, updater, rows, update, carry, state, config, info, world, dumps.due)
        dumps.finish(mine, bound, state, outcome)
        carry = outcome.selection.carry
        outcomes.append(outcome)
        scalars.append(dumps.scalars())
        if world.is_writer:
            with (run_dir / "metrics.jsonl").open("a") as lines:
                lines.write(to_line(update, 0.0, {"policy/reward": 0.0, "run/epoch": float(epoch)}) + "\n")
    export(policy, config.model.path, run_dir / "model", world)
    return outcomes, scalars
