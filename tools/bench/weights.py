"""Carriers of weights against a gloo broadcast, in one interleaved run on this host.

One sender and receivers that are processes of their own; a read ends when the last receiver has its tensors,
verified where the carrier verifies (gloo does not). Publishing (copy, check for non-finite values, checksums, delta) is
timed apart and counted in the second ratio. With fewer cores than processes the cost per byte decides, not the method.

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
METHODS = ("shm", "zmq full", "zmq delta", "gloo")
Weights = dict[str, Tensor]


def join(store: str, rank: int) -> dict[int, dist.ProcessGroup]:
    """One gloo group for each number of receivers; rank 0 sends."""
    torch.set_num_threads(1)
    world = max(RECEIVERS) + 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    return {n: dist.new_group(list(range(n + 1))) for n in RECEIVERS}


def receive(rank: int, store: str, nbytes: int, pipe: Connection) -> None:
    """A receiver: does what it is told until told to stop, and answers after each."""
    groups = join(store, rank)
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    base: zmq.Base | None = None
    while (told := pipe.recv()) is not None:
        method, source, version, count = told
        if method == "gloo":
            dist.broadcast(buffer, 0, groups[count])
        elif method == "shm":
            shm.read(source, version)
        elif method == "base":
            base = zmq.Base(version, zmq.read(source, version))
        else:
            zmq.read(source, version, base if method == "zmq delta" else None)
        pipe.send("done")
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
        torch.manual_seed(0)
        self.weights = {f"layer.{i}": torch.randn(2**21).mul(0.02).to(torch.bfloat16) for i in range(megabytes // 4)}
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.delta_bytes: list[int] = []

    def tell(self, count: int, method: str, source: str, version: Version) -> float:
        """Seconds until `count` receivers have done it."""
        flat = torch.zeros(self.nbytes, dtype=torch.uint8) if method == "gloo" else None
        start = time.perf_counter()
        for pipe in self.pipes[:count]:
            pipe.send((method, source, version, count))
        if flat is not None:
            dist.broadcast(flat, 0, self.groups[count])
        for pipe in self.pipes[:count]:
            if not pipe.poll(120):
                raise TimeoutError(f"{method} to {count} receivers takes more than 120 s")
            pipe.recv()
        return time.perf_counter() - start

    def round(self, number: int) -> None:
        """Each carrier once for each number of receivers, in another order each time."""
        base, version = Version(0, 2 * number), Version(0, 2 * number + 1)
        source = self.zmq.publish(base, self.weights.items())
        self.tell(max(RECEIVERS), "base", source, base)
        self.weights = step(self.weights, self.changed)
        sources = {"gloo": ""}
        for name, publisher in (("shm", self.shm), ("zmq", self.zmq)):
            start = time.perf_counter()
            sources[name] = publisher.publish(version, self.weights.items())
            self.seconds[name, 0].append(time.perf_counter() - start)
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
        self.zmq.close()
        dist.destroy_process_group()


def report(bench: Bench) -> None:
    median = {key: statistics.median(values) for key, values in bench.seconds.items()}
    print(f"{'':10} {'receivers':>9} {'read ms':>8} {'min-max':>11} {'GB/s all':>8} {'x gloo':>7} {'and publish':>12}")
    for count in RECEIVERS:
        for method in METHODS:
            key, values = (method, count), bench.seconds[method, count]
            publish = median.get((method.split()[0], 0), 0.0)
            spread = f"{min(values) * 1e3:.0f}-{max(values) * 1e3:.0f}"
            gloo = bench.seconds["gloo", count]
            # Ratios of one round each: what loads the host loads both sides.
            reads = statistics.median(g / v for g, v in zip(gloo, values, strict=True))
            whole = statistics.median(g / (v + publish) for g, v in zip(gloo, values, strict=True))
            rate = count * bench.nbytes / median[key] / 1e9
            print(f"{method:10} {count:9} {median[key] * 1e3:8.0f} {spread:>11} {rate:8.2f} {reads:7.2f} {whole:12.2f}")
    for name in ("shm", "zmq"):
        print(f"publish {name}: {median[name, 0] * 1e3:.0f} ms, {bench.nbytes / median[name, 0] / 1e9:.2f} GB/s")
    ratio = bench.nbytes / statistics.median(bench.delta_bytes)
    print(f"delta at {100 * bench.changed:g} % changed: {ratio:.0f}x smaller (wanted 40 at 1 %)")
    most = max(RECEIVERS)
    times = statistics.median(
        g / v for g, v in zip(bench.seconds["gloo", most], bench.seconds["shm", most], strict=True)
    )
    print(f"shm against a gloo broadcast at {most} receivers: {times:.1f}x (wanted 2)")


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
        finally:
            bench.close()
        print(f"{args.megabytes} MB of bf16, {args.rounds} rounds, {os.cpu_count()} cores")
        report(bench)


if __name__ == "__main__":
    main()
