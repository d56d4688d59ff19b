"""Processes that end with the one that started them. Imports the standard library only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies, so that a killed process leaves nothing it started.

    It counts the thread that started this process as the parent. Linux only; elsewhere nothing happens.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve_only(parent: int) -> None:
    """Leave Ctrl-C to the process with id parent, and end with it. SystemExit(1) when it died already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        raise SystemExit(1)
