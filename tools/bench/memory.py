"""Measure the memory of the learner's update: how it grows with the response length, and what saves some.

    tools/bench/memory.py                                      # the table of docs/memory.md, about 10 minutes
    tools/bench/memory.py --lengths 2048 --dtypes float32      # a part of it
    tools/bench/memory.py --lengths 2048 --ranks 2             # per rank; the fullest rank is printed

Every point is a fresh run of the real code under torchrun, in the environment of a role: build_policy, a small update
that makes the optimizer's moments, then one update on random groups. On a CPU it reads the high-water mark of the
resident memory (VmHWM, set back before that update), on a GPU torch.cuda.max_memory_allocated. `total` counts from
before the model was built; `growth` from after the small update. `estimated` is what `asyncrl config` says of it.

The environment of a role keeps freed blocks in the heap, where they leave holes. --malloc map, the default here, gives
every block of 4 MiB its own mapping instead, so that the mark shows what tensors need; --malloc role shows the process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from asyncrl.launcher import STANDALONE  # noqa: E402
from asyncrl.process import role_environment  # noqa: E402

MIB = 2**20
PROMPT = 16
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Point:
    """What is measured: two responses of `length` tokens per rank, in one micro-batch (fused) or in two."""

    length: int
    dtype: str = "float32"
    checkpointing: bool = False
    fused: bool = True
    ranks: int = 1
    routes: str = "native"
    device: str = "cpu"

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return PROMPT + self.length

    def settings(self, model: str) -> dict[str, Any]:
        """Sections of the config."""
        return {
            "model": {"path": model, "dtype": self.dtype},
            "sampling": {"max_new_tokens": self.length},
            "algorithm": {
                "groups_per_update": self.ranks, "group_size": 2, "routes": self.routes, "rdc": {"mode": "observe"},
            },
            "learner": {
                "ranks": self.ranks, "device": self.device, "activation_checkpointing": self.checkpointing,
                "micro_batch_tokens": self.row * (2 if self.fused else 1),
                "scoring": "auto" if self.fused else "separate",
            },
        }  # fmt: skip


def measure(model: str, point: Point, workdir: Path, malloc: str = "map") -> dict[str, float]:
    """Bytes before, built, peak and estimated of the fullest rank. Raises CalledProcessError when the run fails."""
    out = workdir / "point.json"
    out.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "asyncrl.launcher", *STANDALONE, "--nproc-per-node", str(point.ranks), __file__,
        "--model", model, "--point", json.dumps(asdict(point)), "--out", str(out),
    ]  # fmt: skip
    env = role_environment(1) | {"PYTHONPATH": str(ROOT)}
    if malloc == "map":
        env["MALLOC_MMAP_THRESHOLD_"] = str(4 * MIB)
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=TIMEOUT_S)
    found: dict[str, float] = json.loads(out.read_text())
    return found


def run_point(model: str, point: Point, out: Path) -> None:
    """One rank: build, update on short rows, set the mark back, update on rows of the point's length."""
    import numpy as np
    import torch

    from asyncrl.config import validate
    from asyncrl.learner.batch import rows_of
    from asyncrl.learner.footprint import plan_of
    from asyncrl.learner.shard import build_policy, init_world
    from asyncrl.learner.step import Updater
    from asyncrl.learner.table import all_max
    from asyncrl.learner.update import run_update
    from asyncrl.models.describe import describe
    from asyncrl.models.load import skeleton
    from asyncrl.models.memory import estimate, read_shape
    from asyncrl.types import Group, Prompt
    from tests.learner.groups import make_trajectory

    config = validate(point.settings(model))
    torch.set_num_threads(1)
    world = init_world(TIMEOUT_S, config.learner.device)
    info = describe(model)
    rng = np.random.default_rng(world.rank)

    def rows(length: int) -> Any:
        prompt = Prompt("p", rng.integers(0, info.vocab_size, PROMPT).astype(np.int32), "", "", "bench")
        name = f"{world.rank}/p"
        group = tuple(
            make_trajectory(f"{name}#{i}", PROMPT, length, info, rng, ((0, 10**9),), float(i)) for i in range(2)
        )
        return rows_of([Group(name, prompt, "g", 0, 1.0, group, 1.0)], 0, 0, info)

    short, long = rows(16), rows(point.length)
    # Modules that come with the first model are not the model's memory.
    skeleton(model, "float32", config.model.attention, config.model.experts, world.device)
    before = resident(world.device)
    policy = build_policy(config.model, config.learner, point.routes == "r3", world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    built = 0.0
    for part in (short, long):
        built = resident(world.device)
        reset_peak(world.device)
        outcome = run_update(policy, updater, part, 0, 0.0, None, config, info, world)
    assert outcome.step.outcome == "stepped" and outcome.fused == point.fused, outcome.step
    found = all_max([before, built, peak(world.device)], world)
    if world.is_writer:
        whole = estimate(read_shape(config.model.path), plan_of(config, PROMPT))
        names = dict(zip(("before", "built", "peak"), found, strict=True))
        out.write_text(json.dumps(names | {"estimated": float(whole.total)}))
    torch.distributed.destroy_process_group()


def resident(device: Any) -> float:
    """Bytes in use now: of this process, or of its tensors on the GPU."""
    import torch

    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" else status("VmRSS")


def peak(device: Any) -> float:
    """Most bytes in use since reset_peak."""
    import torch

    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else status("VmHWM")


def reset_peak(device: Any) -> None:
    """Set the high-water mark back to what is in use now."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> float:
    """A field of /proc/self/status in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, field
    return float(found.group(1)) * 1024


def make_model(folder: Path, hidden: int, layers: int, vocab: int) -> str:
    """A random qwen3_moe with 16 experts, top-4, 4 heads and 2 key-value heads."""
    from tests.helpers.tiny_models import qwen3_moe

    model = qwen3_moe(hidden=hidden, layers=layers, experts=16, top_k=4, vocab=vocab, max_position_embeddings=32768)
    model.save_pretrained(folder)
    return str(folder)


def points(a: argparse.Namespace) -> Iterator[list[Point]]:
    """The lengths of one variant at a time."""
    for dtype, fused, checkpointing in itertools.product(a.dtypes, a.scoring, (False, True)):
        if checkpointing and not a.checkpointing:
            continue
        yield [Point(t, dtype, checkpointing, fused == "fused", a.ranks, a.routes, a.device) for t in a.lengths]


def fitted(tokens: list[int], growth: list[float]) -> tuple[float, float]:
    """(bytes per token, largest deviation from the line as a share of the largest value), least squares."""
    import numpy as np

    slope, offset = np.polyfit(tokens, growth, 1)
    residual = np.abs(np.asarray(growth) - (slope * np.asarray(tokens) + offset))
    return float(slope), float(residual.max() / max(growth))


def report(a: argparse.Namespace, model: str, workdir: Path) -> None:
    """Measure and print the table, a line per point and the fit of each variant."""
    print("| dtype | scoring | checkpointing | T | tokens | growth MiB | total MiB | estimated MiB | est/total |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    lines = []
    for variant in points(a):
        tokens, growth = [], []
        for p in variant:
            found = measure(model, p, workdir, a.malloc)
            total = found["peak"] - found["before"]
            tokens.append(p.row * (2 if p.fused else 1))
            growth.append(found["peak"] - found["built"])
            kind = f"{p.dtype} | {'fused' if p.fused else 'separate'} | {'yes' if p.checkpointing else 'no'}"
            numbers = f"{growth[-1] / MIB:.0f} | {total / MIB:.0f} | {found['estimated'] / MIB:.0f}"
            print(f"| {kind} | {p.length} | {tokens[-1]} | {numbers} | {found['estimated'] / total:.2f} |", flush=True)
        if len(variant) > 2:
            slope, deviation = fitted(tokens, growth)
            name = kind.replace(" |", ",")
            lines.append(f"{name}: {slope:.0f} bytes per token, off the line by {deviation:.1%} at most")
    print("\ngrowth over the tokens of a micro-batch (dtype, scoring, checkpointing):", *lines, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--scoring", nargs="+", default=["fused", "separate"], choices=["fused", "separate"])
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--routes", default="native", choices=["native", "r3"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--malloc", default="map", choices=["map", "role"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", help="a model folder; default: a random qwen3_moe of the three sizes below")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.point is not None:
        run_point(a.model, Point(**json.loads(a.point)), a.out)
        return
    os.environ.update(role_environment(1))
    with tempfile.TemporaryDirectory() as name:
        model = a.model or make_model(Path(name) / "model", a.hidden, a.layers, a.vocab)
        report(a, model, Path(name))


if __name__ == "__main__":
    main()
