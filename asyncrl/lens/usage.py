"""How two policies, or the rollout and a policy, use the experts on the same tokens. Pure.

Axes: N tokens, L MoE layers, K chosen experts (ascending), E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RARE = 0.1
"""An expert with less than this part of an even share is rare."""

_BLOCK = 2**16
"""Tokens that are compared at once."""

Counts = NDArray[np.int64]
Routes = NDArray[np.unsignedinteger]


def change(before: Counts, after: Counts, layers: Sequence[int]) -> list[dict[str, Any]]:
    """Usage by layer: counts [L, E] of the same tokens under two policies, one line per layer.

    total_variation = 1/2 sum_e |u_before(e) - u_after(e)| with u the share of choices; dead: experts that no token
    chose; newly_dead, revived: which of them changed; newly_rare: fell below RARE of an even share.
    """
    lines = []
    for i, layer in enumerate(layers):
        one, two = _shares(before[i]), _shares(after[i])
        rare = RARE / len(one)
        lines.append(
            {
                "layer": layer, "tokens_choices": int(before[i].sum()),
                "total_variation": float(np.abs(one - two).sum() / 2),
                "dead_before": int((one == 0).sum()), "dead_after": int((two == 0).sum()),
                "newly_dead": _which((one > 0) & (two == 0)), "revived": _which((one == 0) & (two > 0)),
                "newly_rare": _which((one >= rare) & (two < rare)),
                "before": one.tolist(), "after": two.tolist(),
            }
        )  # fmt: skip
    return lines


def _shares(counts_E: Counts) -> NDArray[np.float64]:
    total = counts_E.sum()
    shares: NDArray[np.float64] = counts_E / total if total else np.zeros(len(counts_E))
    return shares


def _which(experts: NDArray[np.bool_]) -> list[int]:
    return [int(e) for e in np.flatnonzero(experts)]


class Agreement:
    """Sums over tokens: how many have the same set of experts on both sides, and their Jaccard indices."""

    def __init__(self, num_layers: int) -> None:
        self.tokens = 0
        self._equal = np.zeros(num_layers)
        self._jaccard = np.zeros(num_layers)

    def add(self, one_NLK: Routes, two_NLK: Routes) -> None:
        """Count the tokens of a response. Both sides ascending in K and of one shape."""
        assert one_NLK.shape == two_NLK.shape
        k = one_NLK.shape[2]
        self.tokens += len(one_NLK)
        for n in range(0, len(one_NLK), _BLOCK):
            a, b = one_NLK[n : n + _BLOCK], two_NLK[n : n + _BLOCK]
            common_NL = (a[..., :, None] == b[..., None, :]).any(axis=-1).sum(axis=-1)
            self._equal += (common_NL == k).sum(axis=0)
            self._jaccard += (common_NL / (2 * k - common_NL)).sum(axis=0)

    def lines(self, layers: Sequence[int]) -> list[dict[str, Any]]:
        """One line per layer; NaN without a token."""
        tokens = self.tokens or float("nan")
        return [
            {"layer": layer, "equal_sets": float(e / tokens), "jaccard": float(j / tokens)}
            for layer, e, j in zip(layers, self._equal, self._jaccard, strict=True)
        ]

    @property
    def equal(self) -> float:
        """Share of (token, layer) pairs with equal sets."""
        return float(self._equal.mean() / self.tokens) if self.tokens and len(self._equal) else float("nan")


def agree(pairs: Iterable[tuple[Routes, Routes]], num_layers: int) -> Agreement:
    """Agreement of many responses."""
    found = Agreement(num_layers)
    for one, two in pairs:
        found.add(one, two)
    return found
