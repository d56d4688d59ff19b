"""A folder for secrets that lasts as long as its process, in memory where the host has a file system there.

Whoever makes one holds a lock on it, which also a kill ends, and first sweeps those of this user that nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make it, for this user only; it goes away with the block, or with the next sweep after a kill."""
    sweep()
    folder, lock = _held(_place())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep() -> list[Path]:
    """Remove the folders of this user's dead processes on this host; returns them."""
    gone = []
    for folder in _place().glob(f"{_prefix()}*"):
        # Anybody may make such a name there: no link is followed, and only what is ours is removed.
        with contextlib.suppress(OSError), _opened(folder) as lock:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                gone.append(folder)
    return gone


def _held(place: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-", dir=place))
        # A sweep may come between any two of these steps; then the folder is gone, and another one is made.
        with contextlib.suppress(BlockingIOError, FileNotFoundError), _opened(folder) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.stat().st_ino == os.fstat(lock).st_ino:
                return folder, os.dup(lock)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _place() -> Path:
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _prefix() -> str:
    return f"asyncrl-private-{os.getuid()}-"
