"""What a filter does to the direction of a batch gradient: exact, for many filters on the same responses.

The gradient of every response is computed once by the learner's own objective; the gradient of a batch under any
filter is then a sum. It is compared with an on-policy gradient on the same prompts. Knows no engine and no file.

Axes: B responses of a batch, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.algos.advantages import group_advantages
from asyncrl.algos.select import unit_signal
from asyncrl.config import Config
from asyncrl.learner.batch import Row, collate
from asyncrl.learner.mismatch_rows import mismatch_columns, mismatch_of
from asyncrl.learner.objective import LossSums, Tokens, Totals, batch_loss
from asyncrl.learner.score import plan, score
from asyncrl.learner.shard import Policy
from asyncrl.learner.table import Table, gather, row_columns, row_names
from asyncrl.learner.update import choose
from asyncrl.sections.algorithm import AlgorithmSection
from asyncrl.types import ModelInfo
from study.emulate import WORLD

QS = (0.08, 0.125, 0.2)
DRAWS = 8
"""Draws of the random control that are averaged: its own noise is not what is measured."""


def scored_table(policy: Policy, rows: Sequence[Row], config: Config, info: ModelInfo) -> Table:
    """The learner's table of the rows: lengths, rewards, lag, drift, |log-ratio|."""
    batches, fused = plan(rows, [True] * len(rows), info, config.learner.micro_batch_tokens, False, False, WORLD)
    scores = score(policy, rows, batches, fused, info, WORLD)
    columns = row_columns(rows) | mismatch_columns(rows, scores) | {"drift": scores.drift}
    return gather(row_names(rows), columns, WORLD)


def advantages_of(table: Table, a: AlgorithmSection) -> Tensor:
    """Advantages [B] before any filter."""
    return group_advantages(torch.from_numpy(table["reward"]), table.group_index, kind=a.advantage)


def response_gradients(
    policy: Policy, rows: Sequence[Row], advantages: Tensor, tokens: float, a: AlgorithmSection, info: ModelInfo
) -> Tensor:
    """Descent directions float32 [B, P]: minus the gradient of each response's share of the batch loss.

    tokens: loss tokens of the batch before filtering. Responses of advantage 0 have none.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    out = torch.zeros(len(rows), sum(p.numel() for p in parameters))
    for i in range(len(rows)):
        if float(advantages[i]) != 0.0:
            out[i] = _direction(policy, parameters, rows, [i], advantages, tokens, a, info)
    return out


def batch_gradient(
    policy: Policy, rows: Sequence[Row], advantages: Tensor, tokens: float, a: AlgorithmSection, info: ModelInfo
) -> Tensor:
    """Descent direction [P] of all rows together, in parts that fit in memory."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    live = [i for i in range(len(rows)) if float(advantages[i]) != 0.0]
    total = torch.zeros(sum(p.numel() for p in parameters))
    for start in range(0, len(live), 128):
        total += _direction(policy, parameters, rows, live[start : start + 128], advantages, tokens, a, info)
    return total


def _direction(
    policy: Policy, parameters: Sequence[Tensor], rows: Sequence[Row], index: list[int], advantages: Tensor,
    tokens: float, a: AlgorithmSection, info: ModelInfo,
) -> Tensor:  # fmt: skip
    batch = collate(rows, index, info, True, False)
    logp, _, _ = policy(batch)
    tokens_of = Tokens(logp, logp.detach(), batch.rollout_logp, advantages[index].float(), batch.predict_mask)
    loss = batch_loss(
        tokens_of, a,
        Totals(tokens, float(len(rows)), 0.0), LossSums(),
    )  # fmt: skip
    gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
    return -torch.cat([g.reshape(-1) for g in flat])


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two gradients [P]; NaN when one is 0."""
    norms = float(a.norm()) * float(b.norm())
    return float(a @ b) / norms if norms > 0 else math.nan


class Sums:
    """The cosine of any sum of the responses' gradients [B, P] with a target [P], at the price of B x B numbers."""

    def __init__(self, gradients: Tensor) -> None:
        self._gradients = gradients
        self._gram = (gradients @ gradients.T).double()

    def towards(self, target: Tensor) -> Tensor:
        """Inner products [B] with a target, over its norm."""
        return (self._gradients @ target).double() / float(target.norm())

    def cosine(self, keep: Tensor, along: Tensor) -> float:
        """Cosine of the batch gradient of the kept responses (bool [B]); along: of `towards`. NaN when it is 0."""
        mask = keep.double()
        square = float(mask @ self._gram @ mask)
        return float(mask @ along) / math.sqrt(square) if square > 0 else math.nan


