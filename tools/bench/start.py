"""Peak host memory of a rank that starts from a model folder, and of an export: a shard and one tensor, not the model.

Usage: start.py [--hidden 512] [--layers 6] [--ranks 1 2]. Builds a random Qwen3-MoE (about 200 MB in float32) and
starts it on gloo ranks with `fill_sharded` and with `load_model`, each in processes of its own. Prints MiB above what
the process held before: of its own memory (anonymous, what cannot be given back), sampled every 2 ms.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
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
from tests.helpers.tiny_models import qwen3_moe

MIB = 2**20


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


def in_ranks(job: Callable[[Config, Path, World], list[str]], config: Config, folder: Path, size: int) -> None:
    """Fork the ranks, one process each, and print what every one says."""
    sys.stdout.flush()
    children = []
    for number in range(size):
        child = os.fork()
        if not child:
            try:
                torch.set_num_threads(1)
                store = f"file://{folder}/store-{job.__name__}-{size}"
                dist.init_process_group("gloo", init_method=store, rank=number, world_size=size)
                for line in job(config, folder, World(number, size, torch.device("cpu"))):
                    print(f"rank {number} of {size}: {line} MiB", flush=True)
                dist.destroy_process_group()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        sys.exit("a rank failed")


def main() -> None:
    """Build the model, then one set of processes after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        child = os.fork()
        if not child:
            model = qwen3_moe(hidden=options.hidden, layers=options.layers, experts=8, vocab=4096)
            model.save_pretrained(folder / "model", max_shard_size="50MB")
            sizes = [4 * p.numel() for p in model.parameters()]
            print(f"model {sum(sizes) / MIB:.0f} MiB, its largest tensor {max(sizes) / MIB:.0f} MiB", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        config = validate({"model": {"path": str(folder / "model")}, "algorithm": {"rdc": {"mode": "off"}}})
        in_ranks(loaded, config, folder, 1)
        for size in options.ranks:
            in_ranks(started, config, folder, size)
        in_ranks(exported, config, folder, 1)


if __name__ == "__main__":
    main()
