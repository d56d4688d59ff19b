"""Runs a command and leaves nothing of it: `python -m asyncrl.engines.sglang.guard PARENT GRACE_S COMMAND...`

The command ends with this process, and this process with PARENT, whatever kills them. A server knows nothing of us and
starts processes of its own, so the guard adopts what they leave behind. SIGTERM is passed on to the command; after
GRACE_S, or a second SIGTERM, all that descends from it gets SIGKILL. The exit status is the command's, 128 + n for
signal n, 127 when it cannot be started.

Imports the standard library only: it stays in memory beside every server.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

NOT_STARTED = 127
_LOOK_S = 1.0
_KILL_S = 10.0
"""How long killed processes may take to go: those of a GPU driver take their time."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def main(arguments: list[str]) -> int:
    """Run the command until it ends or must end. Returns the exit status."""
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # Of the thread that started this process: the caller does it in its main thread.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before the call
        return 128 + signal.SIGKILL
    try:
        child = _start(libc, command)
    except OSError as exc:
        print(f"cannot start {command[0]!r}: {exc.strerror or exc}", file=sys.stderr)
        return NOT_STARTED
    status = _watch(child, parent, grace_s)
    kill_descendants()
    return status


def _start(libc: ctypes.CDLL, command: list[str]) -> int:
    """Start the command, to die with this process, and return its id. OSError when it cannot be started."""
    import subprocess

    def tie() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=tie)
    child.returncode = 0  # its end is waited for below, with all others
    return child.pid


def _watch(child: int, parent: int, grace_s: float) -> int:
    """Wait until the command ended, or until it is time to kill it. Returns its exit status."""
    deadline = float("inf")
    while True:
        heard = signal.sigtimedwait(_SIGNALS, max(0.0, min(_LOOK_S, deadline - time.monotonic())))
        status = _reap(child)
        if status is not None:
            return status
        if os.getppid() != parent or time.monotonic() >= deadline:
            return 128 + signal.SIGKILL
        if heard is not None and heard.si_signo != signal.SIGCHLD:
            if deadline < float("inf"):
                return 128 + signal.SIGKILL
            deadline = time.monotonic() + grace_s
            os.kill(child, signal.SIGTERM)


def _reap(child: int = 0) -> int | None:
    """Take note of every process that ended. Returns the status of child, None while it runs."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """SIGKILL to all that descends from this process, until nothing is left, at most _KILL_S."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        left = descendants(os.getpid())
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        time.sleep(0.01)


def descendants(root: int) -> list[int]:
    """Ids of the processes that descend from root now, zombies left out."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # The command stands in parentheses and may hold anything.
                state, ppid = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(ppid), []).append(int(name))
        if state in "ZX":
            zombies.add(int(name))
    found, rest = [], [root]
    while rest:
        below = children.get(rest.pop(), [])
        rest += below
        found += below
    return [pid for pid in found if pid not in zombies]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
