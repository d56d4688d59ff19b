"""Numbers that must not train: found on one rank, known to every rank before it does harm.

A non-finite weight, log-prob, loss or gradient anywhere makes every rank skip the update; what a learner does about
updates that are skipped again and again is here too. Also the last look at rollout log-probs. Knows no queue.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from asyncrl.errors import TrainingError
from asyncrl.learner.batch import Row
from asyncrl.learner.score import Scores
from asyncrl.learner.shard import Policy, World
from asyncrl.learner.table import all_bytes, all_max
from asyncrl.models.finite import is_finite
from asyncrl.types import impossible

log = logging.getLogger(__name__)

REASONS: dict[str, tuple[str, str]] = {
    "weight": (
        "a non-finite weight",
        "the log names it; check model.path or the checkpoint that the learner began with, and the memory of that host",
    ),
    "log_prob": (
        "a non-finite log-prob of the learner",
        "the log names the responses; look at their prompts, at policy/entropy before, and at model.dtype",
    ),
    "reference": (
        "a non-finite log-prob of the reference policy",
        "the log names the responses; check the folder algorithm.kl.reference (model.path where it is null), and "
        "model.dtype, in which it computes too",
    ),
    "loss": ("a non-finite loss", "look at policy/reward and mismatch/* before, and at the rewards of the verifier"),
    "gradient": (
        "a non-finite gradient",
        "look at optim/grad_norm before; lower learner.lr or use model.dtype=float32",
    ),
    "filtered": (
        "nothing left to train",
        "look at filter/dropped, drift/undefined, staleness/stale_responses and policy/truncated_masked; lower "
        "algorithm.rdc.q, or raise staleness.max_lag or sampling.max_new_tokens",
    ),
}
"""Why an update was skipped: by the word in optim/skipped/<reason>, what that is and where to look."""

_MAX_NAMED = 3


def usable(rows: Sequence[Row], top_k: int) -> tuple[list[Row], NDArray[np.float64]]:
    """Rows whose rollout log-probs are possible, the others without a token to train; and 1.0 for those [n].

    Generators and replay refuse such a response. One that comes here all the same would give a ratio of 0 or infinity.
    Route counts that are not top_k per counted token and layer are of a broken engine: that row has none, and no drift.
    """
    bad = [impossible(row.trajectory.logprobs[row.trajectory.loss_mask]) for row in rows]
    if any(bad):
        ids = [row.trajectory.trajectory_id for row, is_bad in zip(rows, bad, strict=True) if is_bad]
        log.error("%s: a sampled token has log-prob -inf or above 0; not trained", _some(ids))
    kept = [_silenced(r) if b else r for r, b in zip(rows, bad, strict=True)]
    return [_counted(r, top_k) for r in kept], np.asarray(bad, np.float64)


def _counted(row: Row, top_k: int) -> Row:
    tokens = int(row.count_mask.sum())
    if row.counts is None or bool((row.counts.sum(axis=1) == tokens * top_k).all()):
        return row
    log.error(
        "%s of %s: its route counts are not %d x %d per layer; its drift is undefined",
        row.trajectory.trajectory_id, row.generator_id, tokens, top_k,
    )  # fmt: skip
    return replace(row, counts=None)


def _silenced(row: Row) -> Row:
    counts = None if row.counts is None else np.zeros_like(row.counts)
    return replace(row, loss_mask=np.zeros_like(row.loss_mask), counts=counts)


def scoring_fault(
    weight: str,
    rows: Sequence[Row],
    scores: Scores,
    current: Sequence[Tensor],
    old: Sequence[Tensor],
    world: World,
    ref: Sequence[Tensor] | None = None,
) -> str:
    """weight, log_prob or reference when one is not finite on any rank, else "". A collective, before selection and
    backward.

    weight: of `broken_weight` on this rank. current, old, ref: log-probs [S_i] of every row, now, at the start of the
    take, and of the reference policy. Drift of a row without log-probs is undefined: its routes are those of numbers
    that are none.
    """
    broken = _broken(current) if old is current else sorted({*_broken(current), *_broken(old)})
    scores.drift[broken], scores.layers[broken] = np.nan, np.nan
    found = {"weight": weight} | {
        reason: _some([rows[i].trajectory.trajectory_id for i in which])
        for reason, which in (("log_prob", broken), ("reference", _broken(ref or [])))
    }
    flags = all_max([bool(here) for here in found.values()], world)
    reason = next((reason for reason, flag in zip(found, flags, strict=True) if flag), "")
    if reason:
        log.error("%s: %s", REASONS[reason][0], _everywhere(found[reason], world))
    return reason


def _broken(logp: Sequence[Tensor]) -> list[int]:
    """Rows with a log-prob that is none. One look at all; row by row only when there is something to find."""
    if not logp or is_finite(torch.cat(list(logp))):
        return []
    return [i for i, values in enumerate(logp) if not is_finite(values)]


def check_step(policy: Policy, update: int, world: World) -> None:
    """TrainingError when a step left a weight that is not finite: it cannot be taken back. A collective."""
    weight = broken_weight(policy)
    if not any(all_max([bool(weight)], world)):
        return
    raise TrainingError(
        f"the step of update {update} made a weight non-finite ({_everywhere(weight, world)}). It was not committed, "
        "published or saved; start the learner again to go on from its last checkpoint, with a lower learner.lr"
    )


@torch.no_grad()
def broken_weight(policy: Policy) -> str:
    """Name of a parameter of which this rank's part is not finite, "" when there is none. They must be sharded."""
    parts = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in policy.named_parameters()}
    filled = [t.detach() for t in parts.values() if t.numel()]
    # On an accelerator a look at each tensor would wait for it each time.
    if filled and filled[0].device.type != "cpu" and bool(torch.isfinite(get_total_norm(filled, torch.inf))):
        return ""
    return next((name for name, tensor in parts.items() if not is_finite(tensor)), "")


