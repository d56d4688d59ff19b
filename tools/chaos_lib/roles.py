"""The processes of a run, started by the ordinary commands: killed, frozen, ended and started again."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncrl.process import Child, role_environment, start

TREE_S = 10.0
"""Longest wait for what a killed role leaves behind, before it is started again."""


@dataclass(slots=True)
class Role:
    """One role. incarnation counts its processes. cause: what we did to it, if anything, since it was started."""

    name: str
    words: list[str]
    run_dir: Path
    child: Child | None = None
    incarnation: int = 0
    started: float = 0.0
    restart_at: float | None = 0.0
    cause: str = ""
    thaw_at: float = 0.0
    frozen: list[psutil.Process] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)

    @property
    def up(self) -> bool:
        """True while its process lives and is not frozen."""
        return self.child is not None and self.child.returncode is None and not self.frozen

    def start(self) -> list[str]:
        """Start its process, in a session of its own. It dies with us.

        Waits for what its last process left behind, at most TREE_S; returns the commands of what is still there.
        """
        left = wait_for_none(self.sessions[-1:], TREE_S) if self.sessions else []
        self.incarnation += 1
        self.cause, self.restart_at, self.started = "", None, time.monotonic()
        command = [sys.executable, "-m", "asyncrl", *self.words]
        self.child = start(self.name, command, role_environment(1), self.run_dir / "logs" / f"{self.name}.log")
        self.sessions.append(self.child.process.pid)
        return [" ".join(command_of(p)) for p in left]

    def kill(self, rng: random.Random, rank: bool = False) -> None:
        """SIGKILL to its first process, or to one of the learner's ranks."""
        assert self.child is not None
        self.cause = "rank killed" if rank else "killed"
        ranks = [p for p in self._tree()[1:] if "learn" in command_of(p)] if rank else []
        pid = rng.choice(ranks).pid if ranks else self.child.process.pid
        os.kill(pid, signal.SIGKILL)
        self.frozen = []

    def terminate(self) -> None:
        """SIGTERM to its first process."""
        assert self.child is not None
        self.cause = "terminated"
        self.child.process.terminate()

    def freeze(self, until: float) -> None:
        """SIGSTOP to its processes."""
        for process in self._tree():
            if send(process, signal.SIGSTOP):
                self.frozen.append(process)
        self.thaw_at = until

    def thaw(self) -> None:
        """SIGCONT to what was frozen."""
        for process in self.frozen:
            send(process, signal.SIGCONT)
        self.frozen = []

    def num_descriptors(self) -> int:
        """Open descriptors of its first process, 0 when it is gone."""
        try:
            return psutil.Process(self.sessions[-1]).num_fds()
        except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
            return 0

    def _tree(self) -> list[psutil.Process]:
        assert self.child is not None
        try:
            root = psutil.Process(self.child.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def left_of(sessions: list[int]) -> list[psutil.Process]:
    """Live processes of these sessions."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getsid(process.pid) in sessions:
                found.append(process)
        except (ProcessLookupError, PermissionError):
            continue
    return found


def wait_for_none(sessions: list[int], timeout_s: float) -> list[psutil.Process]:
    """Wait until these sessions have no process, at most timeout_s; what is left."""
    deadline = time.monotonic() + timeout_s
    while (left := left_of(sessions)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def send(process: psutil.Process, number: int) -> bool:
    """A signal to a process; False when it is gone."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def command_of(process: psutil.Process) -> list[str]:
    """Its command line, empty when it is gone."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
