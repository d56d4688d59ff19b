"""CPU and wall time of the learner's update against a plain PyTorch loop over the same tokens, in one interleaved run.

Three sides take turns, each on a copy of the same model, one process, one gloo rank:

- plain: a hand-written loop: transformers' forward, the output matrix on the predicting positions only, token
  cross-entropy times the advantage, backward, clip, AdamW (fused). Its padded tensors are made beforehand and are those
  of the learner's own micro-batches, so it has nothing to do but to train.
- learner: everything from groups to metrics: rows, micro-batches, one forward with routes, log-probs, entropy, drift,
  selection, mismatch sums, corrections, backward, clip, AdamW, metrics of the update.
- bare: the learner without route capture, drift and selection (as for a dense model).

learner / plain is what the learner costs; learner / bare - 1 is what capture, drift and selection cost.

    python tools/bench/learner.py [--pairs 7] [--shape quickstart|larger] [--scoring auto|separate] [--profile SIDE]
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

# Before torch is imported: spinning OpenMP threads would eat the other side's time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.algos.advantages import group_advantages
from asyncrl.config import Config, load_config
from asyncrl.learner.batch import MicroBatch, collate, micro_batches, padded_tokens, rows_of
from asyncrl.learner.records import update_scalars
from asyncrl.learner.shard import World, build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from asyncrl.models.load import load_model
from asyncrl.types import Group, ModelInfo, Prompt, Segment, Trajectory, Version

ROOT = Path(__file__).parents[2]
SIDES = ("plain", "learner", "bare")


@dataclass(frozen=True)
class Shape:
    """A model and a batch: `groups` x 8 responses of `shortest` to `longest` tokens after prompts of 4 to 12."""

    model: dict[str, int]
    groups: int
    shortest: int
    longest: int


SHAPES = {
    "quickstart": Shape(
        {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
         "num_hidden_layers": 3, "num_experts": 8, "head_dim": 16},
        32, 20, 64,
    ),
    "larger": Shape(
        {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
         "num_hidden_layers": 4, "num_experts": 16, "head_dim": 64},
        4, 200, 256,
    ),
}  # fmt: skip


def make_model(shape: Shape, folder: Path) -> Path:
    """A random Qwen3-MoE of this shape, written into the folder."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **shape.model, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, norm_topk_prob=True,
        tie_word_embeddings=True, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def make_groups(shape: Shape, info: ModelInfo, seed: int) -> list[Group]:
    """Groups with random tokens, rewards, log-probs and route counts; no group has equal rewards."""
    rng = np.random.default_rng(seed)
    layers, experts = len(info.layers), info.num_experts
    groups = []
    for g in range(shape.groups):
        prompt = Prompt(f"p{g}", rng.integers(2, info.vocab_size, rng.integers(4, 13)).astype(np.int32), "", "", "b")
        made = []
        for i in range(8):
            n = int(rng.integers(shape.shortest, shape.longest + 1))
            counts = np.stack([rng.multinomial(n * info.top_k, [1 / experts] * experts) for _ in range(layers)])
            ids = rng.integers(2, info.vocab_size, n).astype(np.int32)
            logp = np.full(n, -np.log(info.vocab_size), np.float32) + rng.normal(0, 0.05, n).astype(np.float32)
            segments = (Segment(Version(0, 0), 0, n),)
            reward = float(i == 0) if i < 2 else float(rng.integers(0, 2))
            made.append(
                Trajectory(
                    f"0/p{g}#0.{i}", ids, logp, np.ones(n, bool), segments, reward, "stop",
                    counts[None].astype(np.uint16), None,
                )
            )  # fmt: skip
        groups.append(Group(f"0/p{g}", prompt, f"g{g % 4}", 0, 1.0, tuple(made), 1.0))
    return groups


def plain_side(config: Config, path: Path, groups: list[Group], info: ModelInfo) -> Callable[[int], object]:
    """The hand-written loop, on the micro-batches the learner makes of these rows."""
    s = config.learner
    model = load_model(path, "float32")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s.lr, betas=s.betas, weight_decay=s.weight_decay, fused=True
    )  # fmt: skip
    rows = rows_of(groups, 0, 0, info)
    index = {g.group_id: i for i, g in enumerate(groups)}
    of_group = torch.tensor([index[r.group_id] for r in rows])
    advantages = group_advantages(torch.tensor([r.trajectory.reward for r in rows]), of_group).float()
    sizes = [r.size for r in rows]
    batches = [
        collate(rows, i, info, True, False) for i in micro_batches(sizes, range(len(rows)), s.micro_batch_tokens)
    ]
    tokens = sum(int(b.predict_mask.sum()) for b in batches)

    def one(batch: MicroBatch) -> None:
        hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        mask = batch.predict_mask
        logits = model.lm_head(hidden[mask]).float()
        loss = F.cross_entropy(logits, batch.targets[mask], reduction="none")
        weight = advantages[list(batch.index)][:, None].expand_as(mask)[mask]
        ((loss * weight).sum() / tokens).backward()

    def step(update: int) -> object:
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            one(batch)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
        optimizer.step()
        return float(norm)

    return step


