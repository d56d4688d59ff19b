"""One update of a batch: score, drift, select, update. The hop list of the learner.

Each hop takes values and returns values; the loop around it talks to replay and to the sink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algos.advantages import group_advantages
from asyncrl.algos.select import Selection, select, select_outliers, select_random, unit_signal
from asyncrl.config import Config
from asyncrl.errors import TrainingError
from asyncrl.learner.batch import Row, TakenRoutes
from asyncrl.learner.breakdown import breakdown
from asyncrl.learner.health import broken_weight, scoring_fault, usable
from asyncrl.learner.mismatch_rows import mismatch_columns, weight_columns
from asyncrl.learner.objective import Totals
from asyncrl.learner.rewards import kl_columns, shaped_rewards, silent_rows
from asyncrl.learner.score import NOTHING, Scored, Scores, Wanted, Work, native_drift, plan, score, work_of
from asyncrl.learner.shard import Policy, World, reshard
from asyncrl.learner.step import RowValues, StepResult, Updater, by_row, row_logprobs
from asyncrl.learner.table import Table, all_sum, gather, row_columns, row_names
from asyncrl.sections.algorithm import AlgorithmSection, RdcSection
from asyncrl.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything one update produced. table holds all rows of all ranks.

    keep bool [n] and bucket int [n] as selected (keep is all True under observe and off);
    would_drop bool [n]: what the gate chose, trained on or not; advantages [n]. usage float64 [L, E]: how often each
    expert was chosen natively at the counted positions, over all ranks. logp: log-probs [S] of each of this rank's rows
    as the scoring pass gave them, on the CPU, where they were asked for. parts: metrics by part of the reward and by
    data source, over all ranks. routes: algorithm.routes of this update; where it is not native, forced_fraction is the
    share of rows that were forced, NaN where none was meant to be (the only batch of a take under r2).
    """

    table: Table
    selection: Selection
    would_drop: Tensor
    keep: Tensor
    advantages: Tensor
    totals: Totals
    step: StepResult
    forced_fraction: float
    fused: bool
    work: Work
    usage: NDArray[np.float64]
    logp: list[Tensor] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    routes: str = "native"


@dataclass(slots=True)
class TakeState:
    """What lives from one batch of a take to the next, by trajectory id: proximal log-probs, and routes where the
    method needs them."""

    old_logp: dict[str, Tensor]
    routes: dict[str, TakenRoutes] = field(default_factory=dict)


def score_take(policy: Policy, rows: Sequence[Row], config: Config, info: ModelInfo, world: World) -> TakeState:
    """pi_old of a whole take in one no-grad pass, used when a take makes several updates.

    Under r2 it is natively routed, and its routes are kept; for a correction that compares the router with the one of
    now, its routes and their scores are.
    """
    a = config.algorithm
    shifts = a.compares_routers
    if shifts and policy.hook is None:
        # Preflight and replay refuse it; a weight of 1 everywhere would look like a correction.
        raise TrainingError(f"algorithm.correction.kind={a.correction.kind} compares routers, and the model is dense")
    wanted = Wanted(routes=shifts or a.routes == "r2", scores=shifts)
    replay = policy.replay and a.routes == "r3"
    scores = _score(policy, rows, [True] * len(rows), False, replay, config, info, world, wanted=wanted)
    old = row_logprobs(rows, scores)
    reshard(policy)
    state = TakeState({r.trajectory.trajectory_id: o for r, o in zip(rows, old, strict=True)})
    while scores.parts:
        # One by one, because they are copied here and those of a take are large.
        state.routes |= taken_routes(rows, scores.parts.pop(), a.routes == "r2", info)
    return state


def taken_routes(rows: Sequence[Row], part: Scored, forced: bool, info: ModelInfo) -> dict[str, TakenRoutes]:
    """Routes, and scores where they were read, of the rows of a forward by trajectory id; empty where nobody asked."""
    out: dict[str, TakenRoutes] = {}
    if part.used is None:
        return out
    for j, i in enumerate(part.batch.index):
        size = rows[i].size
        routes = part.used[:, j, :size].permute(1, 0, 2).numpy().astype(info.route_dtype, order="C")
        scores = None if part.scores is None else part.scores[:, j, :size].permute(1, 0, 2).contiguous().numpy()
        out[rows[i].trajectory.trajectory_id] = TakenRoutes(routes, scores, forced)
    return out


