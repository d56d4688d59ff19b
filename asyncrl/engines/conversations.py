"""What is kept of conversations between their turns: keys and values, with the routes of the same tokens.

Everything kept is of the weights of now: a load drops it all. A conversation whose last turn ran through a load is
kept, though: its keys and values are of both versions, as those of any response that goes on, and the segments of that
turn say so.

Bounded by the number of conversations: with as many as rows they take at most the memory of the rows once more.
Axes: L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.decoder import Decoder

Routes = NDArray[np.unsignedinteger]


class _Kept(NamedTuple):
    """Tokens that were run [C], their routes [C, L, K] (None when dense), what the decoder saved of them."""

    token_ids: NDArray[np.int32]
    routes: Routes | None
    saved: Any


class Conversations:
    """At most `most` conversations by name; the one that was used longest ago makes room."""

    def __init__(self, decoder: Decoder, most: int) -> None:
        self.reused_tokens = 0
        self._decoder = decoder
        self._most = most
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def start_of(self, name: str, prompt_ids: NDArray[np.int32]) -> int:
        """How many tokens of a prompt need not be run again: 0 unless it begins with all that is kept.

        One token at least is left to run. What does not fit the prompt is dropped.
        """
        kept = self._kept.get(name)
        if kept is None:
            return 0
        length = len(kept.token_ids)
        if length > len(prompt_ids) or not np.array_equal(kept.token_ids, prompt_ids[:length]):
            self.forget(name)
            return 0
        return min(length, len(prompt_ids) - 1)

    def take(self, name: str, row: int, start: int) -> Routes | None:
        """Put the first `start` tokens into a row, with room for all that is kept; gives their routes.

        Nothing is kept any more.
        """
        kept = self._kept.pop(name)
        self._decoder.restore(row, kept.saved)
        self.reused_tokens += start
        return None if kept.routes is None else kept.routes[:start]

    def keep(self, name: str, row: int, token_ids: NDArray[np.int32], routes: Routes | None) -> None:
        """Keep what a row holds: these tokens, all that were run, and their routes."""
        self.forget(name)
        saved = self._decoder.save(row, len(token_ids))
        if saved is None:
            return
        self._kept[name] = _Kept(token_ids, routes, saved)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def forget(self, name: str) -> None:
        """Free what is kept of a conversation, if anything is."""
        self._kept.pop(name, None)

    def clear(self) -> None:
        """Free everything."""
        self._kept.clear()
