"""Where the versions of a run lie: shared memory where the host has it. Imports no torch.

A publisher holds a lock in its folder, so whoever comes next can sweep the folders that nobody
holds: a publisher that was killed cannot remove its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import xxhash

from asyncrl.errors import WeightSyncError

_SHARED_MEMORY = Path("/dev/shm")


def directory_of(directory: str | Path) -> Path:
    """The folder that holds the versions named by `directory`; it need not exist."""
    place = Path(directory).absolute()
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) and _SHARED_MEMORY not in place.parents:
        place = _SHARED_MEMORY / f"{_prefix()}{xxhash.xxh3_64_hexdigest(str(place).encode())}"
    return place


def in_shared_memory(path: Path) -> bool:
    """Whether a file there is memory of this host, with no disk behind it."""
    return _SHARED_MEMORY in path.parents


def place(directory: str | Path) -> Path:
    """Make that folder, private to this user. Raises WeightSyncError when it cannot be had."""
    folder = directory_of(directory)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as exc:
        raise WeightSyncError(f"cannot make {folder}: {exc}") from exc
    if owner != os.getuid():
        raise WeightSyncError(f"{folder} belongs to user {owner}: refusing to publish into it")
    return folder


def hold(folder: Path) -> int:
    """Lock the folder for as long as the returned descriptor is open (or this process lives).

    Raises WeightSyncError when another publisher holds it.
    """
    while True:
        lock = os.open(_lock_of(folder), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A sweep may have unlinked the file between the two calls: then it protects nothing.
            if _lock_of(folder).stat().st_ino == os.fstat(lock).st_ino:
                return lock
            os.close(lock)
        except FileNotFoundError:
            os.close(lock)
        except OSError as exc:
            os.close(lock)
            raise WeightSyncError(f"{folder} has a publisher already: two learners with one run folder?") from exc


def sweep() -> list[Path]:
    """Remove the folders in shared memory of this user's publishers that are dead; returns them."""
    gone = []
    for lock in _SHARED_MEMORY.glob(f"{_prefix()}*.lock"):
        with contextlib.suppress(OSError), open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(lock.with_suffix(""))
            gone.append(lock.with_suffix(""))
    return gone


def remove(directory: str | Path) -> None:
    """Unlink every version and the folder; readers keep what they mapped. Safe to call twice."""
    _empty(directory_of(directory))


def _empty(folder: Path) -> None:
    for file in (*folder.glob("*.weights"), *folder.glob("*.part"), _lock_of(folder)):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _prefix() -> str:
    return f"asyncrl-{os.getuid()}-"
