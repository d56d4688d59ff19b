"""Which methods there are: one line each, with its file, its settings and what it needs. Imports no torch, so that a
config is checked without it; docs/extending.md shows how to add one.

A method is a function of tensors. It names what it takes: tensors from a fixed list (seam.py) and its knobs, which are
keys of its config section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Method:
    """place: "module:function" below asyncrl.algos. knobs: the keys of its section that it takes. defaults: values of
    the knobs whose setting is null, because each method has another usual one."""

    place: str
    knobs: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advantage(Method):
    """standardises: it divides by a standard deviation of rewards."""

    standardises: bool = False


@dataclass(frozen=True, slots=True)
class Surrogate(Method):
    """needs_ratio: where pi_old equals pi its gradient is that of `clip`, so that choosing it changes nothing.
    aggregation: what its paper aggregates with, "" for any."""

    needs_ratio: bool = True
    aggregation: str = ""


@dataclass(frozen=True, slots=True)
class Correction(Method):
    """weighs_mu: it multiplies by (a function of) pi_old / mu, which ratio=behaviour has in its clip already; one that
    only drops has it not. rescales: it acts on the ratio, before the clip, and not on the loss. needs_take: it compares
    the policy with the one at the start of a take."""

    weighs_mu: bool = False
    rescales: bool = False
    needs_take: bool = False


SURROGATES: Mapping[str, Surrogate] = {
    "clip": Surrogate(
        "surrogates.clip:clip",
        ("eps_low", "eps_high", "dual_clip"),
        {"eps_low": 0.2, "eps_high": 0.27},
        needs_ratio=False,
    ),
    "gspo": Surrogate(
        "surrogates.gspo:gspo",
        ("eps_low", "eps_high"),
        {"eps_low": 3e-4, "eps_high": 4e-4},
        aggregation="sequence_mean",
    ),
    "cispo": Surrogate("surrogates.cispo:cispo", ("eps_low", "eps_high"), {"eps_low": 1.0, "eps_high": 4.0}),
    "gmpo": Surrogate(
        "surrogates.gmpo:gmpo", ("eps_low", "eps_high"), {"eps_low": 0.4, "eps_high": 0.4}, aggregation="sequence_mean"
    ),
}
"""algorithm.surrogate. Knobs are keys of `algorithm`."""

CORRECTIONS: Mapping[str, Correction] = {
    "none": Correction("corrections.none:none"),
    "tis": Correction("corrections.tis:tis_weights", ("cap", "level"), weighs_mu=True),
    "mask": Correction("corrections.mask:mask_weights", ("low", "high")),
    "trm": Correction("corrections.trm:trm_weights", ("bound",)),
    "sis": Correction("corrections.sis:sis_weights", ("envelope",), weighs_mu=True),
    "ctpo": Correction("corrections.ctpo:ctpo_weights", ("spread_low", "spread_high"), weighs_mu=True),
    "rspo": Correction("corrections.rspo:rspo_weights", ("floor",), rescales=True, needs_take=True),
}
"""algorithm.correction.kind. Knobs are keys of `algorithm.correction`."""

ADVANTAGES: Mapping[str, Advantage] = {
    "grpo": Advantage("advantages.grpo:grpo", standardises=True),
    "dr_grpo": Advantage("advantages.dr_grpo:dr_grpo"),
    "rloo": Advantage("advantages.rloo:rloo"),
    "reinforce_pp": Advantage("advantages.reinforce_pp:reinforce_pp", standardises=True),
}
"""algorithm.advantage."""

AGGREGATIONS: Mapping[str, Method] = {
    "token_mean": Method("aggregate.token_mean:token_mean"),
    "sequence_mean": Method("aggregate.sequence_mean:sequence_mean"),
    "constant": Method("aggregate.constant:constant"),
}
"""algorithm.aggregation."""
