"""The memory of one version file, used again for a later version when no reader holds it.

New memory is written as a file, which fetches pages without filling them with zeros first. Memory used again is
written through a mapping that stays, in 0.6x the time. Only pages that the file has are written that way, so a full
shared memory is an error of write(), never a SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path

from asyncrl.weights.place import in_shared_memory

# Only Linux has it; without, the pages are mapped at their first use.
_MAP = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class Memory:
    """A new file at path, private to this user. Raises OSError, as do all methods that write or rename."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "w+b", opener=_private)  # noqa: SIM115 - as long as the object
        self._mapped: mmap.mmap | None = None
        self._at = self._writable = 0

    def reuse(self, path: Path) -> bool:
        """Start again under another name, locked until seal(); False when a reader holds it or the file is gone."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rename(path)
        except OSError:
            return False
        size = os.fstat(self._file.fileno()).st_size
        if self._mapped is None and size and in_shared_memory(path):
            with contextlib.suppress(OSError):
                self._mapped = mmap.mmap(self._file.fileno(), size, flags=_MAP)
        # The file may have been cut since it was mapped: what lies behind its end must not be touched.
        self._writable = min(size, len(self._mapped)) if self._mapped is not None else 0
        self._at = 0
        self._file.seek(0)
        return True

    def write(self, block: bytes | memoryview) -> None:
        """Append bytes, one dimension of uint8."""
        end = self._at + len(block)
        if self._mapped is not None and end <= self._writable:
            self._mapped[self._at : end] = block
        else:
            if self._writable:
                self._writable = 0
                self._file.seek(self._at)
            self._file.write(block)
        self._at = end

    def seal(self) -> None:
        """End the file after what was written, and let readers lock it."""
        self._file.truncate(self._at)
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def rename(self, path: Path) -> None:
        """Give the file another name; one that has it loses it."""
        self.path.replace(path)
        self.path = path

    def close(self) -> None:
        """Keep the file, if it still has a name, but never write to it again."""
        if self._mapped is not None:
            self._mapped.close()
        self._file.close()

    def discard(self) -> None:
        """close(), and take the file's name: readers keep what they mapped."""
        self.path.unlink(missing_ok=True)
        # What is still buffered after a failed write must not raise again.
        with contextlib.suppress(OSError):
            self.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
