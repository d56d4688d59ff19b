"""Dumps and policies in, all numbers of a report out.

Every dump is forwarded once under the policy before its update, where that is there, and once under each policy that
it is compared with. One policy is in memory at a time, and one byte or two per counted token, layer and chosen expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from asyncrl.algos.select import Buckets
from asyncrl.errors import ConfigError
from asyncrl.learner.dump import Dump
from asyncrl.learner.rescore import Native, alone, policy_of, rescore, rollout_routes
from asyncrl.lens import measure
from asyncrl.lens.drops import what_if
from asyncrl.lens.measure import Floats, Responses
from asyncrl.lens.source import Policies, dumps_of
from asyncrl.lens.usage import Routes, agree, change

RATES = (0.02, 0.04, 0.08, 0.16, 0.32)
NUMBERS: tuple[Buckets, ...] = (1, 2, 4, 8)

OWN = "own"
"""In a report: the policy before a dump's own update."""
ROLLOUT = "rollout"
"""The experts to which the engine sent the tokens."""

Natives = list[Native | None]


@dataclass(frozen=True, slots=True)
class Look:
    """What to look at. updates: of the dumps, all when empty; against: steps, the newest policy when empty.

    model: where the start model lies now. rates, numbers: of the filter, to say what they would have dropped.
    """

    run_dir: Path
    updates: tuple[int, ...] = ()
    against: tuple[str, ...] = ()
    model: str | None = None
    rates: tuple[float, ...] = RATES
    numbers: tuple[Buckets, ...] = NUMBERS


def look(wanted: Look) -> tuple[dict[str, Any], Responses]:
    """All numbers, as JSON holds them but for NaN, and the pooled responses. ConfigError with its remedy."""
    notes: list[str] = []
    dumps = dumps_of(wanted.run_dir, wanted.updates, notes)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="asyncrl-drift-")))
        policies = Policies(wanted.run_dir, scratch, wanted.model)
        folders = {s: policies.of(s) for s in dict.fromkeys(wanted.against or (policies.newest(),))}
        clocks = {step: policies.update_of(step) for step in folders}
        own, other = _forward(dumps, policies, folders)
    lacking = [str(d.update) for d, native in zip(dumps, own, strict=True) if native is None]
    if lacking:
        notes.append(
            f"there is no policy of update {', '.join(lacking)}: its drift is the logged one and was not computed "
            "again, and its experts are not compared; logging.dump_policy=true writes the policy into the dump"
        )
    pool = _pool(dumps, own, other)
    if not pool.defined.any():
        raise ConfigError(
            f"no response in the dumps of {wanted.run_dir} has a drift: the generators sent no route counts, or no "
            "token counts; look at drift/undefined and staleness/masked_token_fraction in metrics.jsonl"
        )
    return _numbers(wanted, dumps, pool, own, other, clocks) | {"notes": notes}, pool


def _forward(
    dumps: Sequence[Dump], policies: Policies, folders: Mapping[str, Path]
) -> tuple[Natives, dict[str, list[Native]]]:
    """Every dump under its own policy (None without one), and under each of the others by step."""
    own: Natives = []
    other: dict[str, list[Native]] = {}
    with alone(dumps[0].config.learner.device) as world:
        for dump in dumps:
            folder = policies.own(dump)
            own.append(None if folder is None else rescore(policy_of(dump, folder, world), dump, world))
        for step, folder in folders.items():
            policy = policy_of(dumps[0], folder, world)
            other[step] = [rescore(policy, dump, world) for dump in dumps]
    return own, other


def logged(dump: Dump) -> Floats | None:
    """The native drift that the update measured, [n]; None where it measured that of replayed routes only."""
    routes = dump.config.algorithm.routes
    # Under r2 the only update of a take is natively routed.
    if routes == "r3" or (routes == "r2" and dump.routes is not None):
        return dump.table.columns.get("native_drift")
    return dump.table["drift"]


def _pool(dumps: Sequence[Dump], own: Natives, other: Mapping[str, Sequence[Native]]) -> Responses:
    def join(column: str) -> Floats:
        return np.concatenate([d.table[column] for d in dumps])

    drift, layers = [], []
    for dump, native in zip(dumps, own, strict=True):
        known = logged(dump)
        nothing = np.full(len(dump.table), np.nan)
        by_layer = np.stack([dump.table[f"layer_{n}"] for n in dump.info.layers], axis=1)
        if known is None:  # of replayed routes: not this drift
            known = nothing if native is None else native.drift
            by_layer = np.full_like(by_layer, np.nan) if native is None else native.layers
        drift.append(known)
        layers.append(by_layer)
    ratio = np.where(join("count") > 0, join("abs_log_ratio"), np.nan)
    against = {
        step: (np.concatenate([n.drift for n in natives]), np.concatenate([n.layers for n in natives]))
        for step, natives in other.items()
    }
    return Responses(
        [i for d in dumps for i in d.table.ids], [n[2] for d in dumps for n in d.table.names],
        np.concatenate([np.full(len(d.table), d.update) for d in dumps]), join("length"), join("reward"), join("lag"),
        np.concatenate(drift), np.concatenate(layers), ratio, against,
    )  # fmt: skip


