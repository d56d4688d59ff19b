"""A process that joins a group and takes flattened buckets in the way of an SGLang server's rank, and its handle.

Orders and answers are lines of JSON. An order that fails is answered with its error, as the server's HTTP would.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
START_S = 100.0


class Rank:
    """One process that takes orders."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        # The first answer says that it serves.
        self.num_asked, self.num_heard = 1, 0
        self.failed = False
        threading.Thread(target=_collect, args=(self.process, self.answers), daemon=True).start()

    def ask(self, order: dict[str, Any]) -> None:
        """Give an order; its answer is fetched with hear()."""
        assert self.process.stdin is not None
        self.num_asked += 1
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next answer; waits at most timeout_s."""
        answer = self.answers.get(timeout=timeout_s)
        self.num_heard += 1
        self.failed |= "error" in answer
        return answer

    @property
    def is_good(self) -> bool:
        """Whether it lives, has no order and never failed."""
        return self.process.poll() is None and self.num_asked == self.num_heard and not self.failed

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(20)
        assert self.process.stdin is not None
        self.process.stdin.close()


_spare: list[Rank] = []
"""Ranks that a test is done with: like a server's they join another group. Starting one imports torch."""


def end_spare() -> None:
    """Kill the ranks that wait for another test."""
    while _spare:
        _spare.pop().kill()


class Receiver:
    """`ranks` processes of one engine, ready to join; a context after which they are idle, or killed."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = [_spare.pop() if _spare else Rank() for _ in range(ranks)]
        try:
            for rank in self.ranks:
                if not rank.num_heard:
                    rank.hear(START_S)
        except queue.Empty:
            self.kill()
            raise

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            _spare.append(rank) if rank.is_good else rank.kill()

    def kill(self) -> None:
        """SIGKILL to all of them."""
        for rank in self.ranks:
            rank.kill()

    def order(self, what: str, timeout_s: float = 30.0, **fields: Any) -> list[dict[str, Any]]:
        """The answer of every rank; {"died": status} for one that ended."""
        self.begin(what, **fields)
        return self._each(timeout_s)

    def begin(self, what: str, **fields: Any) -> None:
        """An order whose answers are fetched with end()."""
        for number, rank in enumerate(self.ranks, 1):
            rank.ask({"do": what, "rank": number, **fields})

    def end(self, timeout_s: float = 30.0) -> list[dict[str, Any]]:
        """The answers to begin(); waits at most timeout_s."""
        return self._each(timeout_s)

    def _each(self, timeout_s: float) -> list[dict[str, Any]]:
        return [rank.hear(timeout_s) for rank in self.ranks]

    def join(self, sending: Any, name: str | None = None) -> list[dict[str, Any]]:
        """Join the group of an asyncrl.engines.base.Broadcast."""
        host, port = sending.address
        return self.order(
            "init",
            host=host,
            port=port,
            size=1 + len(self.ranks),
            group=name or sending.group,
            backend=sending.backend,
        )

    def take(self, sending: Any, bucket: Sequence[Any]) -> list[dict[str, Any]]:
        """One bucket: {"sums": name -> sha256, "bytes"} or {"error"} of every rank."""
        return self.order("update", group=sending.group, tensors=bucket)

    def load(self, sending: Any) -> dict[str, str]:
        """Join where needed and take all buckets: sha256 by name, the same on every rank."""
        if sending.is_new:
            assert self.join(sending) == [{}] * len(self.ranks)
        sums: dict[str, str] = {}
        for bucket in sending.buckets:
            answers = self.take(sending, bucket)
            assert all(a == answers[0] and "sums" in a for a in answers), answers
            sums |= answers[0]["sums"]
        return sums


def _collect(process: subprocess.Popen[bytes], answers: queue.Queue[dict[str, Any]]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(json.loads(line))
    answers.put({"died": process.wait()})


def main() -> None:
    """Serve orders until stdin ends."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

    # A server has a default group of its own.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups: dict[str, Any] = {}

    def init(o: dict[str, Any]) -> dict[str, Any]:
        timeout = timedelta(seconds=300)
        store, rank, size = next(rendezvous(f"tcp://{o['host']}:{o['port']}", o["rank"], o["size"], timeout=timeout))
        group, _ = _new_process_group_helper(
            size, rank, [], Backend(o["backend"]), PrefixStore(o["group"], store), group_name=o["group"],
            timeout=timeout,
        )  # fmt: skip
        _world.pg_group_ranks[group] = {i: i for i in range(size)}
        groups[o["group"]] = group
        return {}

    def update(o: dict[str, Any]) -> dict[str, Any]:
        metadata, offset = [], 0
        for name, word, shape in o["tensors"]:
            dtype = getattr(torch, word)
            if offset % dtype.itemsize:
                raise ValueError(f"Unaligned received tensor {name}: byte offset {offset}, dtype {dtype}")
            size = math.prod(shape) * dtype.itemsize
            metadata.append((name, dtype, shape, offset, offset + size))
            offset += size
        flat = torch.empty(offset, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=groups[o["group"]])
        sums = {}
        for name, dtype, shape, start, end in metadata:
            tensor = flat[start:end].view(dtype).reshape(shape)
            sums[name] = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        return {"sums": sums, "bytes": offset}

    print("{}", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"init": init, "update": update}[order["do"]](order)
        except (RuntimeError, ValueError, KeyError) as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
