"""The memory of a run by its config, as a table for people: what a learner's rank, the host and a generator need.

Imports no torch: `asyncrl config` answers at once. The arithmetic is in asyncrl.models.memory.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import psutil

from asyncrl.config import Config
from asyncrl.models.memory import BYTES, GIB, Estimate, Plan, Shape, estimate, read_shape

SLACK = 0.05
"""Share of the memory that is left to the allocator, the CUDA context and the libraries."""


def plan_of(config: Config, longest_prompt: int, device: str | None = None) -> Plan:
    """What a rank does when every response is as long as allowed. device: cpu or cuda where learner.device is auto."""
    if config.learner.device != "auto" or device is None:
        cuda = config.learner.device == "cuda" or (config.learner.device == "auto" and _gpu_bytes() > 0)
        device = "cuda" if cuda else "cpu"
    a, m, s = config.algorithm, config.model, config.learner
    length = longest_prompt + config.sampling.max_new_tokens
    share = -(-a.groups_per_update // s.ranks) * a.group_size * length
    return Plan(
        dtype=m.dtype,
        ranks=s.ranks,
        tokens=min(max(s.micro_batch_tokens, length), share),
        length=length,
        share=share,
        checkpointing=s.activation_checkpointing,
        logprob_chunk=s.logprob_chunk,
        device=device,
        attention=m.attention,
        router_dtype=m.router_dtype,
        routes_replayed=a.replays,
        routers_compared=a.compares_routers,
        fused=s.scoring == "auto" and share <= s.micro_batch_tokens,
    )


def report(config: Config, longest_prompt: int, device_gib: float | None = None) -> list[str]:
    """The table and what fits, in lines. device_gib: a GPU's memory; default: of the first GPU, else a part of RAM.

    Raises ConfigError when the model folder cannot be read.
    """
    # Whoever names a device's memory means a GPU.
    plan = plan_of(config, longest_prompt, None if device_gib is None else "cuda")
    shape, kl = read_shape(config.model.path), config.algorithm.kl
    if kl.coef:
        plan = replace(plan, reference=read_shape(kl.reference or config.model.path))
    found = estimate(shape, plan)
    lines = [
        f"memory of one of {plan.ranks} learner ranks for responses of {plan.length} tokens with their prompt "
        f"and micro-batches of {plan.tokens} tokens ({plan.dtype}, {shape.parameters / 1e9:.2f} B parameters)"
    ]
    lines += [_line(item.name, item.bytes) for item in found.always]
    lines += [_line(item.name, item.bytes) for item in found.then]
    lines.append(_line(f"peak ({found.moment})", found.total))
    lines += fits(shape, plan, found, _memory(plan) if device_gib is None else device_gib * GIB)
    if config.weights.carrier == "collective" and plan.device == "cuda":
        lines.append(
            "rank 0's GPU has a sender per server beside it: about 1 GiB and weights.bucket_bytes="
            f"{config.weights.bucket_bytes / 2**20:.0f} MiB each"
        )
    lines += ["memory of the host", *(_line(name, size) for name, size in _host(config, shape, plan))]
    if config.generator.engine == "sglang":
        lines.append("memory of an SGLang server: what its mem-fraction-static says")
    elif config.generator.count:
        lines += ["memory of one generator", *(_line(name, size) for name, size in _generator(config, shape, plan))]
    return lines


def fits(shape: Shape, plan: Plan, found: Estimate, memory: float) -> list[str]:
    """One sentence: whether the plan fits into memory bytes, and what is the most that does, or what would help."""
    usable = memory * (1 - SLACK)
    room = f"{memory / GIB:.4g} GiB (a twentieth is left free)"
    most = largest_tokens(shape, plan, usable)
    if found.total <= usable:
        return [
            f"fits in {room} at learner.micro_batch_tokens={plan.tokens}: {found.total / GIB:.2f} GiB; "
            f"the largest micro-batch that fits: {most} tokens"
        ]
    said = f"does not fit in {room} at learner.micro_batch_tokens={plan.tokens}: {found.total / GIB:.2f} GiB; "
    if most:
        return [f"{said}the largest micro-batch that fits: {most} tokens"]
    return [said + _remedy(shape, plan, usable)]


def largest_tokens(shape: Shape, plan: Plan, usable: float) -> int:
    """Most tokens of a micro-batch with which the peak stays within usable bytes; 0 when one row is too much."""

    def total(tokens: int) -> int:
        return estimate(shape, replace(plan, tokens=tokens, fused=plan.fused and tokens >= plan.share)).total

    if total(min(plan.length, plan.share)) > usable:
        return 0
    low, high = min(plan.length, plan.share), plan.share
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle) <= usable else (low, middle - 1)
    return low


def _remedy(shape: Shape, plan: Plan, usable: float) -> str:
    """What makes one row fit."""
    if not plan.checkpointing:
        most = largest_tokens(shape, replace(plan, checkpointing=True), usable)
        if most:
            return f"with learner.activation_checkpointing=true {most} tokens fit"
    ranks = plan.ranks
    while ranks < 1024:
        ranks *= 2
        most = largest_tokens(shape, replace(plan, checkpointing=True, ranks=ranks), usable)
        if most:
            return f"with learner.activation_checkpointing=true and learner.ranks={ranks} {most} tokens fit"
    return "one response is too long for it on any number of ranks: lower sampling.max_new_tokens"


def _memory(plan: Plan) -> float:
    """Bytes for one rank: of the first GPU, or the ranks' part of this host's memory."""
    return _gpu_bytes() if plan.device == "cuda" else psutil.virtual_memory().total / plan.ranks


def _gpu_bytes() -> float:
    """Memory of the first GPU, 0 without one; asks the driver's tool, because importing torch takes seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0.0
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return float(done.stdout.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):  # a tool without a driver
        return 0.0


