"""One update of a batch: score, drift, select, update. The hop list of the learner.

Each hop takes values and returns values; the loop around it talks to replay and to the sink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algos.advantages import group_advantages, zero_variance
from asyncrl.algos.select import Selection, select, select_outliers, select_random, unit_signal
from asyncrl.config import Config
from asyncrl.learner.batch import Row
from asyncrl.learner.breakdown import breakdown
from asyncrl.learner.health import broken_weight, scoring_fault, usable
from asyncrl.learner.mismatch_rows import mismatch_columns, tis_column
from asyncrl.learner.objective import Totals
from asyncrl.learner.score import Scores, Work, native_drift, plan, score, work_of
from asyncrl.learner.shard import Policy, World, reshard
from asyncrl.learner.step import StepResult, Updater, row_logprobs
from asyncrl.learner.table import Table, all_sum, gather, row_columns, row_names
from asyncrl.sections.training import AlgorithmSection, RdcSection
from asyncrl.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything one update produced. table holds all rows of all ranks.

    keep bool [n] and bucket int [n] as selected (keep is all True under observe and off);
    would_drop bool [n]: what the gate chose, trained on or not; advantages [n]. usage float64 [L, E]: how often each
    expert was chosen natively at the counted positions, over all ranks. logp: log-probs [S] of each of this rank's rows
    as the scoring pass gave them, on the CPU, where they were asked for. parts: metrics by part of the reward and by
    data source, over all ranks.
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


@dataclass(slots=True)
class TakeState:
    """What lives from one batch of a take to the next: proximal log-probs by trajectory id."""

    old_logp: dict[str, Tensor]


def score_take(policy: Policy, rows: Sequence[Row], config: Config, info: ModelInfo, world: World) -> TakeState:
    """pi_old of a whole take in one no-grad pass, used when a take makes several updates."""
    scores = _score(policy, rows, [True] * len(rows), False, config, info, world)
    old = row_logprobs(rows, scores)
    reshard(policy)
    return TakeState({r.trajectory.trajectory_id: o for r, o in zip(rows, old, strict=True)})


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
) -> Outcome:
    """Score, measure drift, select over all ranks, update. Collective: every rank calls it.

    state carries pi_old when the take makes several updates; None means pi_old = pi. with_logp: the outcome keeps the
    log-probs of the scoring pass, which else go when they were used.
    """
    a = config.algorithm
    rows, refused = usable(rows, info.top_k)
    # Here every parameter is sharded; after a forward those of the root are not.
    weight = broken_weight(policy)
    before = gather(row_names(rows), row_columns(rows) | {"refused": refused}, world)
    rewards = torch.from_numpy(before["reward"])
    quiet = zero_variance(rewards, before.group_index)
    base = group_advantages(rewards, before.group_index, kind=a.advantage)
    # Nothing of a row that is withheld trains: its forward needs no graph either.
    withheld = torch.from_numpy(before["withheld"] > 0)
    silent = before.local(quiet & (base == 0) | withheld).tolist()
    scores = _score(policy, rows, silent, config.learner.scoring == "auto", config, info, world)
    current = row_logprobs(rows, scores)
    old = current if state is None else [state.old_logp[r.trajectory.trajectory_id] for r in rows]
    fault = scoring_fault(weight, rows, scores, current, old, world)
    table = _scored_table(policy, rows, scores, old, update, before, config, info, world)
    # Nothing may be chosen by numbers that are none.
    selection, would_drop, keep = keep_all(table, carry) if fault else choose(table, a, update, carry)
    kept_only = keep if a.rdc.baseline == "retained" else None
    advantages = group_advantages(rewards, before.group_index, kind=a.advantage, keep=kept_only)
    totals = _totals(table, keep, config)
    mine = before.local
    if fault:
        step = updater.skip(update, fault)
    else:
        step = updater.update(update, rows, scores, old, mine(advantages), mine(keep), totals, info)
    reshard(policy)
    work = work_of(scores, rows, config.learner.micro_batch_tokens)
    sums = all_sum([*scores.forced, work.padded, work.oversized, *scores.usage.flat], world)
    forced, replayed, padded, oversized = sums[:4]
    share = forced / replayed if replayed else float("nan")
    work = work._replace(padded=padded, oversized=oversized)
    usage = np.asarray(sums[4:]).reshape(scores.usage.shape)
    return Outcome(
        table, selection, would_drop, keep, advantages, totals, step, share, scores.fused, work, usage,
        current if with_logp else None, breakdown(rows, world),
    )  # fmt: skip


def _score(
    policy: Policy,
    rows: Sequence[Row],
    silent: Sequence[bool],
    fuse: bool,
    config: Config,
    info: ModelInfo,
    world: World,
) -> Scores:
    budget = config.learner.micro_batch_tokens
    batches, fused = plan(rows, silent, info, budget, fuse, policy.replay, world)
    return score(policy, rows, batches, fused, info, world)


def _scored_table(
    policy: Policy,
    rows: Sequence[Row],
    scores: Scores,
    old: Sequence[Tensor],
    update: int,
    before: Table,
    config: Config,
    info: ModelInfo,
    world: World,
) -> Table:
    columns = {k: v[before.start : before.start + before.count] for k, v in before.columns.items()}
    columns |= mismatch_columns(rows, scores)
    columns["tis_weight"] = tis_column(rows, scores, old, config.algorithm.correction)
    columns["drift"] = scores.drift
    layers = scores.layers
    every = config.algorithm.native_drift_every
    if policy.replay and every and update % every == 0:
        native, layers = native_drift(policy, rows, [p.batch for p in scores.parts], info, world)
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
