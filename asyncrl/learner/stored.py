"""What lies in RUN/checkpoints: one folder u<update> per checkpoint, with state.json. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

FOLDER = "checkpoints"
FORMAT = 1
STATE = "state.json"

Hashes = dict[str, str]
"""xxh3 of files by name."""


class Progress(msgspec.Struct, frozen=True):
    """Where the learner was. batches: how many it used up, trained or skipped; carry: of the RDC quota.
    skips: updates that were skipped, by reason."""

    epoch: int
    update: int
    batches: int
    carry: float
    unforced_in_a_row: int = 0
    skips: dict[str, int] = msgspec.field(default_factory=dict)

    def in_epoch(self, epoch: int) -> Progress:
        """The same in another run epoch."""
        return msgspec.structs.replace(self, epoch=epoch)


class State(msgspec.Struct, frozen=True):
    """state.json. files: xxh3 by name. ranks: how many wrote it; 0 where that was not noted."""

    format: int
    fingerprint: str
    progress: Progress
    files: Hashes
    ranks: int = 0


def names(folder: Path) -> list[str]:
    """Names of the complete checkpoints in a folder, in no order."""
    return [f.name for f in folder.glob("u*") if f.name[1:].isdigit()]


def read_state(folder: Path) -> State:
    """state.json of a checkpoint. Raises OSError or msgspec.MsgspecError."""
    return msgspec.json.decode((folder / STATE).read_bytes(), type=State)


def by_age(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the newest first."""
    return sorted((folder / name for name in names(folder)), key=age, reverse=True)


def newest(run_dir: Path) -> Progress | None:
    """Where a learner of this run folder would go on, as far as the names and state.json say; reads no tensor."""
    for folder in by_age(run_dir / FOLDER):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return read_state(folder).progress
    return None


def age(folder: Path) -> tuple[int, int]:
    """(epoch, update) as far as it can be read: a later run epoch is newer at a lower update."""
    epoch = 0
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        epoch = read_state(folder).progress.epoch
    return epoch, int(folder.name[1:])


def delete(folder: Path) -> None:
    """Remove a checkpoint so that half of it never counts as one."""
    doomed = folder.with_name(f"{folder.name}.old.part")
    shutil.rmtree(doomed, ignore_errors=True)
    if folder.is_dir():
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def flush(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(parts: Mapping[str, object]) -> str:
    """Hash of JSON-like values."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(parts, order="sorted"))
