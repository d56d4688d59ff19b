"""When the learner writes what an update trained on, and how: aside, by all ranks, renamed last; never fatal.

The layout is that of asyncrl.learner.dump.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from asyncrl.arrays import Buffer
from asyncrl.config import Config
from asyncrl.errors import WeightSyncError, WireError
from asyncrl.learner.dump import (
    FOLDER,
    FORMAT,
    HEAD,
    POLICY,
    TABLE,
    File,
    Head,
    groups_file,
    logp_file,
    old_file,
    pack_groups,
    pack_table,
    routes_file,
    scores_file,
)
from asyncrl.learner.publish import export
from asyncrl.learner.shard import Policy, World
from asyncrl.learner.table import all_bytes
from asyncrl.learner.update import Outcome, TakeState
from asyncrl.types import Group, ModelInfo
from asyncrl.wire import SCHEMA

log = logging.getLogger(__name__)

Files = dict[str, File]

_found_decoder: msgspec.json.Decoder[tuple[Files, str]] = msgspec.json.Decoder(tuple[Files, str])


@dataclass(frozen=True, slots=True)
class _Begun:
    """A dump before its update: what the step will change. why: what went wrong so far, or ""."""

    update: int
    carry: float
    epoch: int
    config: Config
    policy: bool
    seconds: float
    why: str


class Dumps:
    """The dumps of one run folder, which the ranks share. begin and finish are collectives.

    anew: the run begins; what an earlier run left in this folder becomes dumps-1, dumps-2, ...
    """

    def __init__(self, run_dir: Path, world: World, info: ModelInfo, anew: bool) -> None:
        self._folder, self._world, self._info = run_dir / FOLDER, world, info
        self._begun: _Begun | None = None
        self._wrote: dict[str, float] = {}
        self.failures = 0
        if anew and world.is_writer and self._folder.is_dir():
            self._set_aside()

    @property
    def due(self) -> bool:
        """True between begin and finish of an update that is dumped. The same on every rank."""
        return self._begun is not None

    def begin(self, policy: Policy, update: int, epoch: int, carry: float, config: Config) -> None:
        """Before an update: when its dump is due, rank 0 makes the folder, and the policy is written."""
        self._begun, g = None, config.logging
        if not g.dump_every or update % g.dump_every:
            return
        started = time.monotonic()
        why = self._first(self._prepare(update))
        if g.dump_policy and not why:
            try:
                export(policy, config.model.path, self._aside(update) / POLICY, self._world)
            except WeightSyncError as exc:  # on rank 0, behind the last collective of it
                why = str(exc)
        self._begun = _Begun(update, carry, epoch, config, g.dump_policy, time.monotonic() - started, why)

    def finish(self, groups: Sequence[Group], bound: int, state: TakeState | None, outcome: Outcome) -> None:
        """After the update: every rank writes its groups with their log-probs, rank 0 all else and the name."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        started = time.monotonic()
        mine: Files = {}
        # Rank 0 alone may know better than the others that there is nothing to write into.
        why = self._first(begun.why)
        if not why:
            try:
                mine = self._write_mine(begun.update, groups, state, outcome)
            except (OSError, WireError) as exc:
                why = str(exc)
        files: Files = {}
        for part in all_bytes(msgspec.json.encode((mine, why)), self._world):
            found, failed = _found_decoder.decode(part)
            files |= found
            why = why or failed
        if not self._world.is_writer:
            return
        if not why:
            try:
                self._seal(begun, files, bound, outcome)
            except OSError as exc:
                why = str(exc)
        self._note(begun, files, begun.seconds + time.monotonic() - started, why)

    def scalars(self) -> dict[str, float]:
        """Metrics of rank 0 since the last record; nothing in a run that never dumped. No collective."""
        wrote, self._wrote = self._wrote, {}
        return wrote

    def _note(self, begun: _Begun, files: Files, seconds: float, why: str) -> None:
        if why:
            self.failures += 1
            log.error("%s was not written: %s", self._final(begun.update), why)
            # What is left of it would keep a full disk full.
            shutil.rmtree(self._aside(begun.update), ignore_errors=True)
        size = sum(f.size for f in files.values()) if not why else 0
        self._wrote = {"run/dump_s": seconds, "run/dump_bytes": float(size), "run/dump_failures": float(self.failures)}

    def _set_aside(self) -> None:
        number = 1
        while (old := self._folder.with_name(f"{FOLDER}-{number}")).exists():
            number += 1
        try:
            self._folder.rename(old)
        except OSError as exc:
            log.error("%s holds dumps of an earlier run and stays: %s", self._folder, exc)

    def _final(self, update: int) -> Path:
        return self._folder / f"u{update}"

    def _aside(self, update: int) -> Path:
        return self._folder / f"u{update}.part"

    def _prepare(self, update: int) -> str:
        """Rank 0 makes the folder anew; what went wrong, or ""."""
        if not self._world.is_writer:
            return ""
        try:
            for left in self._folder.glob("*.part"):
                shutil.rmtree(left, ignore_errors=True)
            self._aside(update).mkdir(parents=True)
        except OSError as exc:
            return str(exc)
        return ""

    def _first(self, why: str) -> str:
        """What went wrong on the first rank that has something to say, on every rank. A collective."""
        return next((w for w in map(bytes.decode, all_bytes(why.encode(), self._world)) if w), "")

    def _write_mine(
        self, update: int, groups: Sequence[Group], state: TakeState | None, outcome: Outcome | None
    ) -> Files:
        aside, rank = self._aside(update), self._world.rank
        files = {groups_file(rank): _write(aside / groups_file(rank), pack_groups(groups))}
        if outcome is not None and outcome.logp is not None:
            logp = _of_responses(groups, outcome.logp)
            files[logp_file(rank)] = _write(aside / logp_file(rank), [save(logp)])
        if state is not None:
            ids = [t.trajectory_id for g in groups for t in g.trajectories]
            found = {old_file(rank): {i: state.old_logp[i].detach().cpu().numpy() for i in ids}}
            if state.routes:
                taken = {i: state.routes[i] for i in ids}
                found[routes_file(rank)] = {i: t.routes for i, t in taken.items()}
                found[scores_file(rank)] = {i: t.scores for i, t in taken.items() if t.scores is not None}
            files |= {name: _write(aside / name, [save(arrays)]) for name, arrays in found.items() if arrays}
        return files

    def _seal(self, begun: _Begun, files: Files, bound: int, outcome: Outcome) -> None:
        """The table and dump.json, then the name. An older dump of that name was of a batch or timeline undone."""
        aside, final = self._aside(begun.update), self._final(begun.update)
        selected: dict[str, Any] = {
            "keep": outcome.keep.numpy(), "would_drop": outcome.would_drop.numpy(),
            "bucket": outcome.selection.bucket.numpy(), "advantages": np.asarray(outcome.advantages, np.float64),
        }  # fmt: skip
        files[TABLE] = _write(aside / TABLE, [pack_table(outcome.table, selected)])
        head = Head(
            FORMAT, SCHEMA, begun.epoch, begun.update, outcome.step.outcome, bound, begun.carry, self._world.size,
            begun.policy, asdict(self._info), outcome.table.names, dict(files), begun.config.model_dump(mode="json"),
        )  # fmt: skip
        files[HEAD] = _write(aside / HEAD, [msgspec.json.format(msgspec.json.encode(head), indent=1)])
        if begun.policy:
            for file in (aside / POLICY).iterdir():
                files[f"{POLICY}/{file.name}"] = File("", file.stat().st_size)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)


def _of_responses(groups: Sequence[Group], logp: Sequence[Tensor]) -> dict[str, NDArray[np.floating]]:
    """Log-probs [T] of the response tokens by trajectory id. logp: [S] of every row, in the order of the groups."""
    responses = [(len(g.prompt.token_ids) - 1, t) for g in groups for t in g.trajectories]
    return {
        t.trajectory_id: np.ascontiguousarray(values[start : start + t.num_tokens].numpy())
        for (start, t), values in zip(responses, logp, strict=True)
    }


def _write(file: Path, parts: Iterable[Buffer]) -> File:
    """Write a file from its pieces, flushed to the disk."""
    digest, size = xxhash.xxh3_64(), 0
    with file.open("wb") as out:
        for part in parts:
            out.write(part)
            digest.update(part)
            size += len(part)
        out.flush()
        os.fsync(out.fileno())
    return File(digest.hexdigest(), size)
