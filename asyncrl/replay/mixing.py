"""Which prompts a data epoch has, and in which order: the shares of the sources. Pure: all follows from seed and epoch.

Without weights a data epoch is every prompt once, in a seeded order. With weights w_s of sources with n_s prompts it
has q_s = w_s min_t(n_t / w_t) prompts of source s: all of the source that is used up first, and of the others as many
as keep the shares. The others go on in the next data epoch where they stopped, in a seeded circle through all their
prompts, so that no prompt comes twice in one data epoch and, over time, each prompt of a source as often as the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import TaskError

Indices = NDArray[np.int64]


class Mixing:
    """The data epochs over num_prompts prompts.

    sources: name of the data source of each prompt, needed with weights only. weights: share of each source against
    the others; none, or one source, is every prompt once. Raises TaskError for a source without a weight, and for a
    weight without a prompt.
    """

    def __init__(
        self, num_prompts: int, seed: int, sources: Sequence[str] = (), weights: Mapping[str, float] | None = None
    ) -> None:
        self._num, self._seed = num_prompts, seed
        self._circles: list[Indices] = []
        self._quotas: list[Fraction] = []
        weights = weights or {}
        if len(weights) > 1:
            self._divide(np.asarray(sources), weights)

    def _divide(self, sources: NDArray[np.str_], weights: Mapping[str, float]) -> None:
        names = list(dict.fromkeys(sources.tolist()))
        for name in [*names, *weights]:
            if name not in weights or name not in names:
                what = "has prompts, but no weight" if name in names else "has a weight, but no prompt that can be used"
                raise TaskError(f"source {name!r} of task.train {what}; remove it from task.train, or look at its file")
        # As they are written: 0.3 is 3/10, so that shares stay exact for ever.
        shares = [Fraction(repr(float(weights[name]))) for name in names]
        groups = [np.flatnonzero(sources == name) for name in names]
        epoch = min(len(g) / share for g, share in zip(groups, shares, strict=True))
        self._quotas = [share * epoch for share in shares]
        for i, group in enumerate(groups):
            self._circles.append(group[np.random.default_rng([self._seed, 0, i]).permutation(len(group))])

    def start(self, epoch: int) -> int:
        """Prompts of all data epochs before this one."""
        return sum(floor(q * epoch) for q in self._quotas) if self._quotas else epoch * self._num

    def order(self, epoch: int) -> Indices:
        """Indices int64 of the prompts of a data epoch, each once, in the order in which they are given out.

        Every stretch has the shares of the sources to within about one prompt per source.
        """
        if not self._quotas:
            return np.random.default_rng([self._seed, epoch]).permutation(self._num)
        parts = [self._shuffled(i, epoch) for i in range(len(self._quotas))]
        # The middles of equal parts of the epoch; ties in the order of the sources.
        places = np.concatenate([(np.arange(len(p)) + 0.5) / max(1, len(p)) for p in parts])
        return np.concatenate(parts)[np.argsort(places, kind="stable")]

    def turns(self, epoch: int, index: Indices) -> Indices:
        """How often each of these prompts of a data epoch was in one before."""
        if not self._quotas:
            return np.full(len(index), epoch, np.int64)
        rounds = np.zeros(self._num, np.int64)
        for circle, quota in zip(self._circles, self._quotas, strict=True):
            at = np.arange(floor(quota * epoch), floor(quota * (epoch + 1)))
            rounds[circle[at % len(circle)]] = at // len(circle)
        return rounds[index]

    def _shuffled(self, i: int, epoch: int) -> Indices:
        """This data epoch's prompts of one source, in an order of their own."""
        circle, quota = self._circles[i], self._quotas[i]
        mine = circle[np.arange(floor(quota * epoch), floor(quota * (epoch + 1))) % len(circle)]
        return np.random.default_rng([self._seed, 1, i, epoch]).permutation(mine)
