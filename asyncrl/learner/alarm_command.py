"""The command that alarms run: one at a time, on a thread, so that training never waits for it.

It gets the alarm as JSON on its standard input and its name in ASYNCRL_ALARM; what it prints goes to
RUN/logs/alarms.log. No shell sees any of it. It has a process group of its own, which is killed when its time is over.
Knows no alarm.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Commands that may wait for the one that runs."""
KILLED_S = 5.0
"""Longest wait for a killed one to be gone."""


class _Job(NamedTuple):
    command: Sequence[str]
    name: str
    payload: Mapping[str, Any]
    timeout_s: float


class Commands:
    """Runs commands in the order in which they were asked for. failures: how many did not end with status 0 in time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._waiting: queue.Queue[_Job | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._running: subprocess.Popen[bytes] | None = None
        self._over = False
        self.failures = 0

    def start(self, command: Sequence[str], name: str, payload: Mapping[str, Any], timeout_s: float) -> None:
        """Run it when those before are done, for at most timeout_s. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="alarm commands", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(_Job(command, name, payload, timeout_s))
        except queue.Full:
            self._failed(f"{MAX_WAITING} alarms wait for alarms.command already", name)

    def close(self, wait_s: float) -> None:
        """Wait for those that were asked for, at most wait_s, and KILLED_S for one that is killed then."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(wait_s)
        if self._thread.is_alive():
            self._over = True
            if (running := self._running) is not None:
                _kill(running)
            self._thread.join(KILLED_S)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None and not self._over:
            if why := self._run(job):
                self._failed(why, job.name)

    def _run(self, job: _Job) -> str:
        """Why it failed, or ""."""
        data = json.dumps(job.payload).encode()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as out:
                process = subprocess.Popen(
                    list(job.command), stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
                    env={**os.environ, "ASYNCRL_ALARM": job.name}, start_new_session=True,
                )  # fmt: skip
        except (OSError, ValueError) as exc:
            return f"{job.command[0]} cannot be started ({exc})"
        self._running = process
        try:
            process.communicate(data, job.timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"{job.command[0]} took longer than alarms.command_timeout_s={job.timeout_s:g} and was killed"
        except OSError as exc:
            return f"{job.command[0]} does not read what it is told ({exc})"
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
            self._running = None
        return f"{job.command[0]} ended with status {process.returncode}" if process.returncode else ""

    def _failed(self, why: str, name: str) -> None:
        self.failures += 1
        log.warning("alarm %s: %s; its output is in %s", name, why, self._file)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the group of a process that was not waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
