"""How a role finds another on the same file system: a file that holds an address."""

from __future__ import annotations

import os
import time
from pathlib import Path

from asyncrl.errors import TransportError


def publish_address(file: Path, address: str) -> None:
    """Write the file in one step, so that a reader sees the whole address or none."""
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    aside.write_text(address + "\n")
    aside.replace(file)


def wait_for_address(file: Path, timeout_s: float) -> str:
    """Waits for `file` to appear, at most timeout_s; raises TransportError after."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if file.is_file() and (text := file.read_text().strip()):
            return text
        time.sleep(0.05)
    raise TransportError(f"no address was published in {file} within {timeout_s:g} s; is that role running?")
