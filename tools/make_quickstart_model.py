#!/usr/bin/env python3
"""Build the warm-started quickstart model once: `make_quickstart_model.py OUT [options] [task.key=value ...]`.

Trains on one thread for about a minute and writes a Hugging Face folder. The recipe is stored in
it as recipe.json; when OUT already has the same recipe nothing is done. The task (and so the
held-out set, which no demonstration contains) comes from the run config.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config import Config

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 1
"""Raised when the same options give another model."""
# One thread and no spinning, set before torch loads OpenMP. Nothing may ask a hub.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}


def main(argv: list[str] | None = None) -> int:
    os.environ.update(ENVIRONMENT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    args = parse(argv)
    from asyncrl.config import load_config
    from asyncrl.errors import AsyncRLError

    try:
        config = load_config(args.config, [f"model.path={args.out}", *args.overrides])
        return build(args, config)
    except (AsyncRLError, ForeignFolder) as exc:
        print(f"make_quickstart_model: {exc}", file=sys.stderr)
        return 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("overrides", nargs="*", help="settings over the config, for example task.eval_size=100")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml", help="run config")
    parser.add_argument("--seed", type=int, default=0, help="seeds weights, demonstrations and sampling")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the recipe's)")
    parser.add_argument("--batch", type=int, help="demonstrations per step (default: the recipe's)")
    parser.add_argument(
        "--min-expert-share",
        type=float,
        default=0.02,
        help="refuse a model with an expert chosen less often (even: 0.125); drift is blind to a dead expert",
    )
    return parser.parse_intermixed_args(argv)  # settings may follow options


def made_of(config: Config) -> dict[str, object]:
    """The settings of the task by which the demonstrations are drawn and written."""
    keys = {
        "name", "min_terms", "max_terms", "digits", "train_size", "eval_size", "eval_min_terms", "seed", "template",
        "chat", "answer",
    }  # fmt: skip
    return config.task.model_dump(mode="json", include=keys)


def build(args: argparse.Namespace, config: Config) -> int:
    from demonstrations import Recipe

    chosen = {k: getattr(args, k) for k in ("seed", "steps", "batch") if getattr(args, k) is not None}
    recipe = Recipe(**chosen)
    wanted = {"format": FORMAT, "recipe": recipe.to_dict(), "task": made_of(config)}
    if up_to_date(args.out, wanted):
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.out.parent / f".{args.out.name}.{os.getpid()}"
    try:
        report = make(recipe, config, temporary, args.min_expert_share)
        (temporary / "recipe.json").write_text(json.dumps({**wanted, "report": report}, indent=1) + "\n")
        replace(temporary, args.out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{args.out}: written")
    return 0


class ForeignFolder(ValueError):
    """The folder to write holds something else."""


def up_to_date(folder: Path, wanted: dict[str, Any]) -> bool:
    """True, and said, when the model in folder was made as wanted. ForeignFolder when no tool of ours made it."""
    found = read_recipe(folder)
    if found is not None and {k: found.get(k) for k in wanted} == wanted:
        (folder / "model.safetensors").touch()  # newer than its sources, for make
        print(f"{folder}: up to date")
        return True
    if found is None and folder.exists() and any(folder.iterdir()):
        raise ForeignFolder(f"{folder} exists and was not made by this tool; name another folder")
    return False


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """recipe.json of a complete model folder, else None."""
    if not (folder / "model.safetensors").is_file():
        return None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "recipe.json").read_text())
        return found if isinstance(found, dict) else None
    return None


def make(recipe: Any, config: Config, folder: Path, min_share: float) -> dict[str, Any]:
    """Train, evaluate, save. Returns what was measured."""
    import torch
    import warm_start
    from transformers.utils import logging

    from asyncrl.errors import TaskError
    from asyncrl.tasks.chain_sum import build_items, demonstrations

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    _, held_out = build_items(config.task)
    model = warm_start.make_model(recipe.seed)
    share = warm_start.train(model, demonstrations(config.task), recipe, Progress(recipe.steps))
    if share < min_share:
        raise TaskError(f"an expert gets only {share:.4f} of its layer's tokens; train longer or with another --seed")
    report: dict[str, Any] = {"min_expert_share": round(share, 4), "held_out": len(held_out)}
    for name, greedy in (("sampled", False), ("greedy", True)):
        answers = warm_start.evaluate(model, held_out, greedy, config.sampling.max_new_tokens, recipe.seed)
        report[name] = {
            "accuracy": round(answers.accuracy, 4),
            "length": round(answers.length, 2),
            "by_terms": {terms: round(value, 3) for terms, value in answers.by_terms.items()},
        }
        by_terms = ", ".join(f"{terms} terms {value:.2f}" for terms, value in answers.by_terms.items())
        print(f"held-out {name}: accuracy {answers.accuracy:.3f} ({by_terms}), mean length {answers.length:.1f}")
    warm_start.save(model, folder)
    report["cpu_seconds"] = round(time.process_time(), 1)
    print(f"min expert share {share:.3f} (even: 0.125), {report['cpu_seconds']} CPU seconds")
    return report


def replace(new: Path, out: Path) -> None:
    """Put `new` in the place of `out` by renames; readers that mapped the old files keep them."""
    old = new.with_name(new.name + ".old")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


class Progress:
    """One line that is rewritten on a terminal, and ten lines elsewhere."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.every = 20 if sys.stdout.isatty() else max(1, steps // 10)
        self.loss = 0.0

    def __call__(self, step: int, loss: float) -> None:
        # Batches of short and long sequences alternate: smooth over them.
        self.loss = loss if step == 1 else 0.95 * self.loss + 0.05 * loss
        last = step == self.steps
        if step % self.every and not last:
            return
        line = f"warm start: step {step}/{self.steps}, loss {self.loss:.3f}, {time.process_time():.0f} CPU s"
        if sys.stdout.isatty():
            print(f"\r{line}", end="\n" if last else "", flush=True)
        else:
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
