"""Tokens per second of the embedded engine against `model.generate` of transformers, in one interleaved run.

Both sides sample the same prompts of the same model at temperature 1 on the same number of threads. The engine
also returns log-probs, routes and versions; `generate` returns tokens only. The first line forces every response to
its full length; in the second a response ends at a stop token, and each side is credited with the tokens it made.

    python tools/bench/generator.py [--pairs 7] [--model FOLDER] [--cache static]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Before torch is imported: spinning OpenMP threads would eat the other side's time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.models.load import load_model
from asyncrl.types import SamplingParams, Version

STOP = 1
"""Token that ends a response in the second line."""


@dataclass(frozen=True)
class Load:
    """What is sampled: `prompts` of 4 to 12 tokens, `group` responses to each, at most `new` tokens per response."""

    prompts: list[np.ndarray]
    group: int
    new: int


@dataclass(frozen=True)
class Cost:
    """Tokens made, CPU seconds of the process and wall seconds."""

    tokens: int
    cpu_s: float
    wall_s: float


def quickstart_model(folder: Path) -> Path:
    """A random model of the quickstart's shape (0.2 M parameters)."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=STOP,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def engine_side(engine: TorchEngine, load: Load, stop: tuple[int, ...]) -> Callable[[], int]:
    """One run: all prompts at once, as a generator process submits them."""
    sampling = SamplingParams(1.0, load.new, stop)

    async def sample() -> int:
        groups = await asyncio.gather(*(engine.generate(p, load.group, sampling) for p in load.prompts))
        return sum(len(c.token_ids) for group in groups for c in group)

    return lambda: asyncio.run(sample())


def generate_side(model: PreTrainedModel, load: Load, stop: tuple[int, ...], cache: str) -> Callable[[], int]:
    """One run: one left-padded batch, the usual way to call generate."""
    width = max(len(p) for p in load.prompts)
    ids = torch.zeros(len(load.prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for line, prompt in enumerate(load.prompts):
        ids[line, width - len(prompt) :] = torch.from_numpy(prompt).long()
        mask[line, width - len(prompt) :] = 1
    ids, mask = ids.repeat_interleave(load.group, 0), mask.repeat_interleave(load.group, 0)
    options: dict[str, object] = {"max_new_tokens": load.new, "do_sample": True, "temperature": 1.0, "top_k": 0}
    options |= {"top_p": 1.0, "pad_token_id": 0, "use_cache": True, "disable_compile": True}
    options |= {"eos_token_id": list(stop)} if stop else {"min_new_tokens": load.new}
    if cache != "dynamic":
        options["cache_implementation"] = cache

    def sample() -> int:
        with torch.inference_mode():
            new = model.generate(input_ids=ids, attention_mask=mask, **options)[:, width:]
        if not stop:
            return int(new.numel())
        ended = torch.isin(new, torch.tensor(stop))
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, new.shape[1])
        return int(lengths.sum())

    return sample


def measure(run: Callable[[], int]) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = run()
    return Cost(tokens, time.process_time() - cpu, time.perf_counter() - wall)


def compare(name: str, ours: Callable[[], int], theirs: Callable[[], int], pairs: int) -> str:
    """One line: median tokens per second of both sides and the median of the paired ratios."""
    measure(ours), measure(theirs)
    costs = [(measure(ours), measure(theirs)) for _ in range(pairs)]

    def rate(cost: Cost, clock: str) -> float:
        return cost.tokens / float(getattr(cost, clock))

    parts = []
    for clock in ("cpu_s", "wall_s"):
        a, b = (statistics.median(rate(pair[side], clock) for pair in costs) for side in (0, 1))
        ratio = statistics.median(rate(x, clock) / rate(y, clock) for x, y in costs)
        parts.append(f"{clock[:-2]}: engine {a:,.0f} tok/s, generate {b:,.0f} tok/s, ratio {ratio:.2f}")
    tokens = [statistics.median(pair[side].tokens for pair in costs) for side in (0, 1)]
    return f"{name} (tokens {tokens[0]:.0f} / {tokens[1]:.0f}, {pairs} pairs): " + "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="interleaved runs of both sides; medians are printed")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens per response")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", default="dynamic", choices=["dynamic", "static"], help="KV cache of generate")
    parser.add_argument("--model", default=None, help="model folder; default: random weights of the quickstart's shape")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model) if args.model else quickstart_model(Path(scratch))
        model = load_model(folder, "float32")
        vocab_size = int(model.config.get_text_config().vocab_size)
        rng = np.random.default_rng(0)
        lengths = rng.integers(4, 13, args.prompts)
        prompts = [rng.integers(2, vocab_size, length).astype(np.int32) for length in lengths]
        load = Load(prompts, args.group, args.new)
        engine = TorchEngine(folder, version=Version(0, 0), threads=args.threads, max_rows=args.prompts * args.group)
        print(f"batch {args.prompts * args.group}, {args.threads} thread(s), float32, generate's cache {args.cache}")
        for name, stop in ((f"forced {args.new} tokens", ()), ("sampled lengths", (STOP,))):
            ours, theirs = engine_side(engine, load, stop), generate_side(model, load, stop, args.cache)
            print(compare(name, ours, theirs, args.pairs), flush=True)
        engine.close()


if __name__ == "__main__":
    main()
