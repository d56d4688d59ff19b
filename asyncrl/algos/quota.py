"""How many responses an update drops, and how many of them each length bucket gives.

Plain integers and floats; knows nothing of responses. The quota of an update is
floor(q n + carry + 1e-9) and only the fraction is carried, so the long-run rate is q and never more.

The quota is apportioned by largest remainder over time: bucket b is owed q n_b per update, gets the
whole part at once, and the remainders add up over the updates. What is left of the quota goes to the
buckets whose next unit falls due first (unit j of a bucket with remainder f is open after (j - 1) / f
updates and due by j / f); ties rotate with the update number. At the first update this is the plain
largest remainder of q n_b. With constant q and bucket sizes, and from update 0 with carry 0 on, every bucket
then has given within 1 of q n_b u after each update u: the units due by u never outnumber the quota so
far, and open units never run short, so earliest-due-first meets every due date (Jackson's rule for
unit jobs).

A Selection carries only one float. So the state (what each bucket has got) is not stored but computed
again from (q, sizes, carry, update), as if these sizes had always been so. The pattern repeats after
d updates, d the denominator of q, so this costs at most d short steps.

Where the bound does not hold:
- sizes that change from update to update: the rates are q in the long run, without a hard bound;
- another start than update 0: each window is within 2, and was within 1 wherever we measured it
  (equal buckets, every n from 4 to 299);
- q > 1 - 1/n_b, a drift of exactly 0, an undefined drift: what a bucket cannot give is counted as
  unfilled. It is neither carried nor moved to another bucket, which would undo the length balance;
- a q that is no fraction of denominator <= 1000 is replaced by the nearest one for the split between
  buckets (error below 1e-6), never for the quota.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

_MAX_DENOMINATOR = 1000
_GRID = 10**9
"""The carry is read in whole steps of 1 / (denominator * _GRID), so that the pattern is integer arithmetic."""
_SLACK = 1e-9
"""Float noise that may not hold back a unit."""


def update_quota(q: float, n: int, carry: float) -> tuple[int, float]:
    """Responses to drop in this update, and the carry for the next one.

    q in [0, 1): fraction to drop. n: responses with a defined drift. carry in [0, 1): fraction left
    over so far. Raises ValueError outside these ranges.
    """
    if not 0 <= q < 1:
        raise ValueError(f"q={q} must be in [0, 1)")
    if not 0 <= carry < 1:
        raise ValueError(f"carry={carry} must be in [0, 1)")
    if n == 0:
        return 0, carry
    due = q * n + carry
    quota = math.floor(due + _SLACK)
    return quota, max(0.0, due - quota)


def apportion(q: float, sizes: Sequence[int], quota: int, carry: float, update: int) -> list[int]:
    """Split the quota of an update over buckets.

    sizes: responses with a defined drift per bucket, sum n. quota, carry: as `update_quota(q, n, carry)`
    got and gave them (carry is the one BEFORE this update). Returns one number per bucket, sum quota;
    an empty bucket gets 0. Method: see the module docstring.
    """
    owed = [b for b, size in enumerate(sizes) if size > 0]
    result = [0] * len(sizes)
    if quota == 0 or not owed:
        return result
    rate = Fraction(q).limit_denominator(_MAX_DENOMINATOR)
    num, den = rate.numerator, rate.denominator
    whole = [num * sizes[b] // den for b in owed]
    rest = [num * sizes[b] % den for b in owed]
    extra = quota - sum(whole)
    got = _history(rest, den, _phase(num * sum(sizes), den, carry, update), update)
    before = list(got)
    _serve(got, rest, den, extra, update % den, update)
    for i, b in enumerate(owed):
        result[b] = whole[i] + got[i] - before[i]
    # Only for a q that is not exactly num / den: the whole parts alone may exceed the quota by one.
    while sum(result) > quota:
        result[max(range(len(result)), key=lambda b: (result[b], (b + update) % len(result)))] -= 1
    return result


def _phase(num_n: int, den: int, carry: float, update: int) -> int:
    """Carry at the start of the pattern, in units of 1 / (den * _GRID)."""
    since_start = num_n * (update % den) % den
    return math.floor((carry * den - since_start + _SLACK * den) * _GRID) % (den * _GRID)


def _history(rest: Sequence[int], den: int, phase: int, update: int) -> list[int]:
    """Extra units that each bucket has got since the pattern began, before `update`."""
    got = [0] * len(rest)
    step, total, unit = update % den, sum(rest) * _GRID, den * _GRID
    for s in range(step):
        units = (total * (s + 1) + phase) // unit - (total * s + phase) // unit
        _serve(got, rest, den, units, s, update - step + s)
    return got


def _serve(got: list[int], rest: Sequence[int], den: int, units: int, step: int, update: int) -> None:
    """Give out units one by one: open units first, then earliest due, then rotating with the update."""
    count = len(rest)

    def urgency(b: int) -> tuple[bool, float, int]:
        is_closed = (step + 1) * rest[b] <= got[b] * den
        # Division of integers rounds correctly, so equal due dates are equal floats.
        due = (got[b] + 1) * den / rest[b] if rest[b] else math.inf
        return is_closed, due, (b - update) % count

    for _ in range(units):
        got[min(range(count), key=urgency)] += 1
