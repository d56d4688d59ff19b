"""Carriers of weights against a gloo broadcast, in one interleaved run on this host.

One sender and receivers that are processes of their own. A read ends when the last receiver has the version in tensors
of its own, verified where the carrier verifies (gloo does not); `+ copy`: when it has copied them into its model, as
when a load that fails must leave the model as it was. Publishing (copy, check for non-finite values, checksums,
delta) is timed apart and counted in the second ratio; gloo has nothing to publish, its tensors lie in one buffer
already. shm is published twice: over the memory of a dropped version, as in a run whose readers let go of what they
loaded, and into new memory, by a publisher whose readers hold on. With fewer cores than processes the cost per byte
decides, not the method. CPU is that of all processes, publishing included: other programs on the host change it least.

    python tools/bench/weights.py [--rounds 5] [--megabytes 64] [--changed 0.01]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path

# Before torch is imported: spinning OpenMP threads would eat the other side's time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# For the receivers, as the launcher sets it: freed chunks are used again instead of being mapped anew.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.types import Version
from asyncrl.weights import shm, zmq

RECEIVERS = (1, 4)
METHODS = ("shm", "shm + copy", "zmq full", "zmq delta", "gloo", "gloo + copy")
Weights = dict[str, Tensor]


def join(store: str, rank: int) -> dict[int, dist.ProcessGroup]:
    """One gloo group for each number of receivers; rank 0 sends."""
    torch.set_num_threads(1)
    world = max(RECEIVERS) + 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    return {n: dist.new_group(list(range(n + 1))) for n in RECEIVERS}


def fill(model: Tensor, weights: Weights) -> None:
    """Copy the tensors into the model's, one behind the other."""
    for target, tensor in zip(model.split([t.numel() for t in weights.values()]), weights.values(), strict=True):
        target.copy_(tensor)


