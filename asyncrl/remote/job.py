"""What the launcher tells an agent: one role with all that its host needs for it, in one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True)
class Job:
    """One role. keys: relative name to text of a key folder, or nothing when no keys are used."""

    role: str
    config: str
    """The resolved config as YAML: no config file is needed on the host."""
    words: list[str] = field(default_factory=list)
    """Further arguments of the command."""
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    env: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    stop_s: float = 6.0
    """Time between the request to stop and SIGKILL."""
    fresh: str = ""
    """A file that must not exist: the run folder holds another run then."""

    def to_line(self) -> bytes:
        """One line for the agent's standard input."""
        return json.dumps(asdict(self)).encode() + b"\n"


def from_line(line: bytes) -> Job:
    """Raises ConfigError for anything that is not a job of this asyncrl."""
    try:
        fields: dict[str, Any] = json.loads(line)
        return Job(**fields)
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"no job on standard input ({exc}); install the same asyncrl on every host") from exc


def read_keys(folder: str | Path, client: str, serves: bool) -> dict[str, str]:
    """The part of a key folder that a client's host needs; with `serves` also what the serving side needs.

    ConfigError names the file that is missing.
    """
    root = Path(folder)
    names = ["server.pub", f"clients/{client}.key"]
    if serves:
        names += ["server.key", *sorted(f"allowed/{f.name}" for f in (root / "allowed").glob("*.pub"))]
    try:
        return {name: (root / name).read_text() for name in names}
    except OSError as exc:
        raise ConfigError(
            f"replay.keys={str(folder)!r}: cannot read {exc.filename}: {exc.strerror}; "
            f"`asyncrl keys new {folder}` makes a folder with all keys"
        ) from exc


def write_keys(keys: Mapping[str, str], folder: Path) -> None:
    """Make the folder and lay the keys down, for this user only."""
    folder.mkdir(mode=0o700)
    for name, text in keys.items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"key file {name!r} lies outside its folder")
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(text)
