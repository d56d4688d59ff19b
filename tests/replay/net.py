"""A replay server and its peers over real sockets, on a clock that only the test moves."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.journal import Journal
from asyncrl.replay.knobs import Knobs
from asyncrl.replay.limits import Limits, limits_of
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.service import ReplayServer
from asyncrl.replay.snapshot import SnapshotFile
from asyncrl.replay.tuning import Tuning
from asyncrl.transport.sockets import Client, Server
from asyncrl.types import Group
from asyncrl.wire import Buffer
from tests.replay.support import MODEL, make_prompts, response

WAIT_S = 60.0
"""Longest wait for a message that is under way."""


class Counting(Server):
    """Knows how many messages came from each identity."""

    def __init__(self, bind: str) -> None:
        super().__init__(bind)
        self.came: Counter[bytes] = Counter()

    def poll(self, timeout_s: float) -> list[tuple[bytes, list[Buffer]]]:
        received = super().poll(timeout_s)
        self.came.update(identity for identity, _ in received)
        return received


class Peer:
    """One client; `ask` lets the server work and returns the answer."""

    def __init__(self, net: Net, name: str, role: str, identity: str = "") -> None:
        self.net, self.name, self.role = net, name, role
        self.identity = (identity or name).encode()
        self.client = Client(net.server.socket.address, self.identity)

    def send(self, message: wire.Message | list) -> None:
        self.client.send(message if isinstance(message, list) else wire.encode(message))
        self.net.sent[self.identity] += 1

    def recv(self) -> tuple[wire.Message, list]:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self.net.server.step(0.01)
            frames = self.client.recv(0)
            if frames is not None:
                return wire.decode(frames), frames[2:]
        raise AssertionError(f"{self.name} got no answer")

    def ask(self, message: wire.Message | list) -> wire.Message:
        self.send(message)
        return self.recv()[0]

    def quiet(self) -> bool:
        """True when nothing comes, although the server has all that was sent to it."""
        self.net.settle()
        for _ in range(5):
            self.net.server.step(0.01)
        return self.client.recv(0.01) is None

    def hello(self, boot: str = "b0", held: tuple[int, int] | None = None, **changes: object) -> wire.Message:
        fields: dict = {
            "schema": wire.SCHEMA, "role": self.role, "peer_id": self.name, "boot_id": boot, "layers": [0, 1],
            "num_experts": 8, "top_k": 2, "vocab_size": 32, "fingerprint": "f00d", "held": held,
        }  # fmt: skip
        reply = self.ask(wire.Hello(**(fields | changes)))
        if isinstance(reply, wire.Welcome):
            assert reply.boot
            reply.boot = ""
        return reply

    def lease(self, want: int, update: int = 0, rows: int = 0) -> wire.Leases:
        reply = self.ask(wire.LeaseRequest((0, update), want, rows))
        assert isinstance(reply, wire.Leases)
        return reply

    def group(self, lease: wire.LeaseMsg, update: int = 0, tokens: int = 4) -> list:
        responses = tuple(response(f"{lease.lease_id}.{i}", [(update, tokens)], float(i)) for i in range(2))
        prompt = wire.prompt_from_msg(lease.prompt)
        return wire.encode_group(Group(lease.group_id, prompt, self.name, lease.attempt, 1.0, responses))


class Net:
    """A server and its peers on a clock that only the test moves; goes on from a snapshot, if there is one."""

    def __init__(
        self, run_dir: Path, every: int = 0, watchdog_s: float = math.inf, settings: dict | None = None,
        config: Config | None = None, **limits: object,
    ) -> None:  # fmt: skip
        self.now = 1000.0
        values = {"groups_per_update": 4, "group_size": 2, "max_lag": 2, "lease_timeout_s": 60.0} | limits
        limits_now = limits_of(config) if config is not None else Limits(**values)  # type: ignore[arg-type]
        self.queue = ReplayQueue(make_prompts(100), limits_now, MODEL, Knobs(config))
        self.sent: Counter[bytes] = Counter()
        self.socket = Counting("127.0.0.1")
        self.evals = Evaluations(make_prompts(3, "e"), self.queue.tally, every=every, timeout_s=30.0)
        self.journal, snapshots = Journal(run_dir), SnapshotFile(run_dir, "f")
        self.server = ReplayServer(
            self.queue, self.evals, self.socket, heartbeat_timeout_s=15.0, journal=self.journal,
            snapshots=snapshots, watchdog_s=watchdog_s, settings=settings, now=lambda: self.now,
            tuning=Tuning(self.queue, self.evals, run_dir),
        )  # fmt: skip
        snapshot = snapshots.read()
        if snapshot is not None:
            self.server.resume(snapshot)
        self.peers: list[Peer] = []

    def peer(self, name: str, role: str = "generator", hello: bool = True, identity: str = "") -> Peer:
        peer = Peer(self, name, role, identity)
        self.peers.append(peer)
        if hello:
            assert isinstance(peer.hello(), wire.Welcome)
        return peer

    def settle(self) -> None:
        """Let the server work until it has all that was sent to it, and once at least; waits at most WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        self.server.step(0.01)
        while any(self.socket.came[name] < count for name, count in self.sent.items()):
            assert time.monotonic() < deadline, f"sent {self.sent}, came {self.socket.came}"
            self.server.step(0.01)

    def lose(self, peer: Peer) -> None:
        """The peer goes away; waits at most WAIT_S until the server's socket knows, without a step of the server."""
        peer.client.close()
        self.peers.remove(peer)
        deadline = time.monotonic() + WAIT_S
        while self.socket.send(peer.identity, [b"x"]):
            assert time.monotonic() < deadline, f"{peer.name} is still there"
            time.sleep(0.01)

    def learner(self, rank: int = 0) -> Peer:
        return self.peer(f"learner-{rank}", "learner")

    @property
    def counters(self) -> dict[str, int]:
        return self.queue.tally.counters

    def close(self) -> None:
        for peer in self.peers:
            peer.client.close()
        self.server.socket.close()
        self.journal.close()


def publish(learner: Peer, update: int, epoch: int = 0) -> None:
    """Announce a version, as after the commits that made it."""
    clock = learner.net.queue.clock
    if clock.newest is not None and epoch == clock.epoch:
        clock.advance(update)
    assert learner.ask(wire.Published(epoch, update, f"/w/{epoch}.{update}")) == wire.Ack([], [])