def _host(config: Config, shape: Shape, plan: Plan) -> list[tuple[str, float]]:
    token = 4 + 4 + 1
    if config.full_routes:
        token += shape.moe_layers * shape.top_k * (1 if shape.experts <= 256 else 2)
    found: list[tuple[str, float]] = [
        ("a rank's take (ids, log-probs, masks, routes)", plan.share * token * config.staleness.updates_per_take),
        ("rank 0: the copy that is published", shape.parameters * BYTES[plan.dtype]),
    ]
    if kept := _taken(config, shape):
        found.append(("its routes under pi_old", plan.share * kept * config.staleness.updates_per_take))
    if config.weights.carrier in ("shm", "collective"):
        # One more than are kept while the next one is written.
        size = 1 if config.weights.quantize == "fp8_block" else BYTES[plan.dtype]
        found.append(("versions in shared memory", shape.parameters * size * (config.weights.keep_versions + 1)))
    return found


def _taken(config: Config, shape: Shape) -> int:
    """Bytes per token that the scoring pass of a take of several updates leaves on the host besides pi_old."""
    a, route = config.algorithm, 1 if shape.experts <= 256 else 2
    compares = a.compares_routers
    if config.staleness.updates_per_take == 1 or not (compares or a.routes == "r2"):
        return 0
    return shape.moe_layers * shape.top_k * (route + 4 * compares)


def _generator(config: Config, shape: Shape, plan: Plan) -> list[tuple[str, float]]:
    size = min(4, BYTES[plan.dtype])
    rows = min(256, config.generator.groups_in_flight * config.algorithm.group_size)
    cache = rows * plan.length * shape.layers * shape.kv_heads * (shape.head_dim + shape.value_dim) * size
    return [("weights", shape.parameters * size), (f"keys and values of {rows} responses at most", cache)]


def _line(name: str, size: float) -> str:
    amount = f"{size / GIB:9.1f} GiB" if size >= GIB else f"{size / 2**20:9.1f} MiB"
    return f"  {name:<48} {amount}"
