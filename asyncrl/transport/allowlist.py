"""Who may connect: the public keys of a folder, followed as files come and go. Logs public keys only."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.transport.keys import read

log = logging.getLogger(__name__)

_MAX_LOGGED = 256


class AllowList:
    """Public keys of a folder's *.pub files, read again when a file appears, changes or goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[tuple[str, int, int, int]] | None = None
        self._broken: set[str] = set()
        self.names: dict[bytes, str] = {}
        self.former: dict[bytes, str] = {}
        """Keys that were allowed earlier in this process."""
        self.refresh()

    def refresh(self) -> None:
        """Compare the folder with what was read. A folder that cannot be read allows nobody."""
        found = self._scan()
        if found == self._seen:
            return
        self._seen = found
        self.former |= self.names
        self.names = {}
        for name, *_ in found:
            try:
                self.names[read(self._folder / name, "public")] = name.removesuffix(".pub")
            except ConfigError as exc:
                if name not in self._broken and len(self._broken) < _MAX_LOGGED:
                    self._broken.add(name)
                    log.warning("allow-list: %s; it allows nobody", exc)

    def _scan(self) -> list[tuple[str, int, int, int]]:
        try:
            with os.scandir(self._folder) as entries:
                files = [(e.name, e.stat()) for e in entries if e.name.endswith(".pub")]
        except OSError as exc:
            if "" not in self._broken:
                self._broken.add("")
                log.warning("allow-list: %s cannot be read (%s); nobody is allowed until it can", self._folder, exc)
            return []
        self._broken.discard("")
        return sorted((name, s.st_mtime_ns, s.st_ino, s.st_size) for name, s in files)
