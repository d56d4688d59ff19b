"""RUN/untune.json: keys that a resume named, whose values in the config win over what was tuned.

`asyncrl run --resume` writes it while no replay runs; the next replay ends what was tuned of them, saves that, and
removes it. So an order outlives a replay that could not start, and is no order to one that is started again later.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from asyncrl.errors import RunError

FILE = "untune.json"

log = logging.getLogger(__name__)


def ordered(run_dir: Path) -> set[str]:
    """The keys of orders that no replay has carried out; none when the file is damaged."""
    file = run_dir / FILE
    if not file.exists():
        return set()
    try:
        keys = json.loads(file.read_text())
    except (ValueError, RecursionError):
        keys = None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        log.warning("%s is damaged and passed over", file)
        return set()
    return set(keys)


def order(run_dir: Path, keys: Iterable[str]) -> None:
    """Add keys. Raises RunError when they cannot be written."""
    file, wanted = run_dir / FILE, {*ordered(run_dir), *keys}
    aside = file.with_name(f"{FILE}.part")
    try:
        aside.write_text(json.dumps(sorted(wanted)))
        aside.replace(file)
    except OSError as exc:
        raise RunError(f"{file} cannot be written: {exc}; make room, and resume again") from exc


def done(run_dir: Path) -> None:
    """They are carried out and saved."""
    (run_dir / FILE).unlink(missing_ok=True)
