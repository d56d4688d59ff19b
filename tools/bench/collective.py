"""Seconds per GB of the `collective` carrier on this host: publishing, and sending to receivers over gloo.

Receivers take buckets into memory as a server does, and load nothing. The first sending starts a sender process each
and makes its group; it is printed apart. All engines are sent to at once.

    python tools/bench/collective.py [--megabytes 256] [--engines 1] [--rounds 5] [--bucket 64]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper

from asyncrl.types import Version
from asyncrl.weights.collective.client import Groups as Engines
from asyncrl.weights.collective.client import Sending, Source
from asyncrl.weights.collective.publisher import Groups, Publisher

TIMEOUT_S = 120.0


def receive(pipe: Connection) -> None:
    """An engine of one process: takes what a Sending announces, and answers when it has it."""
    torch.set_num_threads(1)
    group: dist.ProcessGroup | None = None
    while (sending := pipe.recv()) is not None:
        if sending.is_new:
            limit = timedelta(seconds=TIMEOUT_S)
            store = dist.TCPStore(*sending.address, 2, False, limit)  # type: ignore[attr-defined]
            group, _ = _new_process_group_helper(
                2, 1, [], dist.Backend("gloo"), dist.PrefixStore(sending.group, store),  # type: ignore[attr-defined]
                group_name=sending.group, timeout=limit,
            )  # fmt: skip
        assert group is not None
        for bucket in sending.buckets:
            room = torch.empty(sum(2 * prod(shape) for _, _, shape in bucket), dtype=torch.uint8)
            group.broadcast([room], dist.BroadcastOptions()).wait()
        pipe.send(None)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="of bf16 in tensors of 4 MB")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="after the first; medians are printed")
    parser.add_argument("--bucket", type=int, default=64, help="megabytes of one broadcast")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(args.engines)]
    processes = [spawn.Process(target=receive, args=(far,), daemon=True) for _, far in ends]
    for process in processes:
        process.start()
    weights = {f"layer.{i}": torch.randn(2**21).to(torch.bfloat16) for i in range(args.megabytes // 4)}
    gigabytes = sum(w.nbytes for w in weights.values()) / 1e9
    engines, writes, sends = Engines(), list[float](), list[float]()

    def send(number: int, source: str, version: Version) -> None:
        pipe = ends[number][0]
        sending: Sending = Source(engines, source, version).broadcast(f"g{number}", 1)
        pipe.send(sending)
        if not pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"engine {number} takes more than {TIMEOUT_S:g} s")
        pipe.recv()

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.engines) as pool:
        groups = Groups("gloo", "cpu", args.bucket * 2**20, TIMEOUT_S)
        publisher = Publisher(Path(scratch) / "weights", groups=groups)
        for update in range(args.rounds + 1):
            version, started = Version(0, update), time.perf_counter()
            source = publisher.publish(version, weights.items())
            writes.append(time.perf_counter() - started)
            started = time.perf_counter()
            list(pool.map(lambda n, s=source, v=version: send(n, s, v), range(args.engines)))  # type: ignore[misc]
            sends.append(time.perf_counter() - started)
        publisher.close()
    for pipe, _ in ends:
        pipe.send(None)
    print(f"{gigabytes:.2f} GB of bf16, {args.engines} engines, buckets of {args.bucket} MB, {os.cpu_count()} cores")
    print(f"publishing: {statistics.median(writes[1:]) / gigabytes:.2f} s per GB")
    print(
        f"sending, with reading and verifying: {statistics.median(sends[1:]) / gigabytes:.2f} s per GB; "
        f"the first one {sends[0]:.1f} s in all"
    )


if __name__ == "__main__":
    main()
