"""CPU time that replay spends per trajectory on its way in, against a bare receive loop, in one interleaved run.

Both sides are processes of their own and get the same frames over TCP from the same sender: groups of 8 trajectories,
because the group is what travels. `bare` receives whole messages from a ROUTER socket and keeps the last ones, as many
as replay has in its queue; it decodes nothing, answers nothing, and copies frames or not, whichever is cheaper at that
size. `replay` is the real server: decoding, checks, de-duplication, leases, lag, acks, takes and commits; only
the requests of the learner and for leases are made in the process instead of over the socket, and no snapshot is
written (there is one per take and commit, none per message). The take is asked for after every poll, as a parked one
is, so what a learner costs that waits beside the queue is part of it. The queue holds two updates' groups at most; that
a parked take does not walk a longer one is what tests/replay/test_takes.py checks.
`no acks` is the same without answers. CPU time is that of the whole process, libzmq's I/O thread with it.

    python tools/bench/ingest.py [--pairs 7] [--case 0.8KB] [--profile FILE]
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import zmq

from asyncrl import wire
from asyncrl.process import BASE_ENV
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.limits import Limits
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import collect_rarely
from asyncrl.replay.service import ReplayServer
from asyncrl.transport.sockets import Client, Server
from asyncrl.types import Group, ModelInfo, Prompt, Segment, Trajectory, Version

MODEL = ModelInfo(tuple(range(48)), 128, 8, 32000, "bench")
SIZE = 8
"""Trajectories per group."""
WAIT_S = 300.0
"""Longest wait for a side."""


class Case(NamedTuple):
    """tokens per response, routes or not, groups per update and groups of one measurement."""

    tokens: int
    routes: bool
    per_update: int
    groups: int


CASES = {
    "0.8KB": Case(100, False, 32, 1280),
    "39KB": Case(100, True, 32, 640),
    "3.2MB": Case(8192, True, 2, 24),
}


def make_prompts(count: int) -> list[Prompt]:
    """Prompts of 16 tokens."""
    return [Prompt(f"p{i}", np.arange(16, dtype=np.int32), "", "", "bench") for i in range(count)]


def make_queue(case: Case) -> ReplayQueue:
    """A queue that holds two takes and has version 0.0."""
    limits = Limits(
        groups_per_update=case.per_update, group_size=SIZE, max_lag=2**30, capacity_bytes=2**40, lease_timeout_s=1e6
    )
    queue = ReplayQueue(make_prompts(2 * case.groups), limits, MODEL)
    queue.publish(Version(0, 0))
    return queue


# --- the sender -------------------------------------------------------------------------------------


def make_messages(case: Case) -> Iterator[list[wire.Buffer]]:
    """The groups of a queue's leases in their order. All share the same arrays."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 32000, case.tokens).astype(np.int32)
    logprobs, mask = -rng.random(case.tokens, np.float32), np.ones(case.tokens, bool)
    rows = 16 + case.tokens - 1
    routes = rng.integers(0, 128, (rows, 48, 8)).astype(np.uint8) if case.routes else None
    segments = (Segment(Version(0, 0), 0, case.tokens),)
    queue = make_queue(case)
    for lease in queue.lease("g0", Version(0, 0), case.groups + 2 * case.per_update, 0.0).leases:
        trajectories = tuple(
            Trajectory(f"{lease.lease_id}.{i}", ids, logprobs, mask, segments, float(i % 2), "stop", None, routes)
            for i in range(SIZE)
        )
        group = Group(lease.group_id, lease.prompt, "g0", lease.attempt, 1.0, trajectories, 1.0)
        yield wire.encode_group(group)


def send(case: Case, address: str, resolved: Any) -> None:
    """Say Hello and send every group, at most two updates ahead of what the receiver is done with."""
    client = Client(address, b"g0")
    layers = list(MODEL.layers)
    client.send(wire.encode(wire.Hello(wire.SCHEMA, "generator", "g0", "b", layers, 128, 8, 32000, "bench", (0, 0))))
    for number, message in enumerate(make_messages(case)):
        while number - resolved.value >= 2 * case.per_update:
            if resolved.value < 0:
                break
            client.recv(0.001)
        if resolved.value < 0:
            break
        client.send(message, WAIT_S)
        while client.recv(0) is not None:
            pass
    client.leave()


# --- the receivers ----------------------------------------------------------------------------------


@dataclass
class Progress:
    """Counts groups; done after `total`, CPU measured from the end of the first update's groups on."""

    case: Case
    resolved: Any
    seen: int = 0
    cpu_s: float = 0.0

    def add(self, count: int) -> None:
        """So many groups more are done with."""
        before, self.seen = self.seen, self.seen + count
        self.resolved.value = self.seen
        if before < self.case.per_update <= self.seen:
            self.cpu_s, self.start = time.process_time(), self.seen

    @property
    def running(self) -> bool:
        """False at the end."""
        return self.seen < self.case.groups

    def result(self) -> float:
        """CPU microseconds per trajectory."""
        self.resolved.value = -1
        return (time.process_time() - self.cpu_s) * 1e6 / ((self.seen - self.start) * SIZE)


