"""How a role finds another: by a file on the same file system that holds an address, or by a fixed address."""

from __future__ import annotations

import os
import time
from pathlib import Path

from asyncrl.errors import TransportError

Place = Path | str
"""Where a role is found: the file in which it publishes its address, or the address itself."""


def publish_address(file: Path, address: str) -> None:
    """Write the file in one step, so that a reader sees the whole address or none."""
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    aside.write_text(address + "\n")
    aside.replace(file)


def address_at(place: Place) -> str:
    """What is known now: a fixed address, what the file says, or "" before the file is there."""
    if isinstance(place, str):
        return place
    try:
        return place.read_text().strip()
    except FileNotFoundError:
        return ""


def wait_for_address(place: Place, timeout_s: float) -> str:
    """Waits for the file, at most timeout_s; raises TransportError after. A fixed address is there at once."""
    deadline = time.monotonic() + timeout_s
    while not (text := address_at(place)):
        if time.monotonic() >= deadline:
            raise TransportError(
                f"no address was published in {place} within run.start_timeout_s={timeout_s:g} s; is that role "
                "running? Replay may still be reading or making the data of the task: see what it says in "
                f"{Path(place).parent / 'logs' / 'replay.log'}, and set a longer run.start_timeout_s, or a smaller "
                "size of the sources"
            )
        time.sleep(0.05)
    return text