def learner_side(
    config: Config, path: Path, groups: list[Group], info: ModelInfo, world: World, bare: bool
) -> Callable[[int], object]:
    """run_update with what the loop does around it; bare: no routes, no drift, no selection."""
    policy = build_policy(config.model, config.learner, False, world)
    if bare:
        policy.hook = None
        groups = [replace(g, trajectories=tuple(replace(t, route_counts=None) for t in g.trajectories)) for g in groups]
    updater = Updater(policy, config.learner, config.algorithm, world)
    state = {"carry": 0.0}

    def step(update: int) -> object:
        rows = rows_of(groups, update, update - 10**6, info)
        outcome = run_update(policy, updater, rows, update, state["carry"], None, config, info, world)
        state["carry"] = outcome.selection.carry
        assert outcome.step.outcome == "stepped"
        return update_scalars(outcome, info)

    return step


def measure(step: Callable[[int], object], update: int) -> tuple[float, float]:
    """CPU seconds of the process and wall seconds of one update."""
    cpu, wall = time.process_time(), time.perf_counter()
    step(update)
    return time.process_time() - cpu, time.perf_counter() - wall


def compare(sides: dict[str, Callable[[int], object]], pairs: int) -> str:
    """Medians of each side and of the paired ratios; the sides take turns, in another order each time."""
    for step in sides.values():
        measure(step, 0)
    costs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    names = list(sides)
    for turn in range(pairs):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            costs[name].append(measure(sides[name], turn + 1))
    lines = []
    for k, clock in enumerate(("CPU", "wall")):
        medians = ", ".join(f"{n} {statistics.median(c[k] for c in costs[n]) * 1e3:.0f} ms" for n in names)

        def ratio(a: str, b: str, k: int = k) -> str:
            values = sorted(x[k] / y[k] for x, y in zip(costs[a], costs[b], strict=True))
            return f"{a} / {b} {statistics.median(values):.3f} ({values[0]:.2f} to {values[-1]:.2f})"

        lines.append(f"{clock}: {medians}; {ratio('learner', 'plain')}, {ratio('learner', 'bare')}")
    return "\n".join(lines)


def profile(step: Callable[[int], object], updates: int) -> None:
    """Where the learner's time goes, by own time."""
    step(0)
    profiler = cProfile.Profile()
    profiler.enable()
    for update in range(updates):
        step(update + 1)
    profiler.disable()
    stats = pstats.Stats(profiler)
    stats.sort_stats("tottime").print_stats(30)
    stats.sort_stats("cumtime").print_stats("asyncrl|optim|clip_grad|fsdp", 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="interleaved updates of every side; medians are printed")
    parser.add_argument("--shape", choices=list(SHAPES), default="quickstart")
    parser.add_argument("--scoring", choices=["auto", "separate"], default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", choices=SIDES, help="profile this side instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        path = make_model(shape, Path(scratch) / "model")
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        world = World(0, 1, torch.device("cpu"))
        overrides = [f"model.path={path}", f"learner.scoring={args.scoring}", "learner.lr=1e-5", "learner.device=cpu"]
        config = load_config([ROOT / "configs/quickstart.yaml"], overrides)
        off = load_config([ROOT / "configs/quickstart.yaml"], [*overrides, "algorithm.rdc.mode=off"])
        info = describe(path)
        groups = make_groups(shape, info, 0)
        tokens = sum(g.num_tokens for g in groups)
        padded = padded_tokens_of(config, groups, info)
        make = {
            "plain": lambda: plain_side(config, path, groups, info),
            "learner": lambda: learner_side(config, path, groups, info, world, bare=False),
            "bare": lambda: learner_side(off, path, groups, info, world, bare=True),
        }
        if args.profile:
            profile(make[args.profile](), args.pairs)
        else:
            print(
                f"{args.shape}: {8 * shape.groups} responses, {tokens} response tokens, {padded} padded tokens, "
                f"scoring {args.scoring}, {args.threads} thread(s), float32, {args.pairs} interleaved rounds"
            )  # fmt: skip
            print(compare({name: build() for name, build in make.items()}, args.pairs), flush=True)
        dist.destroy_process_group()


def padded_tokens_of(config: Config, groups: list[Group], info: ModelInfo) -> int:
    """Tokens in the padded micro-batches of these groups."""
    sizes = [r.size for r in rows_of(groups, 0, 0, info)]
    return padded_tokens(sizes, micro_batches(sizes, range(len(sizes)), config.learner.micro_batch_tokens))


if __name__ == "__main__":
    main()