def bare(copy: bool) -> Callable[[Case, Any, Connection], float]:
    """Receive and keep the last messages."""

    def receive(case: Case, resolved: Any, ready: Connection) -> float:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind("tcp://127.0.0.1:*")
        ready.send(socket.getsockopt(zmq.LAST_ENDPOINT).decode())
        kept: deque[Any] = deque(maxlen=case.per_update)
        progress = Progress(case, resolved)
        socket.recv_multipart()  # Hello
        while progress.running:
            socket.poll(1000)
            count = 0
            while count < 256:
                try:
                    kept.append(socket.recv_multipart(zmq.NOBLOCK, copy=copy))
                except zmq.Again:
                    break
                count += 1
            progress.add(count)
        result = progress.result()
        kept.clear()
        socket.close(0)
        context.term()
        return result

    return receive


class Silent(ReplayServer):
    """Replay that tells generators nothing."""

    def _send(self, peer: Any, message: wire.Message) -> bool:
        return True

    def _tell(self, name: str, message: wire.Message) -> bool:
        return True


def replay(kind: type[ReplayServer]) -> Callable[[Case, Any, Connection], float]:
    """The real server; takes and commits are made as soon as there is enough."""

    def receive(case: Case, resolved: Any, ready: Connection) -> float:
        queue = make_queue(case)
        server = kind(queue, Evaluations([], queue.tally, every=0), Server("127.0.0.1"))
        ready.send(server.socket.address)
        progress = Progress(case, resolved)
        size, update = case.per_update, 0
        collect_rarely()
        queue.lease("g0", Version(0, 0), 2 * size, 0.0)
        while progress.running:
            server.step(1.0)
            take = queue.take(update, update, time.monotonic())
            if take is not None:
                update += 1
                queue.commit(take.take_id, update, "trained", take.batches[0])
                queue.lease("g0", Version(0, 0), size, 0.0)
                progress.add(size)
        result = progress.result()
        bad = {k: v for k, v in queue.tally.counters.items() if v}
        assert not bad, bad
        server.socket.close()
        return result

    return receive


SIDES = {
    "bare copying": bare(True),
    "bare": bare(False),
    "replay": replay(ReplayServer),
    "replay, no acks": replay(Silent),
}


def serve(orders: Connection, resolved: Any, profile: str) -> None:
    """Receive as ordered, until told to stop."""
    while (order := orders.recv()) is not None:
        side, name = order
        resolved.value = 0
        profiler = cProfile.Profile() if profile and side == "replay" else None
        if profiler is not None:
            profiler.enable()
        result = SIDES[side](CASES[name], resolved, orders)
        if profiler is not None:
            profiler.disable()
            profiler.dump_stats(profile)
        orders.send(result)


def deliver(orders: Connection, resolved: Any) -> None:
    """Send as ordered, until told to stop."""
    while (order := orders.recv()) is not None:
        name, address = order
        send(CASES[name], address, resolved)
        orders.send(None)


def answer(orders: Connection, processes: Sequence[BaseProcess]) -> Any:
    """What a process says; RuntimeError after WAIT_S, or when one of them ended."""
    deadline = time.monotonic() + WAIT_S
    while not orders.poll(0.2):
        if time.monotonic() > deadline or not all(p.is_alive() for p in processes):
            raise RuntimeError(f"a side ended, or gave no answer within {WAIT_S:g} s")
    return orders.recv()


def main() -> None:
    """Run the pairs and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--profile", default="", help="file for a cProfile of the last run of replay")
    arguments = parser.parse_args()
    os.environ.update(BASE_ENV)
    spawn = multiprocessing.get_context("spawn")
    resolved = spawn.Value("l", 0)
    receiver, theirs = spawn.Pipe()
    sender, other = spawn.Pipe()
    processes = [
        spawn.Process(target=serve, args=(theirs, resolved, arguments.profile), daemon=True),
        spawn.Process(target=deliver, args=(other, resolved), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        for name in arguments.case or list(CASES):
            costs: dict[str, list[float]] = {side: [] for side in SIDES}
            for _ in range(arguments.pairs):
                for side in SIDES:
                    receiver.send((side, name))
                    sender.send((name, answer(receiver, processes)))
                    costs[side].append(answer(receiver, processes))
                    answer(sender, processes)
            report(name, costs)
        receiver.send(None)
        sender.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()


def report(name: str, costs: dict[str, list[float]]) -> None:
    """One line per side, then the ratios as medians of the pairs."""
    medians = {side: statistics.median(values) for side, values in costs.items()}
    for side, values in costs.items():
        print(f"{name:>6}  {side:16} {medians[side]:9.1f} us/trajectory  ({min(values):.1f} - {max(values):.1f})")
    base = min(("bare copying", "bare"), key=lambda side: medians[side])
    ratio = statistics.median(a / b for a, b in zip(costs["replay"], costs[base], strict=True))
    acks = statistics.median(a / b for a, b in zip(costs["replay"], costs["replay, no acks"], strict=True))
    print(f"{name:>6}  replay against {base}: {ratio:.2f}x; acks {100 * (acks - 1):+.0f} %", flush=True)


if __name__ == "__main__":
    main()
