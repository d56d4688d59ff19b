"""Groups -> padded tensors: collate and micro-batches.

Axes: B rows (responses), S learner input length, L MoE layers, E experts, K experts per token.
Everything about a response token stands at the input position that predicts it (DESIGN: predict
mask); position s of a row predicts input token s + 1. Rows are padded on the right, so no
attention mask is needed: a real token never attends to a later pad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import RouteError
from asyncrl.types import Group, ModelInfo, Trajectory


@dataclass(frozen=True, slots=True)
class TakenRoutes:
    """Routes of one response in the scoring pass of its take, under pi_old.

    routes: integers [S, L, K], the experts that were used. scores: float32 [S, L, K], the router's log-scores of these
    experts, None where only the routes are needed. forced: whether the updates run on these routes (algorithm.routes:
    r2).
    """

    routes: NDArray[np.unsignedinteger]
    scores: NDArray[np.float32] | None
    forced: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One response of a batch, before padding.

    loss_mask bool [T] after the staleness mask; masked counts the tokens that mask took;
    lag int [T] per token at the update; counts int64 [L, E] over the tokens of count_mask or None.
    withheld: loss tokens of a cut-off response that algorithm.truncated=mask took, of any age; masked is 0 then.
    taken: what the scoring pass of a take of several updates found, where the updates need it.
    """

    trajectory: Trajectory
    prompt_ids: NDArray[np.int32]
    group_id: str
    generator_id: str
    temperature: float
    loss_mask: NDArray[np.bool_]
    masked: int
    lag: NDArray[np.int64]
    counts: NDArray[np.int64] | None
    data_source: str = ""
    withheld: int = 0
    taken: TakenRoutes | None = None

    @property
    def size(self) -> int:
        """Input length S of this row."""
        return len(self.prompt_ids) + self.trajectory.num_tokens

    def without_scores(self) -> Row:
        """The row as forwards need it that compare no router."""
        if self.taken is None or self.taken.scores is None:
            return self
        return replace(self, taken=replace(self.taken, scores=None))

    @property
    def trains(self) -> bool:
        """True when a token of it is left to train."""
        return bool(self.loss_mask.any())

    @property
    def count_mask(self) -> NDArray[np.bool_]:
        """The loss tokens whose routes are known, bool [T]: those that drift is measured over, on both sides."""
        unknown = self.trajectory.routes_from - (len(self.prompt_ids) - 1)
        if unknown <= 0:
            return self.loss_mask
        mask = self.loss_mask.copy()
        mask[:unknown] = False
        return mask

    @property
    def max_lag(self) -> int:
        """Largest lag of a used token, 0 when no token is used."""
        used = self.lag[self.loss_mask]
        return int(used.max()) if used.size else 0


def rows_of(
    groups: Sequence[Group], update: int, bound: int, info: ModelInfo, mask_truncated: bool = False
) -> list[Row]:
    """Rows of one batch; tokens sampled before update `bound` lose their loss mask.

    mask_truncated: so do all tokens of a response that the length limit cut off (algorithm.truncated=mask); its reward
    stays. Raises RouteError when counts do not have the model's [segments, L, E] shape.
    """
    rows = [_row(g, t, update, bound, info) for g in groups for t in g.trajectories]
    return [_withhold(r) if mask_truncated and r.trajectory.finish_reason == "length" else r for r in rows]


def _withhold(row: Row) -> Row:
    """The row of a response of which no token trains, and which has no drift."""
    counts = None if row.counts is None else np.zeros_like(row.counts)
    withheld = int(row.trajectory.loss_mask.sum())
    return replace(row, loss_mask=np.zeros_like(row.loss_mask), masked=0, counts=counts, withheld=withheld)