def keeps(table: Table, bad: Tensor | None, a: AlgorithmSection, update: int) -> list[dict[str, Any]]:
    """What each filter keeps of a batch: signal, gate, q, keep bool [B], and control: as many dropped at random.

    bad: the responses of a broken generator. lag: ranked by lag where it varies; truth: exactly the bad ones go, and
    in its control as many whole groups.
    """
    signals = {"drift": torch.from_numpy(table["drift"])}
    signals["log_ratio"] = unit_signal(torch.from_numpy(table["abs_log_ratio"]))
    if float(table["lag"].max()) > float(table["lag"].min()):
        signals["lag"] = unit_signal(torch.from_numpy(table["lag"]))
    everything = torch.ones(len(table), dtype=torch.bool)
    out = [_entry("none", "", 0.0, everything, [everything])]
    if bad is not None:
        groups = table.group_index
        count = len(set(groups[bad].tolist()))
        control = [~torch.isin(groups, some) for some in _draws(int(groups.max()) + 1, count, update)]
        out.append(_entry("truth", "exact", float(bad.double().mean()), ~bad, control))
    for name, signal in signals.items():
        for q in QS:
            draws = [_choose(table, signal, a, update + 1000 * d, mode="random", q=q) for d in range(DRAWS)]
            out.append(_entry(name, "top_q", q, _choose(table, signal, a, update, q=q), draws))
        if name != "lag":
            keep = _choose(table, signal, a, update, gate="outlier")
            out.append(_entry(name, "outlier", a.rdc.q, keep, _as_many(keep, update)))
    return out


def _entry(signal: str, gate: str, q: float, keep: Tensor, control: list[Tensor]) -> dict[str, Any]:
    return {"signal": signal, "gate": gate, "q": q, "keep": keep, "control": control}


def _as_many(keep: Tensor, update: int) -> list[Tensor]:
    """As many responses dropped at random: the control of a filter without a quota."""
    everyone = torch.arange(len(keep))
    return [~torch.isin(everyone, some) for some in _draws(len(keep), int((~keep).sum()), update)]


def _draws(n: int, count: int, seed: int) -> list[Tensor]:
    """DRAWS times `count` different numbers below n."""
    generators = [torch.Generator().manual_seed(seed * 100 + d) for d in range(DRAWS)]
    return [torch.randperm(n, generator=g)[:count] for g in generators]


def _choose(
    table: Table, signal: Tensor, a: AlgorithmSection, update: int, mode: str = "filter", q: float | None = None,
    gate: str = "top_q",
) -> Tensor:  # fmt: skip
    """The learner's own choice with this signal in the place of drift: bool [B]."""
    rdc = a.rdc.model_copy(update={"mode": mode, "gate": gate, "q": a.rdc.q if q is None else q, "signal": "drift"})
    ranked = Table(table.names, table.columns | {"drift": signal.double().numpy()}, table.start, table.count)
    # Half a response of carry rounds the quota instead of cutting it off.
    return choose(ranked, a.model_copy(update={"rdc": rdc}), update, 0.5)[2]


def oracle_keep(along: Tensor, q: float) -> Tensor:
    """Without the q B responses whose gradient points most against half of the on-policy responses: bool [B].

    along: inner products [B] with that half. No filter of a run can do it. Compare it on the other half, which it has
    not seen.
    """
    keep = torch.ones(len(along), dtype=torch.bool)
    keep[along.argsort()[: round(q * len(along))]] = False
    return keep


def auc(signal: Tensor, bad: Tensor) -> float:
    """Probability that a bad response has the higher signal, ties half. NaN without both kinds."""
    first, second = signal[bad], signal[~bad]
    if not len(first) or not len(second):
        return math.nan
    higher = (first[:, None] > second[None, :]).double() + 0.5 * (first[:, None] == second[None, :]).double()
    return float(higher.mean())


def mismatch_summary(table: Table) -> dict[str, float]:
    """kl_k3 and F(2) of the batch, mean drift and share of drift 0."""
    found = mismatch_of(table, np.ones(len(table), bool))
    return {
        "kl_k3": found["kl_k3"],
        "f_2": found["f_2"],
        "drift": float(np.nanmean(table["drift"])),
        "drift_zero": float((table["drift"] == 0).mean()),
    }
