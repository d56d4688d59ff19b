"""replay.snapshot: what replay must not forget, for the process that is started after a kill.

Written aside and renamed before anybody hears of what it says. It holds no payload: groups that are
not committed are kept by their generators, which send them again. Survives a kill of the process;
it is not flushed for a kill of the host.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.replay.evals import EvalsState
from asyncrl.replay.saved import QueueState
from asyncrl.types import ModelInfo

FILE = "replay.snapshot"
FORMAT = 3


class Snapshot(msgspec.Struct, array_like=True, gc=False):
    """One moment of replay. journal_bytes: how much of committed.jsonl it knows. done: the last update was made."""

    format: int
    fingerprint: str
    restarts: int
    queue: QueueState
    evaluations: EvalsState
    source: str
    generators: list[str]
    done: bool
    journal_bytes: int


class _Head(msgspec.Struct, array_like=True):
    format: int
    fingerprint: str


class SnapshotFile:
    """The snapshot of one run folder, for one fingerprint."""

    def __init__(self, run_dir: Path, fingerprint: str) -> None:
        self._file, self._fingerprint = run_dir / FILE, fingerprint
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, **fields: Any) -> None:
        """Replace the snapshot in one step. Raises RunError when it cannot be written."""
        data = self._encoder.encode(Snapshot(format=FORMAT, fingerprint=self._fingerprint, **fields))
        aside = self._file.with_name(f"{FILE}.part")
        try:
            aside.write_bytes(data)
            aside.replace(self._file)
        except OSError as exc:
            raise RunError(
                f"{self._file} cannot be written: {exc}; without it a restart would train groups twice"
            ) from exc

    def read(self) -> Snapshot | None:
        """The snapshot, None without one. Raises ConfigError for one that is damaged or of another run."""
        if not self._file.exists():
            return None
        data = self._file.read_bytes()
        try:
            head = msgspec.msgpack.decode(data, type=_Head)
            if head.format == FORMAT and head.fingerprint == self._fingerprint:
                return msgspec.msgpack.decode(data, type=Snapshot)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ConfigError(f"{self._file} is damaged ({exc}); {_REMEDY}") from exc
        raise ConfigError(
            f"{self._file} is of a run with another model, task, run.seed or algorithm.group_size, or of another "
            f"asyncrl; {_REMEDY}"
        )

    def remove(self) -> None:
        """The run is over: the next one in this folder starts anew."""
        self._file.unlink(missing_ok=True)


_REMEDY = "choose another run.name, or remove the file to give every prompt out again"


def fingerprint(config: Config, model: ModelInfo) -> str:
    """Hash of what gives group ids and payloads their meaning."""
    parts = [config.task.model_dump(mode="json"), config.run.seed, config.algorithm.group_size, model.fingerprint]
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())
