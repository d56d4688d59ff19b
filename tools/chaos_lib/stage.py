"""The stage of a run under chaos: the roles behind their proxies, and the record of what happens to them.

Writes RUN/chaos/: faults.jsonl (faults, starts, exits), tap.jsonl (messages), status.jsonl (replay's own figures) and
facts.json (what the operating system says at the end).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.transport.sockets import Client
from asyncrl.weights.place import directory_of
from chaos_lib import faults as f
from chaos_lib.proxy import Network, Proxy
from chaos_lib.roles import Role, command_of, send, wait_for_none
from chaos_lib.tap import FILE, Tap

TICK_S = 0.1
STATUS_S = 1.0
MAX_FAILED = 5
"""Roles that may end with an error of their own before the run is given up; one is enough for the proof to fail."""


class Failure(Exception):
    """The run cannot go on."""


@dataclass
class Plan:
    """What to do. updates: of the whole run; 0: go on until the chaos is over, then stop and resume for `tail` updates.

    spare: roles that no fault may touch.
    """

    files: list[str]
    settings: dict[str, Any]
    seconds: float
    seed: int
    cards: list[tuple[str, str]]
    pace: f.Pace
    generators: int = 2
    updates: int = 0
    tail: int = 12
    finish_s: float = 900.0
    spare: frozenset[str] = frozenset()


@dataclass
class Stage:
    """The processes and proxies of a run, and its records."""

    plan: Plan
    config: Config
    folder: Path
    roles: dict[str, Role] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    commits_at_start: int = 0
    over: bool = False
    failed: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.network = Network()
        self.port = free_port()
        self.tap = Tap(self.folder / FILE)
        self._events = (self.folder / "faults.jsonl").open("a")
        self._status = (self.folder / "status.jsonl").open("a")
        self._client = Client(f"tcp://127.0.0.1:{self.port}", b"witness")
        self._asked, self._answered = 0.0, 0.0
        self.calm_at: dict[str, float] = {}

    def words(self, role: str, updates: int) -> list[str]:
        """The command line of a role."""
        changes = [f"{k}={v}" for k, v in self.plan.settings.items()]
        changes += [f"replay.bind=tcp://127.0.0.1:{self.port}", f"learner.updates={updates}"]
        if role != "replay":
            changes.append(f"replay.connect=tcp://127.0.0.1:{self.proxies[role].port}")
        command = {"replay": ["replay"], "learner": ["learn"]}.get(role, ["generate", "--id", role])
        return [*command, *self.plan.files, *changes]

    def start(self, updates: int) -> None:
        """Start every role, or start it again after an orderly stop."""
        for name in ["replay", *[f"g{i}" for i in range(self.plan.generators)], "learner"]:
            if name not in self.roles:
                self.roles[name] = Role(name, [], self.config.run_dir)
                if name != "replay":
                    self.proxies[name] = self._proxy(name)
            self.roles[name].words = self.words(name, updates)
            self._start(self.roles[name])

    def _proxy(self, name: str) -> Proxy:
        def tag() -> tuple[int, int]:
            return self.roles[name].incarnation, self.roles["replay"].incarnation

        def witness(tag: tuple[int, int], message) -> None:
            self.tap.record(name, *tag, message)

        return Proxy(self.network, self.port, tag=tag, witness=witness)

    def _start(self, role: Role) -> None:
        if left := role.start():
            self.note("left", role=role.name, commands=left)
        if role.name == "learner":
            self.commits_at_start = self.tap.commits
        self.note("start", role=role.name, incarnation=role.incarnation)

    def note(self, event: str, **values: Any) -> None:
        """Write down what happened."""
        self._events.write(json.dumps({"t": round(time.time(), 3), "event": event, **values}) + "\n")
        self._events.flush()

    def tick(self, restart: bool = True) -> None:
        """Notice what ended, start again what is due, thaw, let the weather clear, ask replay."""
        now = time.monotonic()
        for role in self.roles.values():
            if role.frozen and now >= role.thaw_at:
                role.thaw()
                self.note("thaw", role=role.name)
            if role.child is not None and role.child.returncode is not None and role.restart_at is None:
                self._ended(role, now)
            if restart and role.restart_at is not None and now >= role.restart_at:
                self._start(role)
        for name, at in list(self.calm_at.items()):
            if now >= at:
                del self.calm_at[name]
                self.proxies[name].calm()
                self.note("calm", link=name)
        self._ask(now)
        time.sleep(TICK_S)

    def _ended(self, role: Role, now: float) -> None:
        assert role.child is not None
        status = role.child.returncode
        self.note("exit", role=role.name, incarnation=role.incarnation, status=status, cause=role.cause)
        role.frozen = []
        if role.name == "learner" and status == 0:
            self.over = True
        self.failed += status != 0 and not role.cause
        if self.failed > MAX_FAILED:
            raise Failure(f"{self.failed} roles ended by themselves, the last was {role.name} with status {status}")
        role.restart_at = float("inf") if self.over or (status == 0 and not role.cause) else now + self._down(role)

    def _down(self, role: Role) -> float:
        return float(role.cause.partition(":")[2] or 0.0)

    def _ask(self, now: float) -> None:
        """Replay's status, once a second; a replay that is down or frozen does not answer."""
        if (frames := self._client.recv(0.0)) is not None:
            message = wire.decode(frames)
            if isinstance(message, wire.StatusReply):
                self._asked = 0.0
                self._write_status(message.state)
        if now - max(self._answered, self._asked) >= (5.0 if self._asked else STATUS_S):
            self._asked = self._answered = now
            self._client.send(wire.encode(wire.Status()))

    def _write_status(self, state: dict[str, Any]) -> None:
        replay = self.roles["replay"]
        kept = {k: v for k, v in state.items() if k not in ("generators", "evaluations")}
        extra = {"t": round(time.time(), 3), "incarnation": replay.incarnation, "fds": replay.num_descriptors()}
        self._status.write(json.dumps(extra | kept) + "\n")
        self._status.flush()

    def close(self) -> dict[str, Any]:
        """End what still lives, and say what the operating system knows of this run."""
        sessions = [s for r in self.roles.values() for s in r.sessions]
        left = wait_for_none(sessions, 10.0)
        facts: dict[str, Any] = {"processes": [" ".join(command_of(p)) for p in left]}
        for process in left:
            send(process, signal.SIGKILL)
        for proxy in self.proxies.values():
            proxy.close()
        self.network.close()
        self._client.close()
        self.tap.close()
        shared = directory_of(self.config.run_dir / "weights")
        facts["shared_memory"] = [str(p) for p in (shared, shared.with_name(shared.name + ".lock")) if p.exists()]
        facts["ports"] = [self.port] if is_open(self.port) else []
        (self.folder / "facts.json").write_text(json.dumps(facts))
        self._events.close()
        self._status.close()
        return facts


def num_own_descriptors() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    """True when somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
