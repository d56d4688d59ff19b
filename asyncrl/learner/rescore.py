"""The learner's forward over a dump, in one process and without its optimizer: what another policy does with the
same responses. The same model, sharding, precision and micro-batches as in the run, so that the same policy gives the
same bits on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import HashStore  # type: ignore[attr-defined]

from asyncrl.algos.drift import expert_counts
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import Row, TakenRoutes, rows_of
from asyncrl.learner.dump import Dump
from asyncrl.learner.health import usable
from asyncrl.learner.mismatch_rows import mismatch_columns
from asyncrl.learner.rewards import silent_rows
from asyncrl.learner.score import Scored, Scores, fill_drift, plan
from asyncrl.learner.shard import Policy, World, build_policy, reshard
from asyncrl.learner.update import TakeState
from asyncrl.models.device import pick_device


@dataclass(frozen=True, slots=True)
class Native:
    """What a policy does with the responses of a dump; rows [n] as in its table.

    drift float64 [n] and layers [n, L], NaN where undefined; counts int64 [n, L, E] of the counted tokens; ratio
    float64 [n]: mean |log pi/mu| of the loss tokens; routes: per row [T, L, K] of its counted tokens, experts
    ascending.
    """

    drift: NDArray[np.float64]
    layers: NDArray[np.float64]
    counts: NDArray[np.int64]
    ratio: NDArray[np.float64]
    routes: list[NDArray[np.unsignedinteger]]


@contextmanager
def alone(device: Literal["auto", "cpu", "cuda"]) -> Iterator[World]:
    """A learner of one rank in this process. device: as learner.device, ConfigError when it is not there."""
    chosen = pick_device(device, "learner.device")
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield World(0, 1, chosen)
    finally:
        if started:
            dist.destroy_process_group()


def policy_of(dump: Dump, folder: Path, world: World) -> Policy:
    """The policy in a model folder, as the learner of that run computes with it. Errors of `load_model`."""
    model = dump.config.model.model_copy(update={"path": str(folder)})
    # Compiling takes longer than the forwards of a few dumps, and there is no backward.
    settings = dump.config.learner.model_copy(update={"compile": False, "activation_checkpointing": False})
    return build_policy(model, settings, dump.config.algorithm.replays, world)


def take_state(dump: Dump) -> TakeState | None:
    """What the update had from the scoring pass of its take, None where it was the only update of it."""
    if dump.old_logp is None:
        return None
    forced, scores = dump.config.algorithm.routes == "r2", dump.scores or {}
    routes = {i: TakenRoutes(r, scores.get(i), forced) for i, r in (dump.routes or {}).items()}
    return TakeState({i: torch.from_numpy(logp) for i, logp in dump.old_logp.items()}, routes)


def rows_of_rank(dump: Dump, rank: int) -> list[Row]:
    """The rows that a rank of the run had, as the update used them."""
    masks = dump.config.algorithm.truncated == "mask"
    rows = rows_of(dump.ranks[rank], dump.update, dump.head.bound, dump.info, masks)
    return usable(rows, dump.info.top_k)[0]


def rescore(policy: Policy, dump: Dump, world: World) -> Native:
    """Forward all responses of a dump once, rank by rank as they lay in the run."""
    ranks = [rows_of_rank(dump, rank) for rank in range(len(dump.ranks))]
    ids = [row.trajectory.trajectory_id for rows in ranks for row in rows]
    if ids != dump.table.ids:
        raise ConfigError(f"{dump.folder} is damaged: its groups are not those of its table; use another dump")
    silent: list[bool] = silent_rows(dump.table, dump.config.algorithm).tolist()
    parts, at = [], 0
    for rows in ranks:
        parts.append(_rank(policy, rows, silent[at : at + len(rows)], dump, world))
        at += len(rows)
    drift, layers, counts, ratio = (
        np.concatenate([getattr(p, name) for p in parts]) for name in ("drift", "layers", "counts", "ratio")
    )
    return Native(drift, layers, counts, ratio, [routes for p in parts for routes in p.routes])


def rollout_routes(dump: Dump) -> list[NDArray[np.unsignedinteger] | None]:
    """Rollout routes of every row as `Native.routes`, None where only counts were sent."""
    out: list[NDArray[np.unsignedinteger] | None] = []
    for rank in range(len(dump.ranks)):
        for row in rows_of_rank(dump, rank):
            routes = row.trajectory.routes
            out.append(None if routes is None else np.sort(routes[_counted(row)], axis=-1))
    return out


def _counted(row: Row) -> NDArray[np.int64]:
    """Input positions of the counted tokens."""
    positions: NDArray[np.int64] = len(row.prompt_ids) - 1 + np.flatnonzero(row.count_mask)
    return positions


def _rank(policy: Policy, rows: Sequence[Row], silent: Sequence[bool], dump: Dump, world: World) -> Native:
    info, s = dump.info, dump.config.learner
    shape = (len(rows), len(info.layers))
    drift, layers = np.full(len(rows), np.nan), np.full(shape, np.nan)
    counts = np.zeros((*shape, info.num_experts), np.int64)
    routes: list[NDArray[np.unsignedinteger]] = [np.zeros((0, shape[1], info.top_k), info.route_dtype)] * len(rows)
    parts: list[Scored] = []
    batches, fused = plan(rows, silent, info, s.micro_batch_tokens, s.scoring == "auto", False, world)
    for cpu_batch in batches:
        batch = cpu_batch.to(world.device)
        with torch.no_grad():
            logp, entropy, native = policy(batch)
        parts.append(Scored(batch, logp, entropy))
        if native is None or not batch.index:
            continue
        fill_drift(drift, layers, rows, batch, native, info)
        native_BSLK = native.permute(1, 2, 0, 3)
        counts[list(batch.index)] = expert_counts(native_BSLK, batch.count_mask, info.num_experts).cpu().numpy()
        for j, i in enumerate(batch.index):
            kept = native_BSLK[j, torch.from_numpy(_counted(rows[i])).to(world.device)]
            routes[i] = kept.sort(dim=-1).values.cpu().numpy().astype(info.route_dtype)
    reshard(policy)
    ratio = mismatch_columns(rows, Scores(parts, drift, layers, (0.0, 0.0), fused))["abs_log_ratio"]
    return Native(drift, layers, counts, ratio, routes)