def _numbers(
    wanted: Look,
    dumps: Sequence[Dump],
    pool: Responses,
    own: Natives,
    other: Mapping[str, Sequence[Native]],
    clocks: Mapping[str, int],
) -> dict[str, Any]:
    layers, a = dumps[0].info.layers, dumps[0].config.algorithm
    rates = sorted({*wanted.rates, a.rdc.q})
    differences = [_difference(d, n) for d, n in zip(dumps, own, strict=True)]
    return {
        "run": str(wanted.run_dir), "model": dumps[0].config.model.path,
        "against": list(other), "layers": list(layers), "experts": dumps[0].info.num_experts,
        "top_k": dumps[0].info.top_k, "q": a.rdc.q, "mode": a.rdc.mode, "routes": a.routes,
        "dumps": [_of_dump(d, n, gap, pool, clocks) for d, n, gap in zip(dumps, own, differences, strict=True)],
        "sanity": _sanity(differences),
        "overall": measure.overall(pool), "by_lag": measure.by(pool, pool.lag),
        "by_length": measure.by(pool, pool.length), "by_reward": measure.by(pool, pool.reward),
        "by_layer": measure.by_layer(pool, layers), "by_generator": measure.by_generator(pool),
        "correlations": measure.correlations(pool), "what_if": what_if(pool, rates, wanted.numbers),
        "usage": _usage(own, other, layers), "agreement": _agreement(dumps, own, other),
    }  # fmt: skip


def _difference(dump: Dump, native: Native | None) -> tuple[int, float] | None:
    """Responses compared, and the largest difference of drift computed again; None where there is nothing to compare.

    A response that has a drift on one side only differs by infinity.
    """
    known = logged(dump)
    if native is None or known is None:
        return None
    both = ~np.isnan(known) & ~np.isnan(native.drift)
    if bool((np.isnan(known) != np.isnan(native.drift)).any()):
        return int(both.sum()), float("inf")
    return int(both.sum()), float(np.abs(known - native.drift)[both].max(initial=0.0))


def _sanity(differences: Sequence[tuple[int, float] | None]) -> dict[str, Any]:
    known = [d for d in differences if d is not None]
    if not known:
        return {"responses": 0, "max_difference": float("nan"), "text": "no logged drift could be computed again"}
    count, gap = sum(n for n, _ in known), max(g for _, g in known)
    said = "equals the logged drift exactly" if gap == 0 else f"differs from the logged drift by up to {gap:.3g}"
    text = (
        f"the drift computed again under the policy of each dump {said}, over {count} responses of {len(known)} dumps"
    )
    return {"responses": count, "max_difference": gap, "text": text}


def _of_dump(
    dump: Dump, native: Native | None, gap: tuple[int, float] | None, pool: Responses, clocks: Mapping[str, int]
) -> dict[str, Any]:
    rows = pool.update == dump.update
    sampled_at = dump.update - measure.mean(pool.lag[rows & pool.defined])
    return {
        "update": dump.update, "epoch": dump.head.epoch, "outcome": dump.head.outcome, "responses": len(dump.table),
        "with_drift": int((rows & pool.defined).sum()), "dropped": int((~dump.keep).sum()),
        "lag": measure.mean(pool.lag[rows & pool.defined]), "drift": measure.mean(pool.drift[rows]),
        "against": {step: measure.mean(values[rows]) for step, (values, _) in pool.against.items()},
        "age": {step: abs(clock - sampled_at) for step, clock in clocks.items()}, "policy": native is not None,
        "max_difference": float("nan") if gap is None else gap[1],
    }  # fmt: skip


def _usage(own: Natives, other: Mapping[str, Sequence[Native]], layers: tuple[int, ...]) -> list[dict[str, Any]]:
    """Expert usage on the same tokens, from the policies of the dumps to each of the others."""
    known = [i for i, native in enumerate(own) if native is not None]
    if not known:
        return []
    before = sum((n.counts.sum(axis=0) for n in own if n is not None), start=np.zeros((), np.int64))
    out = []
    for step, natives in other.items():
        after = sum((natives[i].counts.sum(axis=0) for i in known), start=np.zeros((), np.int64))
        out.append({"before": OWN, "after": step, "layers": change(before, after, layers)})
    return out


def _agreement(dumps: Sequence[Dump], own: Natives, other: Mapping[str, Sequence[Native]]) -> list[dict[str, Any]]:
    """How many tokens have the same experts on two sides, by layer and by lag."""
    lags = np.concatenate([d.table["lag"] for d in dumps])
    used = np.concatenate([d.table["tokens"] > 0 for d in dumps])
    sides: dict[str, list[Routes | None]] = {
        ROLLOUT: [routes for d in dumps for routes in rollout_routes(d)],
        OWN: [
            routes
            for d, n in zip(dumps, own, strict=True)
            for routes in (n.routes if n is not None else [None] * len(d.table))
        ],
    }
    sides |= {step: [routes for n in natives for routes in n.routes] for step, natives in other.items()}
    pairs = [(ROLLOUT, OWN), *((ROLLOUT, step) for step in other), *((OWN, step) for step in other)]
    layers, out = dumps[0].info.layers, []
    for one, two in pairs:
        known = {
            i: (a, b)
            for i, (a, b) in enumerate(zip(sides[one], sides[two], strict=True))
            if a is not None and b is not None and len(a)
        }
        if not known:
            continue
        found = agree(known.values(), len(layers))
        rows = used & np.isin(np.arange(len(lags)), list(known))
        by_lag = [
            {
                "bin": label,
                "value": at,
                "equal_sets": agree([known[int(i)] for i in np.flatnonzero(inside)], len(layers)).equal,
            }
            for label, at, inside in measure.bins(lags, rows)
        ]
        out.append(
            {"between": [one, two], "tokens": found.tokens, "equal_sets": found.equal, "layers": found.lines(layers),
             "by_lag": by_lag}
        )  # fmt: skip
    return out
