"""From one update's table to metric values. Pure: a table in, a dict of floats out.

Means over tokens are sums over rows divided by token counts, so they do not depend on the split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.learner.mismatch_rows import mismatch_of
from asyncrl.learner.splits import drift_by_depth, drift_by_lag, mismatch_by_lag
from asyncrl.learner.table import Table
from asyncrl.learner.update import Outcome
from asyncrl.types import ModelInfo

Mask = NDArray[np.bool_]
Scalars = dict[str, float]


def update_scalars(outcome: Outcome, info: ModelInfo) -> Scalars:
    """All metrics of one update that come from its rows."""
    t = outcome.table
    keep = np.asarray(outcome.keep, bool)
    out: Scalars = {}
    out |= policy_scalars(outcome)
    out |= outcome.parts
    out |= drift_scalars(outcome, info)
    out |= filter_scalars(outcome)
    out |= mismatch_scalars(t, keep, np.asarray(outcome.would_drop, bool))
    out |= expert_scalars(outcome, info)
    out |= staleness_scalars(t)
    out |= generator_scalars(t, native_of(outcome))
    # A mean over nothing (no row dropped, no token of that lag) is left out rather than logged as NaN.
    undefined = {k for k, v in out.items() if math.isnan(v) and k not in _ALWAYS}
    return {k: v for k, v in out.items() if k not in undefined}


_ALWAYS = {"policy/reward", "policy/loss", "policy/entropy", "optim/grad_norm", "mismatch/kl_k1", "mismatch/kl_k3"}
"""A NaN here is a finding."""


def histograms(outcome: Outcome) -> dict[str, NDArray[np.float64]]:
    """Distributions over the rows of an update."""
    t = outcome.table
    drift = t["drift"]
    used = t["tokens"] > 0
    return {
        "staleness/lag": t["lag"][used],
        "drift/response": drift[~np.isnan(drift)],
        "mismatch/abs_log_ratio": t["abs_log_ratio"][used],
        "mismatch/log_ratio": -t["k1"][used] / np.maximum(t["count"][used], 1),
        "policy/length": t["length"],
    }


def work_scalars(outcome: Outcome) -> Scalars:
    """How the scoring pass was cut into micro-batches: these alone depend on the ranks and the token budget."""
    w = outcome.work
    return {
        "throughput/micro_batches": float(w.passes),
        "throughput/pad_fraction": 1 - _ratio(outcome.table["input"].sum(), w.padded),
        "throughput/oversized_rows": w.oversized,
    }


def policy_scalars(outcome: Outcome) -> Scalars:
    """Reward, length, entropy, optimizer."""
    t, s = outcome.table, outcome.step
    keep = np.asarray(outcome.keep, bool)
    groups: dict[str, list[float]] = {}
    for (_, group, _), reward in zip(t.names, t["reward"], strict=True):
        groups.setdefault(group, []).append(reward)
    flat = sum(max(r) - min(r) <= 1e-6 for r in groups.values())
    return {
        "policy/reward": _mean(t["reward"]),
        "policy/response_length": _mean(t["length"]),
        "policy/entropy": _ratio(t["entropy_sum"].sum(), t["tokens"].sum()),
        "policy/truncated_fraction": _mean(t["truncated"]),
        "policy/truncated_masked": _mean(t["withheld"] > 0),
        "policy/truncated_masked_tokens": _ratio(t["withheld"].sum(), (t["withheld"] + t["tokens"]).sum()),
        "policy/clip_fraction": _ratio(s.clipped, t["tokens"][keep].sum()),
        "policy/zero_variance_fraction": _ratio(flat, len(groups)),
        "policy/loss": s.loss,
        "policy/kl_loss": s.kl,
        "policy/ref_kl": _ratio(t["ref_k3"].sum(), t["tokens"].sum()),
        "policy/ref_kl_k1": _ratio(t["ref_k1"].sum(), t["tokens"].sum()),
        "policy/responses": float(len(t)),
        "policy/tokens": float(t["tokens"].sum()),
        "optim/grad_norm": s.grad_norm,
        "optim/lr": s.lr,
        "mismatch/weight_mean": _ratio(t["weight"][keep].sum(), t["tokens"][keep].sum()),
        "mismatch/weight_zero": _ratio(t["unweighted"][keep].sum(), t["tokens"][keep].sum()),
    }


def drift_scalars(outcome: Outcome, info: ModelInfo) -> Scalars:
    """Router drift of the batch: exact native drift where measured, in-pass drift under replay."""
    t = outcome.table
    out: Scalars = {"drift/routes_cut": float(t["cut"].sum())}
    out["drift/uncounted_fraction"] = _ratio(t["uncounted"].sum(), t["tokens"].sum())
    if not math.isnan(outcome.forced_fraction):
        out[f"{outcome.routes}/forced_fraction"] = outcome.forced_fraction
        out[f"{outcome.routes}/in_pass_drift"] = _mean(t["drift"][~np.isnan(t["drift"])])
    drift = native_of(outcome)
    if drift is None:
        return out
    known = ~np.isnan(drift)
    values = drift[known]
    out["drift/undefined"] = float((~known).sum())
    if values.size:
        p10, p50, p90 = np.percentile(values, [10, 50, 90])
        out |= {"drift/mean": _mean(values), "drift/p10": float(p10), "drift/p50": float(p50), "drift/p90": float(p90)}
        out |= {"drift/max": float(values.max()), "drift/nonzero_fraction": _mean(values > 0)}
    for layer in info.layers:
        column = t[f"layer_{layer}"]
        out[f"drift/layer_{layer}"] = _mean(column[~np.isnan(column)])
    bucket = np.asarray(outcome.selection.bucket)
    would = np.asarray(outcome.would_drop, bool)
    for b in np.unique(bucket[known]):
        inside = known & (bucket == b)
        out[f"drift/bucket_{b}/mean"] = _mean(drift[inside])
        if (inside & would).any():
            out[f"drift/bucket_{b}/threshold"] = float(drift[inside & would].min())
    for lag, rows in _by_lag(t):
        out[f"drift/lag_{lag}"] = _mean(drift[rows & known])
    return out | drift_by_lag(t, drift) | drift_by_depth(t, info.layers)


def expert_scalars(outcome: Outcome, info: ModelInfo) -> Scalars:
    """Use of the experts by the learner's native routes: those that got no token, and the extremes of each layer."""
    usage = outcome.usage
    if not usage.any():
        return {}
    out = {"experts/unused_fraction": _mean(usage == 0)}
    for layer, counts in zip(info.layers, usage, strict=True):
        even = counts.sum() / len(counts)
        out[f"experts/layer_{layer}/min_usage"] = _ratio(counts.min(), even)
        out[f"experts/layer_{layer}/max_usage"] = _ratio(counts.max(), even)
    return out


