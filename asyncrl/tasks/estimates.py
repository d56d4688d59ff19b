"""What the answers to a held-out set say: avg@k, pass@k, maj@k, greedy, and how sure that is. Pure.

Every prompt weighs the same. A value over prompts is the mean of one value per prompt, so its standard error is that
of a mean of independent prompts: the samples of one prompt are not independent of each other, and counting them as if
they were would make intervals too narrow (clustered standard errors; Miller 2024, arXiv 2411.00640).
docs/evaluation.md has the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959963984540054
"""Of the 95 % interval."""


MAX_PARTS = 32
"""Most named parts of a set: as many as one response may have."""


class Answer(NamedTuple):
    """One scored response. prompt: which prompt it answers; extracted: the answer that it gives, "" for none."""

    prompt: str
    sample: int
    greedy: bool
    reward: float
    length: int
    truncated: bool = False
    extracted: str = ""
    parts: Mapping[str, float] = {}


class Estimate(NamedTuple):
    """A mean over prompts. stderr, low and high (95 %) are NaN where one prompt is all there is."""

    value: float
    stderr: float
    low: float
    high: float
    prompts: int


NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan, 0)
"""The mean of no prompt."""


def ks(k: int) -> list[int]:
    """Powers of two from 1 to k: the j of pass@j."""
    return [2**i for i in range(k.bit_length())] if k > 0 else []


def pass_at(rewards: Sequence[float], j: int) -> float:
    """Expected highest reward of j of these n, drawn without putting back; NaN for n < j.

    For rewards of 0 and 1, c of them 1, this is 1 - C(n - c, j) / C(n, j), the unbiased pass@j of Chen et al. 2021
    (arXiv 2107.03374, eq. 1). j = 1 is the mean.
    """
    n = len(rewards)
    if j < 1 or n < j:
        return math.nan
    ordered = sorted(rewards, reverse=True)
    # C(n - i, j - 1) / C(n, j): that the i-th highest is drawn and none above it, from i = 1 on.
    weight, total = j / n, 0.0
    for i, reward in enumerate(ordered[: n - j + 1], start=1):
        total += weight * reward
        weight *= (n - i - j + 1) / (n - i) if i < n else 0.0
    return total


def majority(answers: Iterable[Answer]) -> float:
    """Mean reward of the responses that give the most frequent answer; ties go to the one that came first.

    Responses that give no answer do not vote; 0 when none gives one.
    """
    ordered = sorted(answers, key=lambda a: a.sample)
    votes = Counter(a.extracted for a in ordered if a.extracted)
    if not votes:
        return 0.0
    winner = max(votes, key=lambda text: votes[text])  # the first of equals, and a Counter keeps their order
    return _mean([a.reward for a in ordered if a.extracted == winner])


def estimate(values: Sequence[float], answers: int | None = None) -> Estimate:
    """Mean of one value per prompt, NaN left out. answers: responses that these values are made of.

    Within [0, 1] the interval is Wilson's with the effective number of answers p (1 - p) / stderr^2, which is between
    the number of prompts and that of answers (Franco et al. 2019): unlike mean +- z stderr it stays within
    [0, 1] and has a width when all values are 0 or 1, where stderr is 0. Else it is mean +- z stderr.
    """
    known = np.asarray([v for v in values if math.isfinite(v)], np.float64)
    m = len(known)
    if not m:
        return NOTHING
    p = float(known.mean())
    stderr = float(known.std(ddof=1) / math.sqrt(m)) if m > 1 else math.nan
    if known.min() < 0 or known.max() > 1:
        return Estimate(p, stderr, p - Z * stderr, p + Z * stderr, m)
    spread = p * (1 - p)
    size = float(m)
    if stderr > 0 and spread > 0:
        size = min(max(spread / stderr**2, float(m)), float(max(answers or m, m)))
    elif spread > 0 and m > 1:
        size = float(max(answers or m, m))
    return Estimate(p, stderr, *wilson(p, size), m)


def wilson(p: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share p of n (Wilson 1927); n need not be whole."""
    middle, scale = p + Z**2 / (2 * n), 1 + Z**2 / n
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def estimates(answers: Sequence[Answer], k: int) -> dict[str, Estimate]:
    """avg_at_k, pass_at_j for the powers of two up to k, maj_at_k and greedy: those that the answers tell of.

    k: samples asked for. pass and maj are over the prompts that have that many; avg over those with any. maj is left
    out for k = 1, and where no response gives an answer, as of a reward that names none.
    """
    sampled, greedy = _by_prompt(a for a in answers if not a.greedy), [a.reward for a in answers if a.greedy]
    found: dict[str, Estimate] = {}

    def add(name: str, value: Callable[[list[Answer]], float], least: int) -> None:
        groups = [group for group in sampled.values() if len(group) >= least]
        if groups:
            found[name] = estimate([value(group) for group in groups], sum(map(len, groups)))

    add(f"avg_at_{k}", lambda group: _mean([a.reward for a in group]), 1)
    for j in ks(k):
        add(f"pass_at_{j}", lambda group, j=j: pass_at([a.reward for a in group], j), j)  # type: ignore[misc]
    if k > 1 and any(a.extracted for a in answers if not a.greedy):
        add(f"maj_at_{k}", majority, k)
    if greedy:
        found["greedy"] = estimate(greedy)
    return found


def summary(answers: Sequence[Answer], k: int, names_answers: bool = True) -> dict[str, float]:
    """The values of `estimates`, and what else is known of a set, by the last part of its metric's name.

    length, truncated, no_answer and part/<name> are means over the sampled responses, or the greedy ones where nothing
    was sampled; stderr, ci_low and ci_high are of avg_at_k, or else of greedy. What has no value is left out, and so
    is no_answer where no response has an extracted answer and the rewards need not name any (names_answers=False).
    """
    found = estimates(answers, k)
    out = {name: e.value for name, e in found.items()}
    shown = [a for a in answers if not a.greedy] or list(answers)
    out |= {"prompts": float(len({a.prompt for a in answers})), "count": float(len(answers))}
    if shown:
        out["length"] = _mean([float(a.length) for a in shown])
        out["truncated"] = _mean([float(a.truncated) for a in shown])
        if names_answers or any(a.extracted for a in answers):
            out["no_answer"] = _mean([float(not a.extracted) for a in shown])
    head = found.get(f"avg_at_{k}") or found.get("greedy") or NOTHING
    out |= {"stderr": head.stderr, "ci_low": head.low, "ci_high": head.high}
    for name in sorted({name for a in shown for name in a.parts})[:MAX_PARTS]:
        out[f"part/{name.replace('/', '_')}"] = _mean([a.parts[name] for a in shown if name in a.parts])
    return {name: value for name, value in out.items() if math.isfinite(value)}


def _by_prompt(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    out: dict[str, list[Answer]] = {}
    for answer in answers:
        out.setdefault(answer.prompt, []).append(answer)
    return out


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
