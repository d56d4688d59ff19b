"""The scoring pass: log-probs, native routes and drift of a rank's rows under current weights.

One forward serves score and update (fused) when every rank's share fits the token budget;
otherwise a no-grad pass comes first and the update runs its own forward. Rows whose advantage is
known to be zero are always scored without a graph.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asyncrl.algos.drift import expert_counts, layer_drift, route_drift
from asyncrl.learner.batch import MicroBatch, Row, collate, micro_batches, padded_tokens, spread
from asyncrl.learner.shard import Policy, World, reshard
from asyncrl.learner.table import all_max
from asyncrl.types import ModelInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scored:
    """A micro-batch and its forward: logp [B, S] (with graph when batch.grad), entropy [B, S].

    ref_logp [B, S]: of the reference policy. router_shift [B, S]: mean over layers and K of |log-score now - at the
    start of the take| of the experts that were used then. used int16 [L, B, S, K]: the experts that were used, and
    scores float32 [L, B, S, K] their log-scores, both on the CPU. None where nobody asks.
    """

    batch: MicroBatch
    logp: Tensor
    entropy: Tensor
    ref_logp: Tensor | None = None
    router_shift: Tensor | None = None
    scores: Tensor | None = None
    used: Tensor | None = None

    def padded(self, values: Sequence[Tensor]) -> Tensor:
        """Per-row values [S_i] of the whole rank, laid out like logp [B, S]; 0 beyond each row."""
        if not self.batch.index:
            return torch.zeros_like(self.logp)
        mine = pad_sequence([values[i] for i in self.batch.index], batch_first=True)
        return F.pad(mine.to(self.logp), (0, self.logp.shape[1] - mine.shape[1]))


@dataclass(frozen=True, slots=True)
class Scores:
    """Scoring pass of one rank. drift float64 [n] and layers [n, L] are NaN where undefined.

    forced is (rows forced, rows) of the replayed forwards; fused says whether graphs are kept. usage float64 [L, E]:
    how often each expert was chosen at the counted positions.
    """

    parts: list[Scored]
    drift: NDArray[np.float64]
    layers: NDArray[np.float64]
    forced: tuple[float, float]
    fused: bool
    usage: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))


@functools.cache
def _warn_of_long_rows(budget: int) -> None:
    """Once in a process; throughput/oversized_rows counts them in every update."""
    log.warning(
        "a response with its prompt is longer than learner.micro_batch_tokens=%d and gets a micro-batch of its own: "
        "the longest response, not the budget, sets the peak memory; raise learner.micro_batch_tokens, or lower "
        "sampling.max_new_tokens if memory runs out", budget,
    )  # fmt: skip


class Wanted(NamedTuple):
    """What a scoring pass keeps of the routers. routes: the experts that were used. scores: their log-scores; for rows
    that carry those of the start of their take, how far the scores of these experts moved since."""

    routes: bool = False
    scores: bool = False


NOTHING = Wanted()


class Work(NamedTuple):
    """What the scoring pass ran. passes: forwards on each rank. Sums over ranks: padded, the tokens these processed,
    pads included; oversized, the rows longer than the token budget, each alone in its micro-batch."""

    passes: int
    padded: float
    oversized: float


def work_of(scores: Scores, rows: Sequence[Row], budget: int) -> Work:
    """The work of this rank."""
    padded = sum(part.batch.input_ids.numel() for part in scores.parts)
    return Work(len(scores.parts), float(padded), float(sum(r.size > budget for r in rows)))


def plan(
    rows: Sequence[Row], silent: Sequence[bool], info: ModelInfo, budget: int, fuse: bool, replay: bool, world: World
) -> tuple[list[MicroBatch], bool]:
    """Micro-batches of the scoring pass and whether it is fused with the update.

    silent rows need no gradient. Every rank gets the same number of micro-batches of each kind, because each
    forward is a collective: as many as the rank that needs most, and of similar size. Fused means that on every
    rank the padded rows with a gradient take at most budget tokens together. A collective.
    """
    sizes = [r.size for r in rows]
    if max(sizes, default=0) > budget:
        _warn_of_long_rows(budget)
    everything, index = range(len(rows)), [i for i, s in enumerate(silent) if not s]
    loud, silent_index = micro_batches(sizes, index, budget), [i for i, s in enumerate(silent) if s]
    counts = [len(micro_batches(sizes, part, budget)) for part in (silent_index, everything)]
    fits = padded_tokens(sizes, loud) <= budget
    unfit, most_loud, most_quiet, most = map(int, all_max([float(not (fits and fuse)), len(loud), *counts], world))
    if unfit:
        split = spread(sizes, everything, budget, most)
        return [collate(rows, i, info, False, replay) for i in split], False
    # Without a graph first: then no graph waits in memory meanwhile.
    batches = [collate(rows, i, info, False, replay) for i in spread(sizes, silent_index, budget, most_quiet)]
    # At least one forward with a graph per update, so that gradients exist (as zeros) everywhere.
    split = spread(sizes, index, budget, max(1, most_loud))
    if padded_tokens(sizes, split) > budget:
        split = [[]] * (len(split) - len(loud)) + loud
    return batches + [collate(rows, i, info, True, replay) for i in split], True


def score(
    policy: Policy,
    rows: Sequence[Row],
    batches: Sequence[MicroBatch],
    fused: bool,
    info: ModelInfo,
    world: World,
    reference: Policy | None = None,
    wanted: Wanted = NOTHING,
) -> Scores:
    """Forward every micro-batch once and measure drift against the rollout counts; with a reference policy its
    log-probs too, natively routed."""
    parts: list[Scored] = []
    drift = np.full(len(rows), np.nan)
    layers = np.full((len(rows), len(info.layers)), np.nan)
    usage = np.zeros((len(info.layers), info.num_experts))
    forced = [0.0, 0.0]
    for cpu_batch in batches:
        batch = cpu_batch.to(world.device)
        with torch.set_grad_enabled(batch.grad):
            logp, entropy, native = policy(batch, wanted.scores)
        parts.append(_scored(policy, batch, logp, entropy, reference, wanted))
        if batch.routes is not None and policy.hook is not None:
            # A share times a count is a whole number of rows, up to rounding.
            forced[0] += round(float(policy.hook.forced_fraction) * batch.input_ids.numel(), 6)
            # All that could have a route: also rows whose routes are unknown and that are native.
            forced[1] += float(sum(max(rows[i].size - 1, 0) for i in batch.index))
        if native is not None and batch.index:
            usage += fill_drift(drift, layers, rows, batch, native, info)
    if reference is not None:
        # No whole weights of it while the policy is differentiated.
        reshard(reference)
    return Scores(parts, drift, layers, (forced[0], forced[1]), fused, usage)


def _scored(
    policy: Policy, batch: MicroBatch, logp: Tensor, entropy: Tensor, reference: Policy | None, wanted: Wanted
) -> Scored:
    """The forward that the policy just ran, with what else was asked for."""
    part = Scored(batch, logp, entropy)
    if reference is not None:
        with torch.no_grad():
            part = replace(part, ref_logp=reference(batch)[0])
    # A forward without a row is there for the other ranks.
    if policy.hook is None or not batch.index:
        return part
    if wanted.routes:
        part = replace(part, used=policy.hook.used.to(torch.int16).cpu())
    if wanted.scores and batch.watched_scores is not None:
        shift_LBSK = (policy.hook.scores - batch.watched_scores).abs()
        # What was watched is read once, and would stay until the update ends.
        done = replace(batch, watched=None, watched_scores=None)
        return replace(part, batch=done, router_shift=shift_LBSK.mean(dim=(0, 3)))
    return replace(part, scores=policy.hook.scores.cpu()) if wanted.scores else part


def native_drift(
    policy: Policy, rows: Sequence[Row], batches: Sequence[MicroBatch], info: ModelInfo, world: World
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Drift [n] and by layer [n, L] from an extra no-grad pass on native routes (what replay cannot show)."""
    drift = np.full(len(rows), np.nan)
    layers = np.full((len(rows), len(info.layers)), np.nan)
    for cpu_batch in batches:
        batch = replace(cpu_batch, routes=None).to(world.device)
        with torch.no_grad():
            _, _, native = policy(batch)
        if native is not None and batch.index:
            fill_drift(drift, layers, rows, batch, native, info)
    return drift, layers


def fill_drift(
    drift: NDArray[np.float64],
    layers: NDArray[np.float64],
    rows: Sequence[Row],
    batch: MicroBatch,
    native_LBSK: Tensor,
    info: ModelInfo,
) -> NDArray[np.float64]:
    """Write the drift of a micro-batch's rows into drift [n] and layers [n, L]. Returns how often each expert was
    chosen at its counted positions [L, E]."""
    native_counts = expert_counts(native_LBSK.permute(1, 2, 0, 3), batch.count_mask, info.num_experts).cpu()
    usage = native_counts.sum(dim=0).numpy().astype(np.float64)
    known = [j for j, i in enumerate(batch.index) if rows[i].counts is not None]
    if not known:
        return usage
    stacked = np.stack([c for j in known if (c := rows[batch.index[j]].counts) is not None])
    rollout_counts = torch.from_numpy(stacked)
    places = [batch.index[j] for j in known]
    drift[places] = route_drift(rollout_counts, native_counts[known]).numpy()
    layers[places] = layer_drift(rollout_counts, native_counts[known]).numpy()
    return usage
