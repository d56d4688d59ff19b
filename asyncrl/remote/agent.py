"""One role on its host, started by the launcher through ssh or srun: `python -m asyncrl.remote.agent`.

Standard input is the lifeline: its first line is the job, and every byte behind it is a beat, which says nothing but
that the launcher lives. When it ends or falls silent, when a signal comes, or when this process is killed, the role
and all that it started end.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from asyncrl.errors import ConfigError
from asyncrl.parent import die_with_parent
from asyncrl.process import Child, role_environment, stop_all
from asyncrl.remote.job import Job, from_line, write_keys
from asyncrl.remote.private import private_folder
from asyncrl.restarts import LOST

SILENCE_S = 60.0
"""The launcher or the way to it is gone when nothing comes for this long; it writes every BEAT_S."""
BEAT_S = 5.0
MAX_JOB_BYTES = 2**24
"""A longer first line is no job."""

_POLL_S = 0.1


class Lifeline:
    """Standard input without a buffer of its own, so that select tells the truth."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._heard_at = time.monotonic()
        self.state = "held"

    def line(self, silence_s: float) -> bytes:
        """The first line; waits at most silence_s for each piece. b"" after that, or at the end of the input."""
        text = bytearray()
        while b"\n" not in text:
            chunk = self._read(silence_s, 2**16)
            if not chunk or len(text) > MAX_JOB_BYTES:
                return b""
            text += chunk
        line, _, _beats = text.partition(b"\n")
        self._heard_at = time.monotonic()
        return bytes(line)

    def tend(self, wait_s: float) -> None:
        """Take in what came; `state` says "closed" or "silent" once the lifeline broke. Waits at most wait_s."""
        chunk = self._read(wait_s, 4096)
        if chunk:
            self._heard_at = time.monotonic()
        elif chunk is not None:
            self.state = "closed"
        elif time.monotonic() - self._heard_at > SILENCE_S:
            self.state = "silent"

    def _read(self, wait_s: float, size: int) -> bytes | None:
        """None when nothing came in time, b"" at the end."""
        if not select.select([self._descriptor], [], [], max(0.0, wait_s))[0]:
            return None
        try:
            return os.read(self._descriptor, size)
        except OSError:
            return b""


def run(job: Job, lifeline: Lifeline) -> int:
    """The role from start to end. Returns its exit status, 128 + n after signal n, LOST when the lifeline broke."""
    if job.fresh and Path(job.fresh).exists():
        print(f"{job.fresh} exists: choose another run.name, or go on in that folder with --resume", file=sys.stderr)
        return 2
    caught: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    with private_folder() as private:
        child = _start(job, private)
        try:
            while child.returncode is None and not caught and lifeline.state == "held":
                lifeline.tend(_POLL_S)
            status = child.returncode
        finally:
            stop_all([child], job.stop_s)
    if status is not None:
        return 128 - status if status < 0 else status
    if caught:
        return 128 + caught[0]
    _say(f"agent: the launcher is gone (standard input {lifeline.state}); {job.role} was stopped")
    return LOST


def _start(job: Job, private: Path) -> Child:
    config = private / "config.yaml"
    config.write_text(job.config)
    words = [str(config), *job.words]
    if job.keys:
        write_keys(job.keys, private / "keys")
        words.append(f"replay.keys={private / 'keys'}")
    # It dies with this process, from before its first line on. In a session of its own, so that a signal to all
    # processes of a step reaches it once, through the agent. It writes where the agent does: to the launcher's log.
    env = role_environment(job.threads) | job.env | {"ASYNCRL_SUPERVISED": "1"}
    command = [sys.executable, "-m", "asyncrl", job.role, *words]
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
    )
    return Child(job.role, process, Path(os.devnull))


def _say(text: str) -> None:
    """For the launcher's log, if somebody still reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return


def main() -> int:
    """Read the job, run it."""
    lifeline = Lifeline(sys.stdin.fileno())
    try:
        job = from_line(lifeline.line(SILENCE_S))
        return run(job, lifeline)
    except ConfigError as exc:
        print(f"agent: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
