"""The order in which prompts are given out, and which groups of the open data epochs are resolved.

Every data epoch has its own seeded order. A group is `<data epoch>/<prompt id>`. Knows no lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import TaskError
from asyncrl.types import Prompt

RESERVE = 64
"""Prompts that may be given out before the cursor must be saved again."""


class CursorState(NamedTuple):
    """A cursor on disk. Prompts up to `reserved` may have been given out since; resolved: a bit per prompt."""

    epoch: int
    position: int
    reserved: int
    resolved: dict[int, bytes]


class Cursor:
    """Walks the prompts for ever. given counts what was given out; saved says how far the disk knows."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not len(prompts):
            raise TaskError("the task has no training prompts")
        self.prompts = prompts
        self.saved = 0
        self._index: dict[str, int] = {}
        for i in range(len(prompts)):
            if self._index.setdefault(prompts[i].prompt_id, i) != i:
                raise TaskError(f"two training prompts have the id {prompts[i].prompt_id!r}")
        self._seed = seed
        self._epoch, self._position = -1, len(prompts)
        self._order: NDArray[np.int64] = np.empty(0, np.int64)
        self._resolved: dict[int, bytearray] = {}

    @property
    def given(self) -> int:
        """Prompts given out, over all data epochs."""
        return self._epoch * len(self.prompts) + self._position

    def next(self) -> tuple[int, int]:
        """Data epoch and index of the next prompt."""
        if self._position == len(self.prompts):
            # An epoch with every prompt resolved needs no bits: its groups are known by their number.
            full = len(self.prompts)
            self._resolved = {e: b for e, b in self._resolved.items() if int.from_bytes(b).bit_count() < full}
            self._start(self._epoch + 1, 0)
            self._resolved[self._epoch] = bytearray((full + 7) // 8)
        index = int(self._order[self._position])
        self._position += 1
        return self._epoch, index

    def group_id(self, epoch: int, index: int) -> str:
        """Name of a group."""
        return f"{epoch}/{self.prompts[index].prompt_id}"

    def resolve(self, epoch: int, index: int) -> None:
        """Close a group; it stays known until its data epoch is complete."""
        self._resolved[epoch][index >> 3] |= 1 << (index & 7)

    def is_resolved(self, group_id: str) -> bool:
        """True for a group that was closed."""
        number, _, prompt_id = group_id.partition("/")
        if not (number.isascii() and number.isdigit() and len(number) < 10) or int(number) > self._epoch:
            return False
        bits, index = self._resolved.get(int(number)), self._index.get(prompt_id)
        if bits is None:
            return True
        return index is not None and bool(bits[index >> 3] >> (index & 7) & 1)

    def reopen(self, group_id: str) -> tuple[int, int] | None:
        """Undo `resolve`: data epoch and index of the group. None for one that is open or was never given out."""
        number, _, prompt_id = group_id.partition("/")
        if not self.is_resolved(group_id) or prompt_id not in self._index:
            return None
        epoch, index, full = int(number), self._index[prompt_id], len(self.prompts)
        if epoch not in self._resolved:
            # It was complete, and forgotten: all its prompts were resolved.
            self._resolved[epoch] = bytearray(((1 << full) - 1).to_bytes((full + 7) // 8, "little"))
        self._resolved[epoch][index >> 3] &= ~(1 << (index & 7))
        return epoch, index

    def save(self, spare: int) -> CursorState:
        """All of it, and a reserve: so much may be given out before the next save. spare: prompts that wait anyway."""
        self.saved = self.given + max(0, RESERVE - spare)
        resolved = {e: bytes(b) for e, b in self._resolved.items()}
        return CursorState(self._epoch, self._position, self.saved, resolved)

    def load(self, state: CursorState) -> None:
        """Go on from there."""
        self._start(state.epoch, state.position)
        self._resolved = {e: bytearray(b) for e, b in state.resolved.items()}
        self.saved = state.reserved

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        if epoch >= 0:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self.prompts))
