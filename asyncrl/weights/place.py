"""Where the versions of a run lie: shared memory where the host has it. Imports no torch.

A supervisor uses it to remove what a killed publisher left behind.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import xxhash

from asyncrl.errors import WeightSyncError

_SHARED_MEMORY = Path("/dev/shm")


def directory_of(directory: str | Path) -> Path:
    """The folder that holds the versions named by `directory`; it need not exist."""
    place = Path(directory).absolute()
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) and _SHARED_MEMORY not in place.parents:
        place = _SHARED_MEMORY / f"asyncrl-{os.getuid()}-{xxhash.xxh3_64_hexdigest(str(place).encode())}"
    return place


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


def remove(directory: str | Path) -> None:
    """Unlink every version and the folder; readers keep what they mapped. Safe to call twice."""
    folder = directory_of(directory)
    for file in (*folder.glob("*.weights"), *folder.glob("*.part")):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
