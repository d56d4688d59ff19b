"""How long the learner stands still for a publication: written at once, or by a thread while the next step runs.

One process and fp32 weights; the two ways alternate. A step is matrix products on one thread; the step after a
publication is timed as well, because the thread that writes takes its share of the cores.

    python tools/bench/publish.py [--megabytes 64] [--rounds 15] [--step 200]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))

import torch
from torch import nn

from asyncrl.learner.publish import host_copy
from asyncrl.learner.publishing import Publishing
from asyncrl.learner.shard import Policy, World
from asyncrl.types import Version
from asyncrl.weights.publisher import open_publisher

WORLD = World(0, 1, torch.device("cpu"))


class Layers(nn.Module):
    """What publishing asks of a policy: a model with parameters, 4 MB each."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(megabytes // 4)))


def step(count: int) -> float:
    """Seconds of so many products of [512, 512]."""
    started = time.perf_counter()
    a = torch.ones(512, 512)
    for _ in range(count):
        torch.mm(a, a)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15, help="of each way, alternating; medians are printed")
    parser.add_argument("--step", type=int, default=200, help="matrix products of a step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = cast(Policy, Layers(args.megabytes))
    print(f"{args.megabytes} MB of fp32, {args.rounds} rounds, {os.cpu_count()} cores, milliseconds")
    with tempfile.TemporaryDirectory() as scratch:
        for carrier in ("shm", "zmq"):
            measure(carrier, policy, args.rounds, args.step, Path(scratch))


def measure(carrier: str, policy: Policy, rounds: int, size: int, scratch: Path) -> None:
    publisher = open_publisher(
        "shm" if carrier == "shm" else "zmq", scratch / carrier, 2, bind="tcp://127.0.0.1:*", security="loopback",
        keys=None, with_delta=True,
    )  # fmt: skip
    publishing = Publishing(publisher, WORLD, 60.0)
    still: dict[str, list[float]] = {"at once": [], "thread": []}
    after: dict[str, list[float]] = {"at once": [], "thread": [], "none": []}
    writes = []
    for i in range(2 * rounds + 2):
        version = Version(0, i)
        way = ("at once", "thread")[i % 2]
        started = time.perf_counter()
        if way == "thread":
            publishing.begin(policy, version, lambda _: None)
        else:
            publisher.publish(version, iter(host_copy(policy, WORLD).items()))
        stood = time.perf_counter() - started
        took = step(size)
        publishing.settle(True)
        plain = step(size)
        if i >= 2:  # the first of each warms up
            still[way].append(stood)
            after[way].append(took)
            after["none"].append(plain)
            writes += [publishing.write_s] if way == "thread" else []
    publishing.close()
    ms = {name: 1e3 * statistics.median(v) for name, v in (("once", still["at once"]), ("thread", still["thread"]))}
    ratio = statistics.median(a / b for a, b in zip(still["at once"], still["thread"], strict=True))
    steps = {name: 1e3 * statistics.median(v) for name, v in after.items()}
    print(
        f"{carrier}: stands still {ms['once']:.1f} written at once, {ms['thread']:.1f} with a thread: {ratio:.1f}x less"
    )
    print(
        f"     the thread writes for {1e3 * statistics.median(writes):.1f}; the step after it takes "
        f"{steps['thread']:.0f}, after one at once {steps['at once']:.0f}, without a publication {steps['none']:.0f}"
    )


if __name__ == "__main__":
    main()
