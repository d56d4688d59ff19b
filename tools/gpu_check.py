"""Train a random Qwen3-MoE through the real learner for some updates and print what it costs on this device.

Makes a model folder, builds the policy as a run would (bfloat16, activation checkpointing, torch.compile), makes
updates on synthetic groups, times the parts of an update one by one, samples from the torch engine, and compares
learner and engine. Ends with status 1 when something is wrong, not when it is slow. docs/gpu.md explains the rows.

    tools/gpu_check.sh [--device auto|cpu|cuda] [--size tiny|1b] [--updates N] [--no-compile] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.config import Config, validate
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.generator.collect import count_routes, to_trajectory
from asyncrl.learner.batch import MicroBatch, Row, collate, micro_batches, rows_of
from asyncrl.learner.score import fill_drift, score
from asyncrl.learner.shard import Policy, World, build_policy, init_world, reshard
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from asyncrl.models.device import pick_device
from asyncrl.models.fill import fill_sharded
from asyncrl.models.logprobs import token_logprobs
from asyncrl.types import Group, ModelInfo, Prompt, SamplingParams, Segment, Trajectory, Version

# Model fields, groups x responses, prompt and longest response, micro-batch tokens, engine rows x new tokens.
SIZES = {
    "tiny": (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": 512},
        (2, 4), (8, 24), 512, (4, 12),
    ),
    "1b": (
        {"hidden_size": 1024, "num_hidden_layers": 12, "num_experts": 32, "moe_intermediate_size": 768, "head_dim": 128,
         "num_attention_heads": 16, "num_key_value_heads": 4, "num_experts_per_tok": 4, "vocab_size": 32768},
        (16, 8), (128, 1024), 16384, (128, 128),
    ),
}  # fmt: skip
DRIFT_BOUND, K3_BOUND = 0.1, 1e-2
"""Learner against engine at lag 0: beyond these they do not compute the same model."""


def main(arguments: Sequence[str] | None = None, world: World | None = None) -> dict[str, float]:
    """Run the check and print it. Gives the numbers by name; SystemExit(1) names what is wrong."""
    args = _arguments(arguments)
    torch.manual_seed(0)
    disable_progress_bar()
    if world is None:
        world = _one_process(args.device)
    if world.device.type == "cpu" and args.device == "auto" and args.size != "tiny":
        raise SystemExit("torch sees no GPU here; --device cpu --size tiny checks that this script works")
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        numbers = _check(args, Path(folder), world)
    if args.json:
        Path(args.json).write_text(json.dumps(numbers, indent=1))
    wrong = _wrong(numbers)
    print("\n".join(f"WRONG: {text}" for text in wrong) or "ok: every check passed", flush=True)
    if wrong:
        raise SystemExit(1)
    return numbers


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a random Qwen3-MoE on this device and print what it costs.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size", choices=tuple(SIZES), default="1b")
    parser.add_argument("--updates", type=int, default=5, help="timed updates; one more comes before them")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--json", help="also write the numbers there")
    return parser.parse_args(arguments)


def _one_process(device: str) -> World:
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
    return init_world(120, device)


def _check(args: argparse.Namespace, folder: Path, world: World) -> dict[str, float]:
    fields, (groups, size), (prompt, longest), budget, (engine_rows, engine_tokens) = SIZES[args.size]
    seen = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "no GPU is used"
    print(f"torch {torch.__version__}, device {world.device} ({seen}), size {args.size}, compile {args.compile}")
    parameters = _make_model(folder, fields, world.device)
    config = _config(folder, groups, size, budget, args.compile)
    info = describe(folder)
    policy = build_policy(config.model, config.learner, True, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    n: dict[str, float] = {"parameters": parameters, "logp_error": _logp_error(world.device)}
    _line(f"{parameters:.2e} parameters; bfloat16 log-probs are off by at most {n['logp_error']:.1e}")
    made = _groups(info, groups, size, prompt, longest)
    _updates(args.updates, policy, updater, made, config, info, world, n)
    _parts(policy, rows_of(made, 1, 0, info), budget, info, world, n)
    n["checkpointing"], n["compile"] = float(config.learner.activation_checkpointing), float(args.compile)
    del updater
    _engine(folder, policy, info, engine_rows, engine_tokens, prompt, world, n)
    return n


def _make_model(folder: Path, fields: dict[str, int], device: torch.device) -> int:
    config = Qwen3MoeConfig(
        intermediate_size=2 * fields["hidden_size"], max_position_embeddings=4096, tie_word_embeddings=False,
        norm_topk_prob=True, mlp_only_layers=[], bos_token_id=None, eos_token_id=None, pad_token_id=None, **fields,
    )  # fmt: skip
    with device:
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _config(folder: Path, groups: int, size: int, budget: int, compiled: bool) -> Config:
    return validate(
        {
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "staleness": {"sync_every": 1},
            "algorithm": {"groups_per_update": groups, "group_size": size, "routes": "r3", "native_drift_every": 0},
            "learner": {
                "activation_checkpointing": True, "compile": compiled, "micro_batch_tokens": budget,
                "scoring": "separate", "warmup_updates": 0, "lr": 1e-5,
            },
        }
    )  # fmt: skip


def _groups(info: ModelInfo, groups: int, size: int, prompt: int, longest: int) -> list[Group]:
    """Random tokens and routes, lengths from a quarter of the longest up; every group has rewards of both kinds."""
    rng = np.random.default_rng(0)
    out = []
    for g in range(groups):
        ids = rng.integers(0, info.vocab_size, prompt).astype(np.int32)
        rows = [
            _trajectory(f"0/p{g}#0.{i}", prompt, int(rng.integers(longest // 4, longest + 1)), float(i % 2), info, rng)
            for i in range(size)
        ]
        out.append(Group(f"0/p{g}", Prompt(f"p{g}", ids, "", "", "check"), "g0", 0, 1.0, tuple(rows), 1.0))
    return out


def _trajectory(
    name: str, prompt: int, tokens: int, reward: float, info: ModelInfo, rng: np.random.Generator
) -> Trajectory:
    shape = (prompt + tokens - 1, len(info.layers), info.num_experts)
    routes = np.argsort(rng.random(shape), axis=-1)[..., : info.top_k].astype(info.route_dtype)
    counts = count_routes(routes, np.ones(tokens, bool), prompt - 1, info.num_experts)
    return Trajectory(
        name, rng.integers(0, info.vocab_size, tokens).astype(np.int32),
        np.full(tokens, -math.log(info.vocab_size), np.float32), np.ones(tokens, bool),
        (Segment(Version(0, 0), 0, tokens),), reward, "stop", counts[None], routes,
    )  # fmt: skip


def _updates(
    count: int, policy: Policy, updater: Updater, groups: list[Group], config: Config, info: ModelInfo, world: World,
    n: dict[str, float],
) -> None:  # fmt: skip
    """The first update compiles and fills the caches; the others are timed."""
    times, outcomes = [], []
    for update in range(count + 1):
        rows = rows_of(groups, update, 0, info)
        with _Clock(world.device) as clock:
            outcome = run_update(policy, updater, rows, update, 0.0, None, config, info, world)
        times.append(clock.seconds)
        outcomes.append(outcome)
        if update == 0:
            _reset_peak(world.device)
    last = outcomes[-1]
    tokens = sum(row.size for row in rows)
    n["stepped"] = float(sum(o.step.outcome == "stepped" for o in outcomes)) / len(outcomes)
    n["loss"], n["grad_norm"], n["forced"] = last.step.loss, last.step.grad_norm, last.forced_fraction
    n["first_s"], n["step_s"] = times[0], sum(times[1:]) / count
    n["tokens"], n["tokens_per_s"], n["peak_gib"] = tokens, tokens / n["step_s"], _peak_gib(world.device)
    _line(
        f"first update {n['first_s']:.1f} s, then {n['step_s']:.2f} s for {tokens} tokens: "
        f"{n['tokens_per_s']:.0f} tokens/s"
    )
    _line(f"peak memory {n['peak_gib']:.2f} GiB ({'GPU' if world.device.type == 'cuda' else 'process'})")
    _line(f"grad norm {n['grad_norm']:.3g}, loss {n['loss']:.3g}, {n['forced']:.0%} of the rows replayed")


def _parts(policy: Policy, rows: list[Row], budget: int, info: ModelInfo, world: World, n: dict[str, float]) -> None:
    """Cost of capture, drift and the scoring pass, each as a share of the whole update."""
    sizes = [r.size for r in rows]
    parts = micro_batches(sizes, range(len(rows)), budget)
    batches = [collate(rows, index, info, False, False) for index in parts]
    scored = _seconds(lambda: score(policy, rows, batches, False, info, world), world)
    batch = batches[-1].to(world.device)
    natives: list[torch.Tensor] = []

    def forward(capture: bool) -> None:
        with torch.no_grad():
            natives[:] = [t for t in (_forward(policy, batch, capture),) if t is not None]

    plain, captured = [], []
    for _ in range(3):
        plain.append(_seconds(lambda: forward(False), world, 1))
        captured.append(_seconds(lambda: forward(True), world, 1))
    drift, layers = np.zeros(len(rows)), np.zeros((len(rows), len(info.layers)))
    drifted = _seconds(lambda: fill_drift(drift, layers, rows, batch, natives[0], info), world)
    reshard(policy)
    # The scoring pass and the update forward each token once, and measure one micro-batch after the other.
    share = sum(sizes) / max(1, sum(sizes[i] for i in batch.index))
    n["capture_percent"] = 100 * 2 * share * (min(captured) - min(plain)) / n["step_s"]
    n["drift_percent"] = 100 * share * drifted / n["step_s"]
    n["scoring_percent"] = 100 * scored / n["step_s"]
    _line(
        f"of the update: scoring pass {n['scoring_percent']:.1f} %, route capture {n['capture_percent']:.1f} %, "
        f"drift {n['drift_percent']:.1f} %"
    )


def _forward(policy: Policy, batch: MicroBatch, capture: bool) -> torch.Tensor | None:
    """Native routes of a forward, or None without the hook; `policy` itself always captures."""
    hook = policy.hook
    assert hook is not None
    with hook.record() if capture else nullcontext():
        policy.model.base_model(input_ids=batch.input_ids, use_cache=False)
    return hook.native if capture else None


def _engine(
    folder: Path, policy: Policy, info: ModelInfo, rows: int, tokens: int, prompt: int, world: World,
    n: dict[str, float],
) -> None:  # fmt: skip
    """Speed of the torch engine, and how far it is from a fresh learner with the same weights."""
    device = pick_device("cuda" if world.device.type == "cuda" else "cpu", "--device")
    engine = TorchEngine(
        folder, version=Version(0, 0), max_rows=rows, dtype="bfloat16", device=device, max_length=prompt + tokens,
        threads=torch.get_num_threads(), answer_s=300.0,
    )  # fmt: skip
    ids = np.random.default_rng(1).integers(0, info.vocab_size, prompt).astype(np.int32)
    try:
        asyncio.run(engine.generate(ids, 1, SamplingParams(1.0, 4, ())))
        with _Clock(world.device) as clock:
            done = asyncio.run(engine.generate(ids, rows, SamplingParams(1.0, tokens, ())))
    finally:
        engine.close()
    n["engine_tokens_per_s"] = sum(len(c.token_ids) for c in done) / clock.seconds
    sampled = tuple(to_trajectory(c, f"0/p#0.{i}", prompt, float(i % 2), info, True) for i, c in enumerate(done))
    group = Group("0/p", Prompt("p", ids, "", "", "check"), "g0", 0, 1.0, sampled, 1.0)
    _restore(policy, folder)
    found = rows_of([group], 0, 0, info)
    index = micro_batches([r.size for r in found], range(len(found)), 4096)
    batches = [collate(found, part, info, False, False) for part in index]
    scores = score(policy, found, batches, False, info, world)
    gaps = torch.cat([(p.logp - p.batch.rollout_logp)[p.batch.predict_mask].double() for p in scores.parts])
    n["engine_drift"], n["engine_k3"] = float(scores.drift.mean()), float((gaps.exp() - 1 - gaps).mean())
    _line(f"torch engine, {rows} responses of {tokens} tokens: {n['engine_tokens_per_s']:.0f} tokens/s")
    _line(f"learner against engine at the same weights: drift {n['engine_drift']:.4f}, k3 {n['engine_k3']:.2e}")


def _restore(policy: Policy, folder: Path) -> None:
    """The weights of the folder again, which the engine has."""
    reshard(policy)
    fill_sharded(policy.model, folder)


def _logp_error(device: torch.device) -> float:
    """Largest error of bfloat16 log-probs on this device, against float64."""
    seeded = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 256, generator=seeded).to(torch.bfloat16) for n in (64, 4096))
    targets = torch.randint(0, 4096, (64,), generator=seeded)
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), dim=-1).gather(1, targets[:, None])[:, 0]
    logp, _ = token_logprobs(hidden.to(device), weight.to(device), targets.to(device), 1.0)
    return float((logp.cpu().double() - exact).abs().max())


def _wrong(n: dict[str, float]) -> list[str]:
    """What must not be, in words."""
    wrong = [f"{name} is {value}" for name, value in n.items() if not math.isfinite(value)]
    if n["stepped"] != 1:
        wrong.append(f"only {n['stepped']:.0%} of the updates made a step")
    if n["grad_norm"] <= 0:
        wrong.append("the gradient is 0")
    if n["forced"] != 1:
        wrong.append(f"{n['forced']:.1%} of the rows were replayed, not all")
    if n["logp_error"] > 1e-3:
        wrong.append(f"log-probs of bfloat16 hidden states are off by {n['logp_error']:.1e}")
    if n["engine_drift"] > DRIFT_BOUND or n["engine_k3"] > K3_BOUND:
        wrong.append(f"learner and engine disagree: drift {n['engine_drift']:.3f}, k3 {n['engine_k3']:.1e}")
    return wrong


class _Clock:
    """Wall time of what is inside, with the device's queue emptied before and after."""

    seconds = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> _Clock:
        self._wait()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _seconds(what: Callable[[], object], world: World, repeats: int = 2) -> float:
    """The fastest of some runs."""
    found = []
    for _ in range(repeats):
        with _Clock(world.device) as clock:
            what()
        found.append(clock.seconds)
    return min(found)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _line(text: str) -> None:
    print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