def _row(group: Group, t: Trajectory, update: int, bound: int, info: ModelInfo) -> Row:
    mask = t.loss_mask.astype(bool).copy()
    lag = np.zeros(t.num_tokens, np.int64)
    fresh: list[int] = []
    for i, segment in enumerate(t.segments):
        lag[segment.start : segment.end] = update - segment.version.update
        if segment.version.update >= bound:
            fresh.append(i)
        else:
            mask[segment.start : segment.end] = False
    counts = None
    if t.route_counts is not None:
        if t.route_counts.shape[1:] != (len(info.layers), info.num_experts):
            raise RouteError(
                f"{t.trajectory_id}: route counts have shape {list(t.route_counts.shape)}, the model has "
                f"{len(info.layers)} MoE layers and {info.num_experts} experts"
            )
        # Histograms are kept per segment, so masking a segment removes exactly its counts.
        if len(t.segments) == len(fresh) == 1:
            counts = t.route_counts[0].astype(np.int64)
        else:
            counts = t.route_counts[fresh].sum(axis=0, dtype=np.int64)
    masked = int(t.loss_mask.sum() - mask.sum())
    return Row(
        t, group.prompt.token_ids, group.group_id, group.generator_id, group.temperature, mask, masked, lag, counts,
        group.prompt.data_source,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded rows. index [B] are the positions of the rows in the rank's row list.

    input_ids int64 [B, S]; targets int64 [B, S]; predict_mask bool [B, S]: what trains; count_mask bool [B, S]: what of
    it has known routes, for drift; rollout_logp fp32 [B, S], NaN where the engine gave none; temperature [B]; routes
    int16 [L, B, S, K] or None (-1 = native routing there). grad says whether its forward needs a graph. watched int16
    [L, B, S, K] and watched_scores float32 [L, B, S, K]: the experts of the scoring pass of the take and their
    log-scores then, or None.
    """

    index: tuple[int, ...]
    input_ids: Tensor
    targets: Tensor
    predict_mask: Tensor
    count_mask: Tensor
    rollout_logp: Tensor
    temperature: Tensor
    routes: Tensor | None
    grad: bool
    watched: Tensor | None = None
    watched_scores: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Copy on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def collate(rows: Sequence[Row], index: Sequence[int], info: ModelInfo, grad: bool, replay: bool) -> MicroBatch:
    """Pad the rows `index` into one MicroBatch; an empty index gives one dummy row without loss.

    With replay, raises RouteError when a row has no routes or not exactly S - 1 of them. Rows have `taken` all or none.
    """
    picked = [rows[i] for i in index]
    b, s = max(1, len(picked)), max((r.size for r in picked), default=2)
    ids = np.zeros((b, s), np.int64)
    mask, counted = np.zeros((b, s), bool), np.zeros((b, s), bool)
    logp = np.zeros((b, s), np.float32)
    temperature = np.ones(b, np.float32)
    routes = np.full((b, s, len(info.layers), info.top_k), -1, np.int16) if replay else None
    for i, row in enumerate(picked):
        p, t = len(row.prompt_ids), row.trajectory.num_tokens
        ids[i, :p] = row.prompt_ids
        ids[i, p : p + t] = row.trajectory.token_ids
        # Position p - 1 + j predicts response token j.
        mask[i, p - 1 : p - 1 + t] = row.loss_mask
        counted[i, p - 1 : p - 1 + t] = row.count_mask
        logp[i, p - 1 : p - 1 + t] = row.trajectory.logprobs
        temperature[i] = row.temperature
        if routes is not None:
            routes[i, : row.size - 1] = _routes_of(row, info)
    targets = np.concatenate([ids[:, 1:], np.zeros((b, 1), np.int64)], axis=1)
    return MicroBatch(
        tuple(index),
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(mask),
        torch.from_numpy(counted),
        torch.from_numpy(logp),
        torch.from_numpy(temperature),
        None if routes is None else torch.from_numpy(routes).permute(2, 0, 1, 3),
        grad,
        *_watched(picked, b, s, info),
    )


def _watched(picked: Sequence[Row], b: int, s: int, info: ModelInfo) -> tuple[Tensor | None, Tensor | None]:
    """Experts of the take's scoring pass [L, B, S, K], 0 on pads, and their scores then; None where nobody asks."""
    if not picked or picked[0].taken is None or picked[0].taken.scores is None:
        return None, None
    ids = np.zeros((b, s, len(info.layers), info.top_k), np.int16)
    scores = np.zeros(ids.shape, np.float32)
    for i, row in enumerate(picked):
        if row.taken is None or row.taken.scores is None:
            raise RouteError(f"{row.trajectory.trajectory_id}: no router scores of the start of its take")
        ids[i, : row.size], scores[i, : row.size] = row.taken.routes.astype(np.int16), row.taken.scores
    return torch.from_numpy(ids).permute(2, 0, 1, 3), torch.from_numpy(scores).permute(2, 0, 1, 3)


def _routes_of(row: Row, info: ModelInfo) -> NDArray[np.int16]:
    if row.taken is not None and row.taken.forced:
        return row.taken.routes[: max(row.size - 1, 0)].astype(np.int16)
    t = row.trajectory
    want = (max(row.size - 1, 0), len(info.layers), info.top_k)
    if t.routes is None or t.routes.shape != want:
        got = None if t.routes is None else list(t.routes.shape)
        raise RouteError(f"{t.trajectory_id}: replay needs routes of shape {list(want)}, got {got}")
    # A sign is needed for -1; the hook keeps them in 16 bits too.
    routes = t.routes.astype(np.int16)
    routes[: t.routes_from] = -1
    return routes


def micro_batches(sizes: Sequence[int], index: Sequence[int], budget: int, waste: float = 0.2) -> list[list[int]]:
    """Split rows into micro-batches of similar length.

    sizes are the input lengths of all rows; index the rows to place. A micro-batch closes when
    its padded tokens would exceed budget, or when padding would take more than the share `waste`
    of a micro-batch of at least 1024 tokens (below that, calls cost more than pads).
    """
    out: list[list[int]] = []
    current: list[int] = []
    real = 0
    for i in sorted(index, key=lambda j: (sizes[j], j)):
        padded = (len(current) + 1) * sizes[i]
        wasteful = real >= 1024 and 1 - (real + sizes[i]) / padded > waste
        if current and (padded > budget or wasteful):
            out.append(current)
            current, real = [], 0
        current.append(i)
        real += sizes[i]
    if current:
        out.append(current)
    return out


def spread(sizes: Sequence[int], index: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Split rows into exactly count micro-batches, the largest of which is as small as can be (to budget / 256).

    For ranks that agreed on the largest number any of them needs under budget: a rank that needs fewer makes
    smaller ones, because it runs as many forwards anyway. Spare ones are empty and come first, so that the
    long rows of all ranks, which stand last, meet. count must not be below len(micro_batches(...)).
    """
    if not index:
        return [[]] * count
    high = budget
    # A row above the budget stands alone whatever the limit of the others is.
    low = max(1, -(-sum(sizes[i] for i in index if sizes[i] <= budget) // max(1, count)))
    while high - low > budget // 256:
        middle = (low + high) // 2
        if len(micro_batches(sizes, index, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    split = micro_batches(sizes, index, high)
    return [[]] * (count - len(split)) + split


def padded_tokens(sizes: Sequence[int], batches: Sequence[Sequence[int]]) -> int:
    """Tokens that forwards over these micro-batches process, pads included."""
    return sum(len(b) * max(sizes[i] for i in b) for b in batches if b)
