"""The row table: one line per response of a batch, gathered over all ranks.

Selection and every logged mean are computed from the whole table, so they do not depend on how
the batch was split. Rows stand in rank order; ids travel as msgpack, columns as float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.learner.batch import Row
from asyncrl.learner.shard import World

Names = tuple[str, str, str]

_decoder: msgspec.msgpack.Decoder[list[Names]] = msgspec.msgpack.Decoder(list[Names])


@dataclass(frozen=True, slots=True)
class Table:
    """names: (trajectory id, group id, generator id) per row; columns: float64 [n] by name.

    start and count give this rank's slice.
    """

    names: list[Names]
    columns: dict[str, NDArray[np.float64]]
    start: int
    count: int

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, column: str) -> NDArray[np.float64]:
        return self.columns[column]

    @property
    def ids(self) -> list[str]:
        """Trajectory ids."""
        return [n[0] for n in self.names]

    @property
    def groups(self) -> list[str]:
        """Group ids, each once."""
        return list(dict.fromkeys(n[1] for n in self.names))

    @property
    def group_index(self) -> Tensor:
        """int64 [n]: rows of one group share a number."""
        order = {g: i for i, g in enumerate(self.groups)}
        return torch.tensor([order[n[1]] for n in self.names], dtype=torch.int64)

    def local(self, values: Tensor) -> Tensor:
        """This rank's part of a per-row tensor [n]."""
        return values[self.start : self.start + self.count]


def row_names(rows: Sequence[Row]) -> list[Names]:
    """Ids of the rows of this rank."""
    return [(r.trajectory.trajectory_id, r.group_id, r.generator_id) for r in rows]


def row_columns(rows: Sequence[Row]) -> dict[str, NDArray[np.float64]]:
    """What is known of a row before any forward pass."""

    def column(values: Sequence[float]) -> NDArray[np.float64]:
        return np.asarray(values, np.float64)

    used = [r.lag[r.loss_mask] for r in rows]
    return {
        "length": column([r.trajectory.num_tokens for r in rows]),
        "tokens": column([int(r.loss_mask.sum()) for r in rows]),
        "masked": column([r.masked for r in rows]),
        "withheld": column([r.withheld for r in rows]),
        "cut": column([r.trajectory.routes_from > 0 for r in rows]),
        "uncounted": column([int(r.loss_mask.sum() - r.count_mask.sum()) for r in rows]),
        "reward": column([r.trajectory.reward for r in rows]),
        "truncated": column([r.trajectory.finish_reason == "length" for r in rows]),
        "lag": column([r.max_lag for r in rows]),
        "lag_sum": column([float(u.sum()) for u in used]),
        "versions": column([len(r.trajectory.segments) for r in rows]),
        "input": column([r.size for r in rows]),
    }


def gather(names: Sequence[Names], columns: Mapping[str, NDArray[np.float64]], world: World) -> Table:
    """All ranks' rows in rank order. A collective: every rank calls it with the same columns.

    Waits for all ranks, at most the process group's timeout.
    """
    keys = sorted(columns)
    local = np.stack([columns[k] for k in keys], axis=1) if names else np.zeros((0, len(keys)))
    blob = msgspec.msgpack.encode(list(names))
    if world.size == 1:
        return Table(list(names), {k: local[:, i] for i, k in enumerate(keys)}, 0, len(names))
    sizes = _all_gather(torch.tensor([len(names), len(blob)], dtype=torch.int64), world)
    rows_max = int(max(s[0] for s in sizes))
    matrix = torch.zeros(rows_max, len(keys), dtype=torch.float64)
    matrix[: len(names)] = torch.from_numpy(local)
    matrices = _all_gather(matrix, world)
    everyone: list[Names] = []
    for part in _exchange(blob, [int(s[1]) for s in sizes], world):
        everyone += _decoder.decode(part)
    whole = torch.cat([m[: int(s[0])] for m, s in zip(matrices, sizes, strict=True)]).cpu().numpy()
    start = int(sum(int(s[0]) for s in sizes[: world.rank]))
    return Table(everyone, {k: whole[:, i] for i, k in enumerate(keys)}, start, len(names))


def all_sum(values: Sequence[float], world: World) -> list[float]:
    """Sums over ranks of a short float64 vector. A collective."""
    return _reduce(values, world, dist.ReduceOp.SUM)


def all_max(values: Sequence[float], world: World) -> list[float]:
    """Maxima over ranks of a short float64 vector. A collective."""
    return _reduce(values, world, dist.ReduceOp.MAX)


def all_bytes(blob: bytes, world: World) -> list[bytes]:
    """The bytes of every rank, in rank order. A collective."""
    if world.size == 1:
        return [blob]
    sizes = _all_gather(torch.tensor([len(blob)], dtype=torch.int64), world)
    return _exchange(blob, [int(s) for s in sizes], world)


def _exchange(blob: bytes, sizes: list[int], world: World) -> list[bytes]:
    """The same when all know each other's sizes."""
    raw = torch.zeros(max(sizes), dtype=torch.uint8)
    raw[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else raw[:0]
    return [part[:n].cpu().numpy().tobytes() for n, part in zip(sizes, _all_gather(raw, world), strict=True)]


def _reduce(values: Sequence[float], world: World, op: dist.ReduceOp.RedOpType) -> list[float]:
    if world.size == 1:
        return [float(v) for v in values]
    vector = torch.tensor(list(values), dtype=torch.float64, device=world.device)
    dist.all_reduce(vector, op)
    return [float(v) for v in vector.cpu()]


def _all_gather(tensor: Tensor, world: World) -> list[Tensor]:
    moved = tensor.to(world.device)
    out = [torch.empty_like(moved) for _ in range(world.size)]
    dist.all_gather(out, moved)
    return out