def native_of(outcome: Outcome) -> NDArray[np.float64] | None:
    """Native drift [n], NaN where undefined; None on an update under replay that did not measure it.

    Under replay the scoring pass has upstream layers replayed, so its drift is not the native one.
    """
    t = outcome.table
    replayed = not math.isnan(outcome.forced_fraction)
    return t.columns.get("native_drift") if replayed else t["drift"]


def filter_scalars(outcome: Outcome) -> Scalars:
    """What the filter dropped (or would drop under observe), against what stayed."""
    t = outcome.table
    dropped = np.asarray(outcome.would_drop, bool)
    moot = np.asarray(outcome.advantages == 0) & dropped
    # Dropping a response of a zero-variance group changes nothing, unless a reference policy pulls on it.
    inert = _flat_rows(t) & np.isnan(t["ref_k1"])
    out = {
        "filter/dropped": float((~np.asarray(outcome.keep, bool)).sum()),
        "filter/dropped_fraction": _ratio(dropped.sum(), (~np.isnan(t["drift"])).sum()),
        "filter/effective_dropped_fraction": _ratio((dropped & ~inert).sum(), (~np.isnan(t["drift"])).sum()),
        "filter/zero_advantage_dropped": float(moot.sum()),
        "filter/carry": float(outcome.selection.carry),
        "filter/unfilled": float(outcome.selection.unfilled),
    }
    for side, rows in (("kept", ~dropped), ("dropped", dropped)):
        out[f"filter/{side}/length"] = _mean(t["length"][rows])
        out[f"filter/{side}/reward"] = _mean(t["reward"][rows])
        out[f"filter/{side}/abs_log_ratio"] = _mean(t["abs_log_ratio"][rows & (t["tokens"] > 0)])
    return out


