"""What is said of a response, in short words: the same in the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asyncrl.samples.source import Found, Part, Sample, Wanted

STEPS = (0.05, 0.2, 0.5, 1.0)
"""|log pi/mu| from which on a token has the next colour: factors of 1.05, 1.22, 1.65 and 2.7 between the policies."""

LEGEND = (
    "colour: log pi/mu of a token, learner minus rollout. Red: the learner finds it less likely than the engine that "
    "sampled it, blue: more likely"
)

ORDERS = {
    "newest": "newest dump first", "drift": "highest drift first", "lag": "oldest first", "length": "longest first",
}  # fmt: skip


def number(x: float, digits: int = 3) -> str:
    """A number in a few characters; `-` for NaN."""
    return "-" if math.isnan(x) else f"{x:.{digits}g}"


def level(ratio: float | None) -> int:
    """Colour of a token: 0 none, 1 to 4 more likely under the learner, -1 to -4 less."""
    if ratio is None or math.isnan(ratio):
        return 0
    size = sum(abs(ratio) >= step for step in STEPS)
    return size if ratio > 0 else -size


def facts(s: Sample) -> list[tuple[str, str]]:
    """(name, value) of what is known of a response."""
    parts = ", ".join(f"{name} {number(x)}" for name, x in s.rewards.items())
    versions = ", ".join(f"{p.version} [{p.start}, {p.end}) lag {p.lag}" for p in s.spans)
    known = [
        ("reward", number(s.reward) + (f" ({parts})" if parts else "")),
        ("gold", s.gold or "-"),
        ("advantage", number(s.advantage)),
        ("length", f"{s.length} tokens, {s.trained} trained, ended by {s.finish}"),
        ("lag", f"{s.lag}; versions: {versions or '-'}"),
        ("drift", number(s.drift) + f", bucket {s.bucket}"),
        ("log pi/mu", f"mean |x| {number(s.mean_ratio)}" if s.ratio is not None else "no learner log-probs"),
        ("in the update", s.took),
        ("generator", s.generator),
        ("source", f"{s.data_source or '-'}, {s.scorer or f'verifier {s.verifier}'}"),
    ]
    return known


def largest(s: Sample, count: int = 4) -> list[Part]:
    """The pieces whose log pi/mu is furthest from 0, where that is at least the first step."""
    known = [p for p in s.parts if p.ratio is not None and abs(p.ratio) >= STEPS[0]]
    return sorted(known, key=lambda p: -abs(p.ratio or 0.0))[:count]


def heading(found: Found, wanted: Wanted) -> str:
    """What is shown, of how much."""
    where = ", ".join(map(str, sorted(found.updates)))
    how = [f"reward {wanted.reward:g}"] if wanted.reward is not None else []
    how += ["dropped by the filter"] if wanted.dropped else []
    how += [f"source {wanted.source}"] if wanted.source is not None else []
    which = f" ({', '.join(how)})" if how else ""
    return (
        f"{len(found.samples)} of {found.total} responses{which} in the dumps of update {where}, {ORDERS[wanted.order]}"
    )


def summary(samples: Sequence[Sample]) -> str:
    """Means of what is shown."""

    def mean(values: list[float]) -> str:
        known = [v for v in values if not math.isnan(v)]
        return number(float(np.mean(known))) if known else "-"

    return (
        f"means of these: reward {mean([s.reward for s in samples])}, length {mean([s.length for s in samples])}, "
        f"lag {mean([s.lag for s in samples])}, drift {mean([s.drift for s in samples])}, "
        f"|log pi/mu| {mean([s.mean_ratio for s in samples])}"
    )