def run_update(
    policy: Policy,
    updater: Updater,
    rows: Sequence[Row],
    update: int,
    carry: float,
    state: TakeState | None,
    config: Config,
    info: ModelInfo,
    world: World,
    with_logp: bool = False,
    reference: Policy | None = None,
) -> Outcome:
    """Score, measure drift, select over all ranks, update. Collective: every rank calls it.

    state carries pi_old when the take makes several updates; None means pi_old = pi. with_logp: the outcome keeps the
    log-probs of the scoring pass, which else go when they were used. reference: of algorithm.kl, where its coef is not
    0.
    """
    a = config.algorithm
    rows, refused = usable(rows, info.top_k)
    if state is not None and state.routes:
        rows = [replace(r, taken=state.routes[r.trajectory.trajectory_id]) for r in rows]
    # Here every parameter is sharded; after a forward those of the root are not.
    weight = broken_weight(policy)
    before = gather(row_names(rows), row_columns(rows) | {"refused": refused}, world)
    # Nothing of a row that is withheld trains: its forward needs no graph either.
    silent = before.local(silent_rows(before, a)).tolist()
    replay = policy.replay and (a.routes == "r3" or state is not None)
    wanted = Wanted(scores=state is not None and a.compares_routers)
    fuse = config.learner.scoring == "auto"
    scores = _score(policy, rows, silent, fuse, replay, config, info, world, reference, wanted)
    current = row_logprobs(rows, scores)
    old = current if state is None else [state.old_logp[r.trajectory.trajectory_id] for r in rows]
    values = RowValues(old, by_row(rows, scores, lambda p: p.router_shift), by_row(rows, scores, lambda p: p.ref_logp))
    fault = scoring_fault(weight, rows, scores, current, old, world, values.ref_logp)
    table = _scored_table(policy, rows, scores, values, update, before, config, info, world)
    # Nothing may be chosen by numbers that are none.
    selection, would_drop, keep = keep_all(table, carry) if fault else choose(table, a, update, carry)
    kept_only = keep if a.rdc.baseline == "retained" else None
    rewards = torch.from_numpy(table["reward"]) if fault else shaped_rewards(table, a)
    advantages = group_advantages(rewards, before.group_index, kind=a.advantage, keep=kept_only, settings=a)
    totals = _totals(table, keep, config)
    mine = before.local
    if fault:
        step = updater.skip(update, fault)
    else:
        step = updater.update(update, rows, scores, values, mine(advantages), mine(keep), totals, info)
    reshard(policy)
    work = work_of(scores, rows, config.learner.micro_batch_tokens)
    sums = all_sum([*scores.forced, work.padded, work.oversized, *scores.usage.flat], world)
    forced, replayed, padded, oversized = sums[:4]
    share = forced / replayed if replayed else float("nan")
    work = work._replace(padded=padded, oversized=oversized)
    usage = np.asarray(sums[4:]).reshape(scores.usage.shape)
    return Outcome(
        table, selection, would_drop, keep, advantages, totals, step, share, scores.fused, work, usage,
        current if with_logp else None, breakdown(rows, world), a.routes,
    )  # fmt: skip


def _score(
    policy: Policy,
    rows: Sequence[Row],
    silent: Sequence[bool],
    fuse: bool,
    replay: bool,
    config: Config,
    info: ModelInfo,
    world: World,
    reference: Policy | None = None,
    wanted: Wanted = NOTHING,
) -> Scores:
    budget = config.learner.micro_batch_tokens
    batches, fused = plan(rows, silent, info, budget, fuse, replay, world)
    return score(policy, rows, batches, fused, info, world, reference, wanted)


def _scored_table(
    policy: Policy,
    rows: Sequence[Row],
    scores: Scores,
    values: RowValues,
    update: int,
    before: Table,
    config: Config,
    info: ModelInfo,
    world: World,
) -> Table:
    columns = {k: v[before.start : before.start + before.count] for k, v in before.columns.items()}
    columns |= mismatch_columns(rows, scores)
    columns |= weight_columns(rows, scores, values, config.algorithm)
    columns |= kl_columns(rows, scores, values)
    columns["drift"] = scores.drift
    layers = scores.layers
    every = config.algorithm.native_drift_every
    batches = [p.batch for p in scores.parts]
    if every and update % every == 0 and any(b.routes is not None for b in batches):
        native, layers = native_drift(policy, rows, batches, info, world)
        # What has no drift here has none there: no token, no counts, or log-probs that are none.
        undefined = np.isnan(scores.drift)
        native[undefined], layers[undefined] = np.nan, np.nan
        columns["native_drift"] = native
    columns |= {f"layer_{layer}": layers[:, i] for i, layer in enumerate(info.layers)}
    return gather(row_names(rows), columns, world)


def choose(table: Table, a: AlgorithmSection, update: int, carry: float) -> tuple[Selection, Tensor, Tensor]:
    """Selection over the whole batch; would_drop [n] and keep [n] differ under observe."""
    r: RdcSection = a.rdc
    if r.mode == "off":
        return keep_all(table, carry)
    lengths = torch.from_numpy(table["length"]).to(torch.int64)
    signal = torch.from_numpy(table["drift"])
    if r.signal == "log_ratio":
        ratio = unit_signal(torch.from_numpy(table["abs_log_ratio"]))
        signal = torch.where(torch.isnan(signal), signal, ratio)
    if r.mode == "random":
        chosen = select_random(
            signal, lengths, table.ids, r.q, r.buckets, r.bucket_edges, carry, update, r.on_undefined
        )
    elif r.gate == "outlier":
        chosen = select_outliers(
            signal, lengths, table.ids, r.outlier_k, r.outlier_floor, r.q, r.buckets, r.bucket_edges, r.on_undefined
        )
        # This gate has no quota; what top_q owed stays owed.
        chosen = chosen._replace(carry=carry)
    else:
        chosen = select(signal, lengths, table.ids, r.q, r.buckets, r.bucket_edges, carry, update, r.on_undefined)
    keep = torch.ones_like(chosen.keep) if r.mode == "observe" else chosen.keep
    return chosen, ~chosen.keep, keep


def keep_all(table: Table, carry: float) -> tuple[Selection, Tensor, Tensor]:
    """As `choose`, when nothing is dropped."""
    everything = torch.ones(len(table), dtype=torch.bool)
    return Selection(everything, torch.zeros(len(table), dtype=torch.int64), carry, 0), ~everything, everything


def _totals(table: Table, keep: Tensor, config: Config) -> Totals:
    a = config.algorithm
    counted = np.ones(len(table), bool) if a.rdc.normalize == "batch" else keep.numpy()
    if not bool((table["tokens"] * keep.numpy()).sum() > 0):
        return Totals(0.0, 0.0, 0.0)
    tokens = float((table["tokens"] * counted).sum())
    sequences = float(((table["tokens"] > 0) & counted).sum())
    return Totals(tokens, sequences, sequences * config.sampling.max_new_tokens)
