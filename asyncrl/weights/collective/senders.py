"""The learner's end of its sender processes: start, orders, reports, end. Never blocks; knows no request.

Pipes are not blocking on this side, so a sender that is stopped or hangs holds up nothing. Use from one thread, which
must live as long as the processes: the kernel kills them with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time

import msgspec

from asyncrl.weights.collective.messages import (
    Broken,
    Order,
    Planned,
    Progress,
    Refused,
    Report,
    Send,
    Sent,
    Setup,
    Sum,
    Summed,
    line,
    report,
)
from asyncrl.weights.messages import Label

log = logging.getLogger(__name__)

START_S = 120.0
"""Longest time until a sender has mapped its first version: it imports torch first, which busy hosts take long for."""

_READ = 2**16
_ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


class SenderProcess:
    """One process and what is known of it."""

    def __init__(self, setup: Setup) -> None:
        """Start it. OSError when that fails."""
        self.setup = setup
        self.is_new = True
        """True until it sent its first version."""
        self.version: Label | None = None
        """Of the last Send."""
        self._open = 0
        self.phase = "its start"
        """What it waits for."""
        self.holds = False
        """True while it maps a version."""
        self._since = self._heard = time.monotonic()
        self._out, self._in = bytearray(), bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.weights.collective.sender", str(os.getpid())], env={**os.environ, **_ENV},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        self._order(setup)

    @property
    def busy(self) -> bool:
        """True while an order is not answered."""
        return self._open > 0

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal, None while it runs. Reaps it."""
        return self._process.poll()

    @property
    def idle_s(self) -> float:
        """Seconds since its engine asked for anything."""
        return time.monotonic() - self._heard

    def send(self, version: Label, path: str) -> None:
        """Order it to send a version, after what it is sending now."""
        self.version, self.holds = version, True
        self._begin("the version to be read" if not self.is_new else self.phase)
        self._order(Send(version, path))

    def sum(self, names: tuple[str, ...], ranks: int) -> None:
        """Order it to hash."""
        self.holds = True
        self._begin("checksums")
        self._order(Sum(names, ranks))

    def tell(self, order: Order) -> None:
        """An order that has no answer."""
        self._order(order)

    def late(self, timeout_s: float) -> bool:
        """True when an order made no progress for timeout_s, or START_S before the first."""
        if self.is_new and self.phase == "its start":
            timeout_s = max(timeout_s, START_S)
        return self.busy and time.monotonic() - self._since > timeout_s

    def reports(self) -> list[Report]:
        """What it reported since the last call."""
        self._flush()
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._stdout.fileno(), _READ):
                self._in += part
        *lines, rest = self._in.split(b"\n")
        self._in = bytearray(rest)
        found = []
        for text in lines:
            try:
                found.append(report(bytes(text)))
            except msgspec.MsgspecError as exc:
                found.append(Broken(f"it reported nonsense: {exc}"))
            self._note(found[-1])
        return found

    def kill(self) -> None:
        """End it; status tells when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._stdin.close()
        self._stdout.close()

    def reap(self, timeout_s: float) -> None:
        """Wait for the end of a process that was killed, at most timeout_s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def _begin(self, phase: str) -> None:
        self._heard = time.monotonic()
        if not self.busy:
            self.phase, self._since = phase, self._heard
        self._open += 1

    def _note(self, what: Report) -> None:
        self._since = time.monotonic()
        match what:
            case Planned():
                self.phase = "the group"
            case Progress(phase=phase):
                self.phase = phase
            case Sent():
                self._open -= 1
                self.is_new = False
            case Summed() | Refused():
                self._open -= 1

    def _order(self, what: Order) -> None:
        self._out += line(what)
        self._flush()

    def _flush(self) -> None:
        # A sender that died has its exit status; one that does not read is late.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._out:
                del self._out[: os.write(self._stdin.fileno(), self._out)]
