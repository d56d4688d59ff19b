"""One sender process: `python -m asyncrl.weights.collective.sender PARENT_PID`.

Reads orders from stdin and writes reports to stdout, one line of JSON each (messages.py). It ends when stdin ends, also
in the middle of a broadcast, and the kernel ends it with its parent. Its end is what frees an engine that waits in
the group, so whatever goes wrong there ends it.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from typing import BinaryIO, NoReturn

import msgspec
import torch
from torch import Tensor

from asyncrl.errors import VersionGone, WeightSyncError
from asyncrl.parent import serve_only
from asyncrl.types import Version
from asyncrl.weights import shm
from asyncrl.weights.collective.buckets import fill, plan, room_for, spec_of
from asyncrl.weights.collective.group import Group
from asyncrl.weights.collective.messages import (
    Broken,
    Order,
    Planned,
    Progress,
    Refused,
    Release,
    Report,
    Send,
    Sent,
    Setup,
    Sum,
    Summed,
    line,
    order,
)
from asyncrl.weights.engine_checksums import expected

log = logging.getLogger(__name__)


class Sender:
    """Carries out orders, one after the other, on one thread."""

    def __init__(self, setup: Setup, reports: BinaryIO) -> None:
        self._setup, self._reports = setup, reports
        self._group = Group(setup.host, setup.group, setup.ranks, setup.backend, 2 * setup.timeout_s)
        self._last: Send | None = None
        self._weights: dict[str, Tensor] | None = None
        self._room = torch.empty(0, dtype=torch.uint8)
        self._turn = 0

    def do(self, what: Order) -> None:
        """One order. WeightSyncError: the group is unusable."""
        match what:
            case Send():
                self._send(what)
            case Sum():
                self._sum(what)
            case Release():
                self._weights = None

    def tell(self, what: Report) -> None:
        """One report, at once."""
        self._reports.write(line(what))
        self._reports.flush()

    def _send(self, what: Send) -> None:
        self._last, self._weights = what, None
        try:
            weights = self._read()
            buckets = plan((spec_of(*item) for item in weights.items()), self._setup.bucket_bytes)
        except WeightSyncError as exc:
            self.tell(Refused(str(exc), isinstance(exc, VersionGone)))
            return
        self.tell(Planned(self._group.port, buckets))
        if not self._group.joined:
            self.tell(Progress(f"the engine to join the group {self._setup.group}"))
            self._group.join()
        if self._room.numel() < room_for(buckets):
            self._room = torch.empty(room_for(buckets), dtype=torch.uint8)
        for number, bucket in enumerate(buckets, 1):
            self.tell(Progress(f"bucket {number} of {len(buckets)}"))
            data = fill(bucket, weights, self._room)
            self._group.broadcast(data.to(self._setup.device) if self._setup.backend == "nccl" else data)
        self.tell(Sent())

    def _sum(self, what: Sum) -> None:
        try:
            # Every turn takes others of the large tensors.
            sums = expected(self._read(), what.names, what.ranks, turn=self._turn)
        except WeightSyncError as exc:
            self.tell(Refused(str(exc), isinstance(exc, VersionGone)))
            return
        self._turn += 1
        self.tell(Summed({name: tuple(sorted(found)) for name, found in sums.items()}))

    def _read(self) -> dict[str, Tensor]:
        """The version sent last, verified when it is mapped."""
        if self._last is None:
            raise WeightSyncError("nothing was sent yet")
        if self._weights is None:
            self._weights = shm.read(self._last.path, Version(*self._last.version))
        return self._weights


def main(argv: list[str]) -> NoReturn:
    """Serve until stdin ends. Exit status 1: the group broke; 2: an order was none."""
    serve_only(int(argv[1]))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s sender: %(message)s")
    torch.set_num_threads(1)
    # Reports go to a descriptor of their own: what a library prints must not come between them.
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    todo: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(todo,), name="orders", daemon=True).start()
    try:
        # Waits for an order without end: the thread that listens ends the process with its parent.
        setup = order(todo.get())
        assert isinstance(setup, Setup)
        if setup.backend == "nccl":
            torch.cuda.set_device(setup.device)
        sender = Sender(setup, reports)
        while True:
            sender.do(order(todo.get()))
    except WeightSyncError as exc:
        reports.write(line(Broken(str(exc))))
        reports.flush()
        # Not the interpreter's way: taking down a group that hangs would hang.
        os._exit(1)
    except msgspec.MsgspecError as exc:
        log.error("an order that is none: %s", exc)
        os._exit(2)


def _listen(todo: queue.SimpleQueue[bytes]) -> None:
    while text := sys.stdin.buffer.readline():
        todo.put(text)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv)