def mismatch_scalars(t: Table, keep: Mask, would_drop: Mask) -> Scalars:
    """KL estimates, F(tau) and effective sample size over kept responses, and their splits.

    The split by the filter is by what it chose, also where it only observes.
    """
    kept = mismatch_of(t, keep)
    out = {f"mismatch/{k}": v for k, v in kept.items()}
    out["mismatch/missing_logprobs"] = float(t["missing"].sum())
    out["mismatch/refused_responses"] = float(t["refused"].sum())
    for side, rows in (("kept", ~would_drop), ("filtered", would_drop)):
        part = mismatch_of(t, rows)
        out[f"mismatch/{side}/kl_k1"] = part["kl_k1"]
        out[f"mismatch/{side}/kl_k3"] = part["kl_k3"]
        out[f"mismatch/{side}/f_2"] = part["f_2"]
    for lag, rows in _by_lag(t):
        part = mismatch_of(t, rows & keep)
        out[f"mismatch/lag_{lag}/kl_k1"] = part["kl_k1"]
        out[f"mismatch/lag_{lag}/kl_k3"] = part["kl_k3"]
    return out | mismatch_by_lag(t, keep)


def staleness_scalars(t: Table) -> Scalars:
    """Lag of what was trained on, and where the staleness mask took its tokens."""
    used = t["tokens"] > 0
    out: Scalars = {
        "staleness/lag_mean": _ratio(t["lag_sum"].sum(), t["tokens"].sum()),
        "staleness/masked_token_fraction": _ratio(t["masked"].sum(), (t["masked"] + t["tokens"]).sum()),
        "staleness/stale_responses": float(((t["masked"] > 0) & ~used).sum()),
        "staleness/mixed_responses": float((t["versions"] > 1).sum()),
    }
    if used.any():
        out["staleness/lag_max"] = float(t["lag"][used].max())
        p10, p90 = np.percentile(t["lag"][used], [10, 90])
        out |= {"staleness/lag_p10": float(p10), "staleness/lag_p90": float(p90)}
        out["staleness/response_lag_mean"] = _mean(t["lag"][used])
    out |= {f"staleness/responses_at_lag_{lag}": float(rows.sum()) for lag, rows in _by_lag(t)}
    order = np.argsort(t["length"], kind="stable")
    if len(order) >= 10:
        for d, rows in enumerate(np.array_split(order, 10)):
            total = (t["masked"] + t["tokens"])[rows].sum()
            out[f"staleness/masked_decile_{d}"] = _ratio(t["masked"][rows].sum(), total)
        for d, share in enumerate(_masked_by_position(t)):
            out[f"staleness/masked_position_{d}"] = share
    return out


def generator_scalars(t: Table, native: NDArray[np.float64] | None) -> Scalars:
    """Drift and |log-ratio| per generator: how a bad one is found."""
    out: Scalars = {}
    names = np.asarray([n[2] for n in t.names])
    for g in sorted(set(names.tolist())):
        rows = names == g
        used = t["tokens"][rows] > 0
        if native is not None:
            drift = native[rows]
            out[f"generator/{g}/drift"] = _mean(drift[~np.isnan(drift)])
        out[f"generator/{g}/abs_log_ratio"] = _mean(t["abs_log_ratio"][rows][used])
        out[f"generator/{g}/lag"] = _mean(t["lag"][rows][used])
        out[f"generator/{g}/responses"] = float(rows.sum())
    return out


def _masked_by_position(t: Table) -> Iterable[float]:
    """Share of stale tokens per tenth of the response; stale tokens are always a prefix."""
    share = t["masked"] / np.maximum(t["length"], 1)
    weight = t["length"] / np.maximum(t["length"].sum(), 1)
    for d in range(10):
        inside = np.clip(share * 10 - d, 0, 1)
        yield float((inside * weight).sum())


def _flat_rows(t: Table) -> Mask:
    groups: dict[str, list[int]] = {}
    for i, (_, group, _) in enumerate(t.names):
        groups.setdefault(group, []).append(i)
    flat = np.zeros(len(t), bool)
    for rows in groups.values():
        flat[rows] = np.ptp(t["reward"][rows]) <= 1e-6
    return flat


def _by_lag(t: Table) -> Iterable[tuple[int, Mask]]:
    used = t["tokens"] > 0
    for lag in np.unique(t["lag"][used]):
        yield int(lag), used & (t["lag"] == lag)


def _mean(values: NDArray[Any]) -> float:
    return float(np.mean(values)) if values.size else math.nan


def _ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else math.nan
