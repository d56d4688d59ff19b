"""What a turn of a conversation costs in the embedded engine, with and without the prefix that it keeps.

Episodes of several turns run at the same time: a prompt, a response, what a tool said, the next response, ... Both
sides sample the same tokens' worth of work, in turn; the one without gives its turns no name, so that each one is run
from its first token. Prints tokens that were run of prompts, and seconds, per turn.

    python tools/bench/turns.py [--pairs 5] [--decoder flat] [--hidden 64]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Before torch is imported: spinning OpenMP threads would eat the other side's time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.engines import torch_engine
from asyncrl.engines.base import Turn
from asyncrl.engines.flat import FlatDecoder
from asyncrl.engines.module_decoder import CachedDecoder
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.types import SamplingParams, Version

DECODERS = {"flat": FlatDecoder, "cached": CachedDecoder}


@dataclass(frozen=True)
class Load:
    """Episodes at a time, each of `turns` responses of `new` tokens: the first to `prompt` tokens, then to `heard`."""

    episodes: int
    turns: int
    prompt: int
    new: int
    heard: int


def save_model(folder: Path, hidden: int) -> Path:
    """A random qwen3_moe of 3 layers and 8 experts; hidden 64 is the quickstart's size."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


async def episode(engine: TorchEngine, load: Load, number: int, keep: bool) -> None:
    """One conversation, from its first turn to forget."""
    rng = np.random.default_rng(number)
    sampling, name = SamplingParams(1.0, load.new, ()), f"e{number}"
    ids, rows = rng.integers(0, 256, load.prompt).astype(np.int32), 0
    for _ in range(load.turns):
        (done,) = await engine.generate(ids, 1, sampling, turn=Turn(name, rows) if keep else None)
        rows = len(ids) + len(done.token_ids) - 1
        ids = np.concatenate((ids, done.token_ids, rng.integers(0, 256, load.heard))).astype(np.int32)
    engine.forget(name)


def measure(engine: TorchEngine, load: Load, keep: bool) -> tuple[float, float, float]:
    """Prompt tokens run, CPU seconds and wall seconds, each per turn."""

    async def all_of_them() -> None:
        await asyncio.gather(*(episode(engine, load, number, keep) for number in range(load.episodes)))

    before, cpu, wall = engine.stats()["prompt_tokens"], time.process_time(), time.perf_counter()
    asyncio.run(all_of_them())
    spent = (engine.stats()["prompt_tokens"] - before, time.process_time() - cpu, time.perf_counter() - wall)
    turns = load.episodes * load.turns
    return spent[0] / turns, spent[1] / turns, spent[2] / turns


def compare(engine: TorchEngine, load: Load, pairs: int) -> str:
    """Medians of both sides and of the paired ratios."""
    for keep in (True, False):
        measure(engine, load, keep)
    costs = [(measure(engine, load, True), measure(engine, load, False)) for _ in range(pairs)]

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    lines = []
    for number, (what, unit, factor) in enumerate(
        [("prompt tokens", "", 1), ("CPU", " ms", 1e3), ("wall", " ms", 1e3)]
    ):
        with_it, without = (median([pair[side][number] for pair in costs]) * factor for side in (0, 1))
        ratio = median([pair[1][number] / pair[0][number] for pair in costs])
        lines.append(f"  {what} per turn: kept {with_it:.2f}{unit}, not kept {without:.2f}{unit}, ratio {ratio:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="interleaved runs of both sides; medians are printed")
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=16, help="tokens per response")
    parser.add_argument("--heard", type=int, nargs="+", default=[16, 128], help="tokens of an observation")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--decoder", default="flat", choices=DECODERS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    disable_progress_bar()
    torch_engine.make_decoder = DECODERS[args.decoder]  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_model(Path(scratch), args.hidden)
        engine = TorchEngine(folder, version=Version(0, 0), threads=args.threads, max_rows=args.episodes)
        for heard in args.heard:
            load = Load(args.episodes, args.turns, args.prompt, args.new, heard)
            print(f"{args.decoder} decoder, hidden {args.hidden}, {load}, {args.pairs} pairs")
            print(compare(engine, load, args.pairs), flush=True)
        engine.close()


if __name__ == "__main__":
    main()
