"""API keys of servers, each alone in a file that only its owner may read. Knows files; logs nothing."""

from __future__ import annotations

import os
from pathlib import Path

from asyncrl.errors import ConfigError

_MAX_BYTES = 4096


def read_key(file: str | Path, setting: str) -> str:
    """The key in a file, without blanks around it. ConfigError names `setting`: no file, no key, or one others read."""
    shown = f"{setting}={str(file)!r}"
    try:
        with open(file, "rb") as stream:
            mode, data = os.fstat(stream.fileno()).st_mode, stream.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{shown} cannot be read: {exc.strerror or exc}; put the key of the server there") from exc
    key = data.decode("ascii", errors="replace").strip()
    if not key:
        raise ConfigError(f"{shown} is empty; put the key of the server there, as `openssl rand -hex 32` makes one")
    if len(data) > _MAX_BYTES or not all("!" <= c <= "~" for c in key):
        raise ConfigError(f"{shown} holds no key: it must be one word of ASCII letters, digits and signs")
    if mode & 0o077:
        raise ConfigError(f"{shown} can be read by other users; chmod 600 {file}")
    return key