class Skips:
    """Counts of skipped updates by reason; `note` ends the run after `limit` in a row."""

    def __init__(self, limit: int, by_reason: Mapping[str, int]) -> None:
        self._limit = limit
        self.by_reason: Counter[str] = Counter(by_reason)
        self.in_a_row: list[str] = []

    @property
    def total(self) -> int:
        """Over the whole run."""
        return self.by_reason.total()

    def stepped(self) -> None:
        """An update was made."""
        self.in_a_row.clear()

    def note(self, reason: str, update: int) -> None:
        """An update was skipped. TrainingError when that was the last one allowed."""
        self.by_reason[reason] += 1
        self.in_a_row.append(reason)
        log.warning("update %d skipped: %s (%d in a row)", update, REASONS[reason][0], len(self.in_a_row))
        if len(self.in_a_row) < self._limit:
            return
        kinds = Counter(self.in_a_row)
        found = "; ".join(f"{n} x {REASONS[kind][0]} ({REASONS[kind][1]})" for kind, n in kinds.most_common())
        raise TrainingError(
            f"{len(self.in_a_row)} updates in a row were skipped (learner.max_skipped_updates) at update {update}: "
            f"{found}"
        )

    def scalars(self) -> dict[str, float]:
        """optim/skipped_updates, and optim/skipped/<reason> of every reason that there was."""
        by_reason = {f"optim/skipped/{reason}": float(n) for reason, n in self.by_reason.items()}
        return {"optim/skipped_updates": float(self.total)} | by_reason


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _MAX_NAMED} more" * (len(ids) > _MAX_NAMED)
    return ", ".join(ids[:_MAX_NAMED]) + more


def _everywhere(here: str, world: World) -> str:
    """What each rank found, in words. A collective."""
    found = [part.decode() for part in all_bytes(here.encode(), world)]
    return "; ".join(f"{what} on rank {rank}" for rank, what in enumerate(found) if what)
