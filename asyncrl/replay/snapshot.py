"""replay.snapshot: what replay must not forget, for the process that is started after a kill.

Written aside and renamed before anybody hears of what it says. It holds no payload: groups that are
not committed are kept by their generators, which send them again. Survives a kill of the process;
it is not flushed for a kill of the host.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.replay.evals import EvalsState
from asyncrl.replay.saved import QueueState
from asyncrl.types import ModelInfo, Prompt

FILE = "replay.snapshot"
FORMAT = 4


class Snapshot(msgspec.Struct, array_like=True, gc=False):
    """One moment of replay. journal_bytes: how much of committed.jsonl it knows. done: the last update was made. data:
    hash over the prompts, see `data_fingerprint`."""

    format: int
    fingerprint: str
    data: str
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
    """The snapshot of one run folder, for one fingerprint. data: of the prompts; "" where they were not built."""

    def __init__(self, run_dir: Path, fingerprint: str, data: str = "") -> None:
        self._file, self._fingerprint, self._data = run_dir / FILE, fingerprint, data
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, **fields: Any) -> None:
        """Replace the snapshot in one step. Raises RunError when it cannot be written."""
        data = self._encoder.encode(Snapshot(format=FORMAT, fingerprint=self._fingerprint, data=self._data, **fields))
        aside = self._file.with_name(f"{FILE}.part")
        try:
            aside.write_bytes(data)
            aside.replace(self._file)
        except OSError as exc:
            raise RunError(
                f"{self._file} cannot be written: {exc}; without it a restart would train groups twice"
            ) from exc

    def read(self) -> Snapshot | None:
        """The snapshot, None without one. Raises ConfigError for one that is damaged, of another run or other data."""
        if not self._file.exists():
            return None
        data = self._file.read_bytes()
        try:
            head = msgspec.msgpack.decode(data, type=_Head)
            if head.format == FORMAT and head.fingerprint == self._fingerprint:
                return self._of_this_data(msgspec.msgpack.decode(data, type=Snapshot))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ConfigError(f"{self._file} is damaged ({exc}); {_REMEDY}") from exc
        raise ConfigError(
            f"{self._file} is of a run with another model, task, run.seed or algorithm.group_size, or of another "
            f"asyncrl; {_REMEDY}"
        )

    def _of_this_data(self, snapshot: Snapshot) -> Snapshot:
        if self._data and snapshot.data and self._data != snapshot.data:
            raise ConfigError(
                f"{self._file} is of a run with other prompts: what a file of task.train or task.eval holds, or how "
                f"its prompts are written, has changed since; put the file back as it was, {_REMEDY}"
            )
        return snapshot

    def remove(self) -> None:
        """The run is over: the next one in this folder starts anew."""
        self._file.unlink(missing_ok=True)


_REMEDY = "choose another run.name, or remove the file to give every prompt out again"


def data_fingerprint(*parts: Sequence[Prompt]) -> str:
    """Hash over prompts in their order: texts through their ids, and what scores them. Other contents of a file give
    another."""
    mark = xxhash.xxh3_64()
    for prompts in parts:
        mark.update(b"\0")
        for p in prompts:
            mark.update(f"{p.prompt_id}\0{p.answer}\0{p.source}\0{p.extra}\0".encode("utf-8", "surrogatepass"))
    return mark.hexdigest()


def fingerprint(config: Config, model: ModelInfo) -> str:
    """Hash of what gives group ids and payloads their meaning."""
    parts = [config.task.model_dump(mode="json"), config.run.seed, config.algorithm.group_size, model.fingerprint]
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())
