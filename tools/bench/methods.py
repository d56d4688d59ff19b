"""What each method costs the learner: CPU time of one take of 4 updates, as a multiple of GRPO's without a correction.

Real responses of the quickstart's model to the quickstart's task, with their routes; the same for every method. A take
is what the loop does with it: pi_old in one pass, then score, drift, select, update and metrics for each update. Every
measurement of a method stands next to one of the baseline; medians of the paired ratios are printed. CPU time of the
process, for on a shared machine the wall says nothing. What a method costs the generators (R3: routes on the wire) is
not in it.

    python tools/bench/methods.py [--pairs 5] [--groups 32] [--methods tis,gspo]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Before torch is imported: spinning OpenMP threads would eat the other side's time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))

from study.emulate import Lab, Sampling
from study.faults import Kind
from study.methods import ordered
from study.plan import METHODS

from asyncrl.config import Config, load_config
from asyncrl.learner.batch import rows_of
from asyncrl.learner.records import update_scalars
from asyncrl.learner.reference import open_reference
from asyncrl.learner.shard import World, build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update, score_take
from asyncrl.models.describe import describe
from asyncrl.types import Group, ModelInfo

ROOT = Path(__file__).parents[2]
BASELINE = "grpo"
UPDATES = 4
FIXED = (f"staleness.updates_per_take={UPDATES}", "staleness.max_lag=16", "learner.lr=1e-5", "learner.device=cpu")

Take = Callable[[int], object]


def config_of(method: str, *words: str) -> Config:
    """The quickstart with a method, and further settings."""
    file, settings = METHODS[method]
    files = [ROOT / "configs/quickstart.yaml", ROOT / f"configs/methods/{file}.yaml"]
    return load_config(files, [*settings, *FIXED, f"model.path={ROOT / 'models/quickstart'}", *words])


def sampled(config: Config, groups: int, seed: int) -> list[Group]:
    """Groups of real responses of the model to the first training problems; with routes where the config needs them."""
    lab = Lab(config)
    try:
        how = [Sampling(Kind(), 0, 0)] * groups
        return lab.sample(lab.prompts[:groups], how, {0: lab.weights()}, config.algorithm.group_size, seed)
    finally:
        lab.close()


def take_of(config: Config, groups: Sequence[Group], info: ModelInfo, world: World) -> Take:
    """A function that trains on all groups in UPDATES updates, with a policy of its own."""
    policy = build_policy(config.model, config.learner, config.algorithm.replays, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    reference = open_reference(config, world)
    size = len(groups) // UPDATES
    batches = [groups[m * size : (m + 1) * size] for m in range(UPDATES)]

    def take(update: int) -> object:
        rows = [rows_of(batch, update, update - 10**6, info) for batch in batches]
        state = score_take(policy, [r for batch in rows for r in batch], config, info, world)
        scalars, carry = {}, 0.0
        for m, batch in enumerate(rows):
            outcome = run_update(
                policy, updater, batch, update + m, carry, state, config, info, world, reference=reference
            )
            if outcome.step.outcome != "stepped":
                raise RuntimeError(f"no step: {outcome.step}")
            carry = outcome.selection.carry
            scalars = update_scalars(outcome, info)
        return scalars

    return take


def cpu_seconds(take: Take, update: int) -> float:
    """CPU seconds of the process for one take."""
    started = time.process_time()
    take(update)
    return time.process_time() - started


def ratios(
    takes: Mapping[str, Take], pairs: int, clock: Callable[[Take, int], float] = cpu_seconds
) -> dict[str, list[float]]:
    """Per method the quotients of a take of it and one of the baseline beside it; which is first alternates."""
    base = takes[BASELINE]
    for take in takes.values():
        take(0)
    out: dict[str, list[float]] = {name: [] for name in takes}
    for turn in range(1, pairs + 1):
        for name, take in takes.items():
            if name == BASELINE:
                continue
            if turn % 2:
                below = clock(base, UPDATES * turn)
                above = clock(take, UPDATES * turn)
            else:
                above = clock(take, UPDATES * turn)
                below = clock(base, UPDATES * turn)
            out[name].append(above / below)
            out[BASELINE].append(below)
    return out


def table(found: Mapping[str, Sequence[float]]) -> str:
    """Markdown: median and range of every method; of the baseline its milliseconds."""
    lines = ["| method | CPU time of a take / `grpo` | range |", "|---|---|---|"]
    for name, values in found.items():
        if name == BASELINE:
            lines.append(f"| `{name}` | 1 ({1e3 * statistics.median(values):.0f} ms) | |")
        else:
            lines.append(f"| `{name}` | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each method; medians are printed")
    parser.add_argument("--groups", type=int, default=32, help="groups of 8 responses per update (%(default)d)")
    parser.add_argument("--methods", default=",".join(ordered()), help="with commas between them; all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    names = [BASELINE, *(n for n in args.methods.split(",") if n != BASELINE)]
    configs = {name: config_of(name) for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        world = World(0, 1, torch.device("cpu"))
        base = configs[BASELINE]
        info = describe(base.model.path)
        groups = sampled(config_of("r3"), args.groups * UPDATES, 0)
        alike = np.mean([len({t.reward for t in g.trajectories}) == 1 for g in groups])
        print(
            f"a take: {sum(len(g.trajectories) for g in groups)} responses, {sum(g.num_tokens for g in groups)} "
            f"tokens, {UPDATES} updates; {alike:.0%} of the groups have equal rewards; 1 thread, float32, {args.pairs} "
            "pairs\n"
        )
        takes = {name: take_of(config, groups, info, world) for name, config in configs.items()}
        print(table(ratios(takes, args.pairs)), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
