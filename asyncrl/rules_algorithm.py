"""The rules between the settings of the objective; as asyncrl.rules.

What a method needs and takes is read from its line in the registry, so that a method that is added is covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.algos.registry import ADVANTAGES, AGGREGATIONS, CORRECTIONS, SURROGATES, Method

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.sections.algorithm import AlgorithmSection

CHOICES: Mapping[str, Mapping[str, Method]] = {
    "algorithm.surrogate": SURROGATES,
    "algorithm.correction.kind": CORRECTIONS,
    "algorithm.advantage": ADVANTAGES,
    "algorithm.aggregation": AGGREGATIONS,
}
"""Key that chooses a method, to the methods; the knobs of a method stand in the section of the key."""

TAKE = 4
"""Updates per take that a method is advised to use which needs more than one."""

WIDE = 0.05
"""A clip range from which on it is one of token ratios: those of whole responses stay far closer to 1."""


def problems(c: Config) -> Iterator[str]:
    """One sentence per rule that the config breaks."""
    yield from _rdc(c)
    yield from _unused(c)
    yield from _contradictions(c)
    yield from _kl(c)


def notes(c: Config) -> Iterator[str]:
    """One sentence per choice that runs and is unusual, with what is usual."""
    a, correction, surrogate = c.algorithm, CORRECTIONS[c.algorithm.correction.kind], SURROGATES[c.algorithm.surrogate]
    if a.routes == "r3" and correction.weighs_mu:
        yield (
            f"algorithm.correction.kind={a.correction.kind} on top of algorithm.routes=r3: TIS on top of R3 scored "
            "1.69 points below R3 alone in the R3 paper (arXiv 2510.11370, single mini-step SFT model), where replay "
            f"had removed what the weights are for; set {correction_off(a)}, unless old weights are the larger part of "
            "the mismatch (docs/r3.md)"
        )
    if surrogate.aggregation and a.aggregation != surrogate.aggregation:
        yield (
            f"algorithm.aggregation={a.aggregation} is not what algorithm.surrogate={a.surrogate} was published with: "
            f"each of its responses has one ratio, and all are to count alike; set algorithm.aggregation="
            f"{surrogate.aggregation}"
        )
    if a.kl_in_reward and ADVANTAGES[a.advantage].standardises:
        yield (
            f"algorithm.kl.where=reward with algorithm.advantage={a.advantage}: dividing by a standard deviation "
            "undoes algorithm.kl.coef where the task's rewards are equal (docs/kl.md); set algorithm.advantage=dr_grpo "
            "or rloo, or algorithm.kl.where=loss"
        )
    for key, value in a.clip_range.items():
        own = surrogate.defaults[key]
        if own < WIDE <= value:
            yield (
                f"algorithm.{key}={value:g} is a clip range of token ratios; the ratio of algorithm.surrogate="
                f"{a.surrogate} is of a whole response and would hardly ever be clipped; set algorithm.{key}=null, "
                f"its own {own:g}"
            )


def _rdc(c: Config) -> Iterator[str]:
    r = c.algorithm.rdc
    if r.bucket_edges is not None and not r.bucket_edges:
        yield (
            "algorithm.rdc.bucket_edges=[] names no edge; give at least one, or set algorithm.rdc.bucket_edges=null "
            "and algorithm.rdc.buckets"
        )
    if r.bucket_edges is not None and list(r.bucket_edges) != sorted(set(r.bucket_edges)):
        yield f"algorithm.rdc.bucket_edges={list(r.bucket_edges)} must ascend without repeats"
    if r.buckets != "auto" and r.buckets > c.responses_per_update:
        yield (
            f"algorithm.rdc.buckets={r.buckets} exceeds the {c.responses_per_update} responses of an update; "
            "set algorithm.rdc.buckets=auto"
        )


def _unused(c: Config) -> Iterator[str]:
    """Knobs that were set and that the chosen method does not take."""
    for key, methods in CHOICES.items():
        prefix, _, leaf = key.rpartition(".")
        section = _section(c, prefix)
        chosen = getattr(section, leaf)
        for knob in dict.fromkeys(k for m in methods.values() for k in m.knobs):
            value, default = getattr(section, knob), _default(section, knob)
            if value == default or knob in methods[chosen].knobs:
                continue
            takers = [name for name, method in methods.items() if knob in method.knobs]
            others = [f"{key}={name}" for name in takers if not any(_contradictions(_with(c, key, name)))]
            yield (
                f"{prefix}.{knob}={_shown(value)} is a knob of {_listed(takers)}, and has no effect with "
                f"{key}={chosen}; set {' or '.join([f'{prefix}.{knob}={_shown(default)}', *others])}"
            )


def _contradictions(c: Config) -> Iterator[str]:
    """What makes a choice of methods meaningless, whatever their unused knobs."""
    for rule in _RULES:
        yield from rule(c)


def _ratio(c: Config) -> Iterator[str]:
    a = c.algorithm
    if not SURROGATES[a.surrogate].needs_ratio or a.ratio != "proximal" or c.staleness.updates_per_take > 1:
        return
    behaviour = ["algorithm.ratio=behaviour"] + (
        [correction_off(a)] if CORRECTIONS[a.correction.kind].weighs_mu else []
    )
    yield (
        f"algorithm.surrogate={a.surrogate} changes nothing with algorithm.ratio=proximal and "
        "staleness.updates_per_take=1: pi_old is pi, every ratio is 1, and the gradient is that of clip; set "
        f"{_longer_take(c)}, or {' and '.join(behaviour)}, or algorithm.surrogate=clip"
    )


def _take(c: Config) -> Iterator[str]:
    a = c.algorithm
    if c.staleness.updates_per_take > 1:
        return
    if a.routes == "r2":
        yield (
            "algorithm.routes=r2 has nothing to replay with staleness.updates_per_take=1: the only update runs on the "
            f"routes of the scoring pass anyway; set {_longer_take(c)}, or algorithm.routes=native"
        )
    if CORRECTIONS[a.correction.kind].needs_take:
        yield (
            f"algorithm.correction.kind={a.correction.kind} has nothing to correct with staleness.updates_per_take=1: "
            "the only update has the router with which its take was scored; set "
            f"{_longer_take(c)}, or {correction_off(a)}"
        )


def _twice(c: Config) -> Iterator[str]:
    a = c.algorithm
    if a.ratio != "behaviour" or not CORRECTIONS[a.correction.kind].weighs_mu:
        return
    long = c.staleness.updates_per_take > 1
    fine = [k for k, m in CORRECTIONS.items() if not m.weighs_mu and (long or not m.needs_take) and k != "none"]
    yield (
        f"algorithm.ratio=behaviour already carries pi/mu inside the clip, so algorithm.correction.kind="
        f"{a.correction.kind} would apply it twice; set {correction_off(a)} (or a kind that does not weigh by it: "
        f"{', '.join(fine)})"
    )


def _bounds(c: Config) -> Iterator[str]:
    """Values that a method cannot compute with."""
    a = c.algorithm
    high = a.clip_range.get("eps_high", 0.0)
    if a.dual_clip is not None and "dual_clip" in SURROGATES[a.surrogate].knobs and a.dual_clip <= 1 + high:
        yield (
            f"algorithm.dual_clip={a.dual_clip:g} must exceed 1 + eps_high = {1 + high:g}: it bounds what the clip "
            f"leaves; set algorithm.dual_clip > {1 + high:g}, or algorithm.dual_clip=null"
        )


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (_ratio, _take, _twice, _bounds)


def _kl(c: Config) -> Iterator[str]:
    kl = c.algorithm.kl
    for key in ("where", "estimator", "reference"):
        value, default = getattr(kl, key), _default(kl, key)
        if value != default and not kl.coef:
            yield (
                f"algorithm.kl.{key}={_shown(value)} has no effect with algorithm.kl.coef=0; set "
                f"algorithm.kl.coef=0.001, or algorithm.kl.{key}={_shown(default)}"
            )
    if kl.coef and kl.where == "reward" and kl.estimator != _default(kl, "estimator"):
        yield (
            f"algorithm.kl.estimator={kl.estimator} is of the loss term, and algorithm.kl.where=reward takes k1 from "
            f"the reward; set algorithm.kl.estimator={_default(kl, 'estimator')}, or algorithm.kl.where=loss"
        )


def _longer_take(c: Config) -> str:
    """Settings that make several updates of a take, as far as they are not there."""
    lag = "" if c.staleness.max_lag >= TAKE - 1 else f" and staleness.max_lag={TAKE - 1}"
    return f"staleness.updates_per_take={TAKE}{lag}"


def correction_off(a: AlgorithmSection) -> str:
    """Settings without a correction: its knobs must not stay behind."""
    knobs = [k for k in CORRECTIONS[a.correction.kind].knobs if getattr(a.correction, k) != _default(a.correction, k)]
    back = [f"algorithm.correction.{k}={_shown(_default(a.correction, k))}" for k in knobs]
    return " and ".join(["algorithm.correction.kind=none", *back])


def _section(c: Config, prefix: str) -> Any:
    at: Any = c
    for name in prefix.split("."):
        at = getattr(at, name)
    return at


def _with(c: Config, key: str, value: object) -> Config:
    """The config with another value, unchecked."""
    prefix, _, leaf = key.rpartition(".")
    section = _section(c, prefix).model_copy(update={leaf: value})
    return c.model_copy(update={prefix: section}) if "." not in prefix else _with(c, prefix, section)


def _default(section: Any, key: str) -> Any:
    return type(section).model_fields[key].default


def _listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([part for part in (", ".join(names[:-1]), names[-1]) if part])


def _shown(value: object) -> str:
    """A value as an override would have it."""
    return "null" if value is None else str(value)
