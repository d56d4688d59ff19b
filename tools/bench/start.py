"""Peak host memory of a rank that starts from a model folder, and of an export: a shard and one tensor, not the model.

Usage: start.py [--hidden 512] [--layers 6] [--ranks 1 2]. Builds a random Qwen3-MoE (about 200 MB in float32) and
starts it on gloo ranks with `fill_sharded` and with `load_model`, each in processes of its own. Prints MiB above what
the process held before: of its own memory (anonymous, what cannot be given back), sampled every 2 ms.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.config import Config, save_config, validate
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.export import export_step
from asyncrl.learner.publish import export
from asyncrl.learner.shard import World, build_policy
from asyncrl.learner.start import model_fingerprint
from asyncrl.learner.step import Updater
from asyncrl.learner.stored import Progress
from asyncrl.models.describe import describe
from asyncrl.models.load import load_model
from asyncrl.process import end
from tests.helpers.tiny_models import qwen3_moe

MIB = 2**20
LIMIT_S = 600
"""Longest time of one set of processes, and of a collective."""

Job = Callable[[Config, Path, World], list[str]]
"""What the ranks of one set do, and the lines that each says."""


def own_bytes() -> int:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class Peak:
    """Largest own_bytes() within a block, above its beginning; `end` is that of its end."""

    def __enter__(self) -> Peak:
        self.before, self.most, self._over = own_bytes(), 0, False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over:
            self.most = max(self.most, own_bytes() - self.before)
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.end = own_bytes() - self.before
        self._over = True
        self._thread.join()


def started(config: Config, folder: Path, world: World) -> list[str]:
    """Lines on the sharded start, the export of the live policy, a checkpoint and the export of that."""
    with Peak() as peak:
        policy = build_policy(config.model, config.learner, False, world)
    lines = [f"sharded start: peak {peak.most / MIB:.0f}, held after it {peak.end / MIB:.0f}"]
    with Peak() as peak:
        export(policy, config.model.path, folder / f"out{world.size}", world)
    lines.append(f"export of the live policy: peak {peak.most / MIB:.0f}")
    updater = Updater(policy, config.learner, config.algorithm, world)
    run = folder / f"run{world.size}"
    run.mkdir(exist_ok=True)
    save_config(config, run / "config.yaml")
    mark = model_fingerprint(config, describe(config.model.path))
    assert Checkpoints(run, mark, 1, world).save(policy, updater, Progress(0, 1, 1, 0.0))
    return lines


def loaded(config: Config, folder: Path, world: World) -> list[str]:
    """A line on a whole load."""
    with Peak() as peak:
        model = load_model(config.model.path, "float32")
    assert model is not None
    return [f"load_model: peak {peak.most / MIB:.0f}, held after it {peak.end / MIB:.0f}"]


def exported(config: Config, folder: Path, world: World) -> list[str]:
    """A line on the offline export of the checkpoint of the largest world."""
    run = max(folder.glob("run*"))
    with Peak() as peak:
        export_step(run, "last", folder / "offline")
    return [f"asyncrl export: peak {peak.most / MIB:.0f}"]


def settings(folder: Path) -> Config:
    """The config of the model in folder."""
    return validate({"model": {"path": str(folder / "model")}, "algorithm": {"rdc": {"mode": "off"}}})


def rank(job: Job, folder: Path, number: int, size: int) -> None:
    """One rank of a job, in a process of its own; prints what it says."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{job.__name__}-{size}"
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=size, timeout=limit)
    for line in job(settings(folder), folder, World(number, size, torch.device("cpu"))):
        print(f"rank {number} of {size}: {line} MiB", flush=True)
    dist.destroy_process_group()
    # As a role ends: gloo's threads may abort a process that takes itself apart.
    end(0)


def build(folder: Path, hidden: int, layers: int) -> None:
    """Write the model, in a process of its own, so that no other one held it."""
    model = qwen3_moe(hidden=hidden, layers=layers, experts=8, vocab=4096)
    model.save_pretrained(folder / "model", max_shard_size="50MB")
    sizes = [4 * p.numel() for p in model.parameters()]
    print(f"model {sum(sizes) / MIB:.0f} MiB, its largest tensor {max(sizes) / MIB:.0f} MiB", flush=True)


def in_processes(target: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> None:
    """Spawn one process per tuple and wait for all, at most LIMIT_S; ends with a message when one failed."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=args, daemon=True) for args in arguments]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    if any(process.exitcode != 0 for process in processes):
        sys.exit("a process failed, or did not end in time")


def in_ranks(job: Job, folder: Path, size: int) -> None:
    """All ranks of a job."""
    in_processes(rank, [(job, folder, number, size) for number in range(size)])


def main() -> None:
    """Build the model, then one set of processes after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        in_processes(build, [(folder, options.hidden, options.layers)])
        in_ranks(loaded, folder, 1)
        for size in options.ranks:
            in_ranks(started, folder, size)
        in_ranks(exported, folder, 1)


if __name__ == "__main__":
    main()