def receive(rank: int, store: str, nbytes: int, pipe: Connection) -> None:
    """A receiver: does what it is told until told to stop, and answers after each."""
    groups = join(store, rank)
    model, aside = (torch.zeros(nbytes // 2, dtype=torch.bfloat16) for _ in range(2))
    base: zmq.Base | None = None
    while (told := pipe.recv()) is not None:
        method, source, version, count = told
        used = time.process_time()
        if method.startswith("gloo"):
            dist.broadcast(aside.view(torch.uint8), 0, groups[count])
            if method == "gloo + copy":
                model.copy_(aside)
        elif method.startswith("shm"):
            weights = shm.read(source, version)
            if method == "shm + copy":
                fill(model, weights)
            del weights
        elif method == "base":
            base = zmq.Base(version, zmq.read(source, version))
        else:
            zmq.read(source, version, base if method == "zmq delta" else None)
        pipe.send(time.process_time() - used)
    dist.destroy_process_group()


def step(old: Weights, part: float) -> Weights:
    """The neighbouring bf16 for this part of the values, up or down."""

    def moved(tensor: Tensor) -> Tensor:
        sign = torch.randint(0, 2, tensor.shape, dtype=torch.int16) * 2 - 1
        return torch.where(torch.rand(tensor.shape) < part, tensor.view(torch.int16) + sign, tensor.view(torch.int16))

    return {name: moved(tensor).view(torch.bfloat16) for name, tensor in old.items()}


class Bench:
    """The sender and its measurements, in seconds by (method, receivers); publishing has receivers 0."""

    def __init__(self, megabytes: int, changed: float, scratch: Path) -> None:
        self.nbytes, self.changed = megabytes * 2**20, changed
        store = str(scratch / "store")
        spawn = multiprocessing.get_context("spawn")
        ends = [spawn.Pipe() for _ in range(max(RECEIVERS))]
        self.pipes = [near for near, _ in ends]
        self.processes = [
            spawn.Process(target=receive, args=(rank, store, self.nbytes, far), daemon=True)
            for rank, (_, far) in enumerate(ends, 1)
        ]
        for process in self.processes:
            process.start()
        self.groups = join(store, 0)
        self.shm, self.zmq = shm.Publisher(scratch / "weights"), zmq.Publisher()
        self.fresh = shm.Publisher(scratch / "fresh")
        self.held: list[Weights] = []
        torch.manual_seed(0)
        self.weights = {f"layer.{i}": torch.randn(2**21).mul(0.02).to(torch.bfloat16) for i in range(megabytes // 4)}
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.cpu: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.delta_bytes: list[int] = []

    def tell(self, count: int, method: str, source: str, version: Version) -> float:
        """Seconds until `count` receivers have done it."""
        flat = torch.cat(list(self.weights.values())) if method.startswith("gloo") else None
        start, used = time.perf_counter(), time.process_time()
        for pipe in self.pipes[:count]:
            pipe.send((method, source, version, count))
        if flat is not None:
            dist.broadcast(flat.view(torch.uint8), 0, self.groups[count])
        for pipe in self.pipes[:count]:
            if not pipe.poll(120):
                raise TimeoutError(f"{method} to {count} receivers takes more than 120 s")
            used -= pipe.recv()
        self.cpu[method, count].append(time.process_time() - used)
        return time.perf_counter() - start

    def round(self, number: int) -> None:
        """Each carrier once for each number of receivers, in another order each time."""
        base, version = Version(0, 2 * number), Version(0, 2 * number + 1)
        source = self.zmq.publish(base, self.weights.items())
        self.tell(max(RECEIVERS), "base", source, base)
        self.weights = step(self.weights, self.changed)
        sources = {"gloo": ""}
        publishers = (("shm", self.shm), ("shm new", self.fresh), ("zmq", self.zmq))
        for i in range(len(publishers)):
            name, publisher = publishers[(i + number) % len(publishers)]
            start, used = time.perf_counter(), time.process_time()
            sources[name] = publisher.publish(version, self.weights.items())
            self.seconds[name, 0].append(time.perf_counter() - start)
            self.cpu[name, 0].append(time.process_time() - used)
        # The newest `keep` and the one that was dropped.
        self.held = [*self.held, shm.read(sources["shm new"], version)][-3:]
        for i in range(len(METHODS)):
            method = METHODS[(i + number) % len(METHODS)]
            for count in RECEIVERS:
                before = self.zmq.counters["bytes"]
                self.seconds[method, count].append(self.tell(count, method, sources[method.split()[0]], version))
                if method == "zmq delta":
                    self.delta_bytes.append((self.zmq.counters["bytes"] - before) // count)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.shm.close()
        self.fresh.close()
        self.zmq.close()
        dist.destroy_process_group()


def report(bench: Bench) -> None:
    median = {key: statistics.median(values) for key, values in bench.seconds.items()}
    titles = ("", "receivers", "read ms", "min-max", "GB/s all", "x gloo", "and publish", "CPU ms")
    print("{:11} {:>9} {:>8} {:>11} {:>8} {:>7} {:>12} {:>7}".format(*titles))
    for count in RECEIVERS:
        for method in METHODS:
            key, values = (method, count), bench.seconds[method, count]
            publish = median.get((method.split()[0], 0), 0.0)
            spread = f"{min(values) * 1e3:.0f}-{max(values) * 1e3:.0f}"
            gloo = bench.seconds["gloo", count]
            # Ratios of one round each: what loads the host loads both sides.
            reads = statistics.median(g / v for g, v in zip(gloo, values, strict=True))
            whole = statistics.median(g / (v + publish) for g, v in zip(gloo, values, strict=True))
            parts = bench.cpu[key], bench.cpu.get((method.split()[0], 0), [0.0])
            cpu = sum(statistics.median(part) for part in parts)
            rate = count * bench.nbytes / median[key] / 1e9
            row = f"{method:11} {count:9} {median[key] * 1e3:8.0f} {spread:>11} {rate:8.2f}"
            print(f"{row} {reads:7.2f} {whole:12.2f} {cpu * 1e3:7.0f}")
    for name in ("shm", "shm new", "zmq"):
        print(f"publish {name}: {median[name, 0] * 1e3:.0f} ms, {bench.nbytes / median[name, 0] / 1e9:.2f} GB/s")
    ratio = bench.nbytes / statistics.median(bench.delta_bytes)
    print(f"delta at {100 * bench.changed:g} % changed: {ratio:.0f}x smaller (wanted 40 at 1 %)")
    pairs = zip(bench.seconds["shm new", 0], bench.seconds["shm", 0], strict=True)
    print(f"publishing over old memory: {statistics.median(new / old for new, old in pairs):.2f}x faster than into new")
    most = max(RECEIVERS)
    for ours, theirs in (("shm", "gloo"), ("shm + copy", "gloo + copy"), ("shm + copy", "gloo")):
        rounds = zip(bench.seconds[theirs, most], bench.seconds[ours, most], bench.seconds["shm", 0], strict=True)
        times = statistics.median(gloo / (read + publish) for gloo, read, publish in rounds)
        rounds = zip(bench.cpu[theirs, most], bench.cpu[ours, most], bench.cpu["shm", 0], strict=True)
        cpu = statistics.median(gloo / (read + publish) for gloo, read, publish in rounds)
        print(f"{ours} against {theirs}, {most} receivers, publish included: {times:.2f}x, in CPU time {cpu:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved; medians are printed")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--changed", type=float, default=0.01, help="part of the bf16 values that moves by one step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args.megabytes, args.changed, Path(scratch))
        try:
            # One round to warm up: compiled code, page cache, connections.
            for number in range(args.rounds + 1):
                bench.round(number)
                if number == 0:
                    bench.seconds.clear()
                    bench.cpu.clear()
        finally:
            bench.close()
        print(f"{args.megabytes} MB of bf16, {args.rounds} rounds, {os.cpu_count()} cores")
        report(bench)


if __name__ == "__main__":
    main()
