"""What every process of a run needs from the operating system: environment, parent death, groups."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

OWN_ERROR = " ERROR asyncrl: "
"""In a log line of a role: the error of asyncrl that ended it (cli.main writes it)."""

BASE_ENV = {
    # Without these two, OpenMP threads of busy processes spin each other to a standstill.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    # Page faults of fresh receive buffers cost 1.7x the CPU of a receive without these.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


def role_environment(threads: int) -> dict[str, str]:
    """Environment of a role: must be set before torch is imported."""
    return {**os.environ, **BASE_ENV, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def ensure_environment(threads: int) -> None:
    """Start this process again with the role environment when it lacks it (a role run by hand)."""
    wanted = role_environment(threads)
    if os.environ.get("ASYNCRL_ENV") == "1" or all(os.environ.get(k) == v for k, v in BASE_ENV.items()):
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        return
    wanted["ASYNCRL_ENV"] = "1"
    os.execve(sys.executable, [sys.executable, "-m", "asyncrl", *sys.argv[1:]], wanted)


def end(status: int) -> NoReturn:
    """End this process at once, with its output written.

    The interpreter's own clean-up takes a process with torch seconds on a busy host, a rank and torchrun after each
    other, and a process that was told to stop is killed meanwhile. What matters was closed by then.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


@dataclass(slots=True)
class Child:
    """A started role and its log file, in which its own lines begin at log_start (an earlier attempt wrote before)."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal, None while it runs."""
        return self.process.poll()

    @property
    def erred(self) -> bool:
        """True when it ended with an error that it raised on purpose: started again, it would do so again.

        The log alone says so: the status of a learner may be that of a rank which was killed because it hung.
        """
        try:
            return bool(self.returncode) and OWN_ERROR in self._text()
        except OSError:  # no log
            return False

    @property
    def lived_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started

    def cause(self) -> str:
        """Why it ended, from its own part of the log."""
        try:
            return cause_in(self._text())
        except OSError as exc:
            return f"(no log: {exc})"

    def _text(self) -> str:
        with open(self.log, "rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")


def cause_in(text: str, lines: int = 12) -> str:
    """The first cause in a role's log: its own error line, else the last traceback that is not torchrun's.

    torchrun ends its log with a banner that says that a child failed and not why.
    """
    own = [line for line in text.splitlines() if OWN_ERROR in line]
    if own:
        return own[0]
    blocks = ["Traceback" + part for part in text.split("Traceback")[1:] if "ChildFailedError" not in part]
    chosen = blocks[-1] if blocks else text
    kept = [line for line in chosen.splitlines() if "torch.distributed.elastic" not in line]
    return "\n".join(kept[-lines:])


def start(name: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Child:
    """Start a role in its own session, so that a Ctrl-C reaches it only through the supervisor."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        log_start = out.tell()
        process = subprocess.Popen(
            list(arguments), env={**env, "ASYNCRL_SUPERVISED": "1"}, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Child(name, process, log, log_start)


def stop_all(children: Iterable[Child], timeout_s: float) -> list[str]:
    """SIGTERM to every child, SIGKILL after timeout_s to what is left of them and their children.

    Descendants are collected first: a child that dies leaves its own children to init. Returns the
    names of the children that had to be killed.
    """
    children = list(children)
    family: list[psutil.Process] = []
    for child in children:
        try:
            family += psutil.Process(child.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    for child in children:
        if child.returncode is None:
            child.process.terminate()
    deadline = time.monotonic() + timeout_s
    killed = []
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            killed.append(child.name)
            child.process.kill()
            child.process.wait(2)
    _, alive = psutil.wait_procs(family, timeout=max(0.1, min(0.5, deadline - time.monotonic())))
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=1)
    return killed
