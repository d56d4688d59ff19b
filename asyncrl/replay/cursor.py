"""The order in which prompts are given out, and which groups of the open data epochs are resolved.

Every data epoch has its own seeded order (asyncrl.replay.mixing). A group is `<data epoch>/<prompt id>`. Knows no
lease.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.errors import TaskError
from asyncrl.replay.curriculum import Curriculum
from asyncrl.replay.mixing import Indices, Mixing
from asyncrl.types import Prompt

RESERVE = 64
"""Prompts that may be given out before the cursor must be saved again."""


class CursorState(NamedTuple):
    """A cursor on disk. Prompts up to `reserved` may have been given out since.

    resolved: by data epoch, a bit for each of its prompts in the order of their indices.
    """

    epoch: int
    position: int
    reserved: int
    resolved: dict[int, bytes]


class _Epoch:
    """The prompts of one open data epoch, and which of them are resolved. members: their indices, None for all."""

    def __init__(self, order: Indices, num_prompts: int, bits: bytes | None = None) -> None:
        self.size = len(order)
        self.members = None if self.size == num_prompts else np.sort(order)
        self.bits = bytearray((self.size + 7) // 8 if bits is None else bits)

    @property
    def is_complete(self) -> bool:
        """True when every prompt is resolved."""
        return int.from_bytes(self.bits).bit_count() == self.size

    def slot(self, index: int) -> int | None:
        """Place of a prompt's bit, None for one that this data epoch does not have."""
        if self.members is None:
            return index
        at = int(np.searchsorted(self.members, index))
        return at if at < self.size and self.members[at] == index else None

    def get(self, slot: int) -> bool:
        """A bit."""
        return bool(self.bits[slot >> 3] >> (slot & 7) & 1)

    def set(self, slot: int | None, value: bool) -> None:
        """Set a bit."""
        assert slot is not None
        self.bits[slot >> 3] = self.bits[slot >> 3] & ~(1 << (slot & 7)) | value << (slot & 7)


class Cursor:
    """Walks the prompts for ever. given counts what was passed; saved says how far the disk knows.

    weights: share of each data source (see Mixing). curriculum: what rests is resolved when its data epoch begins.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, weights: Mapping[str, float] | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:  # fmt: skip
        if not len(prompts):
            raise TaskError("the task has no training prompts")
        self.prompts = prompts
        self.saved = 0
        self._index: dict[str, int] = {}
        for i in range(len(prompts)):
            if self._index.setdefault(prompts[i].prompt_id, i) != i:
                raise TaskError(f"two training prompts have the id {prompts[i].prompt_id!r}")
        mixed = len(weights or {}) > 1
        sources = [prompts[i].data_source for i in range(len(prompts))] if mixed else []
        self._mixing = Mixing(len(prompts), seed, sources, weights)
        self._curriculum = curriculum
        self._epoch, self._position = -1, 0
        self._order: Indices = np.empty(0, np.int64)
        self._open: dict[int, _Epoch] = {}

    @property
    def given(self) -> int:
        """Prompts passed, over all data epochs: given out, or resting."""
        return self._mixing.start(self._epoch) + self._position if self._epoch >= 0 else 0

    @property
    def _rests(self) -> bool:
        return self._curriculum is not None and self._curriculum.is_on

    def next(self) -> tuple[int, int]:
        """Data epoch and index of the next prompt."""
        while True:
            if self._position == len(self._order):
                self._begin()
            index = int(self._order[self._position])
            self._position += 1
            epoch = self._open[self._epoch]
            slot = epoch.slot(index)
            # Nothing is resolved before its turn, but what rests.
            if slot is not None and not epoch.get(slot):
                return self._epoch, index

    def _begin(self) -> None:
        """The next data epoch."""
        # One with every prompt resolved needs no bits: its groups are known by their number.
        self._open = {e: o for e, o in self._open.items() if not o.is_complete}
        self._start(self._epoch + 1, 0)
        epoch = self._open[self._epoch] = _Epoch(self._order, len(self.prompts))
        if self._curriculum is None or not self._rests:
            return
        turns = self._mixing.turns(self._epoch, self._order)
        for index in self._order[self._curriculum.resting(self._order, turns)]:
            epoch.set(epoch.slot(int(index)), True)

    def group_id(self, epoch: int, index: int) -> str:
        """Name of a group."""
        return f"{epoch}/{self.prompts[index].prompt_id}"

    def resolve(self, epoch: int, index: int) -> None:
        """Close a group; it stays known until its data epoch is complete."""
        self._open[epoch].set(self._open[epoch].slot(index), True)

    def is_resolved(self, group_id: str) -> bool:
        """True for a group that was closed."""
        number, _, prompt_id = group_id.partition("/")
        if not (number.isascii() and number.isdigit() and len(number) < 10) or int(number) > self._epoch:
            return False
        epoch, index = self._open.get(int(number)), self._index.get(prompt_id)
        if epoch is None:
            return True
        slot = epoch.slot(index) if index is not None else None
        return slot is not None and epoch.get(slot)

    def reopen(self, group_id: str) -> tuple[int, int] | None:
        """Undo `resolve`: data epoch and index of the group. None for one that is open or was never given out."""
        number, _, prompt_id = group_id.partition("/")
        if not self.is_resolved(group_id) or prompt_id not in self._index:
            return None
        epoch, index = int(number), self._index[prompt_id]
        if epoch not in self._open:
            # It was complete, and forgotten: all its prompts were resolved.
            order = self._mixing.order(epoch)
            known = _Epoch(order, len(self.prompts), ((1 << len(order)) - 1).to_bytes((len(order) + 7) // 8, "little"))
            if known.slot(index) is None:
                return None
            self._open[epoch] = known
        self._open[epoch].set(self._open[epoch].slot(index), False)
        return epoch, index

    def save(self, spare: int) -> CursorState:
        """All of it, and a reserve: so much may be given out before the next save. spare: prompts that wait anyway."""
        self.saved = self.given + max(0, RESERVE - spare)
        if self._rests:
            # What rests in the next data epoch is found out when it begins, and a later process could not tell it from
            # its own rates: so it is saved before any of it is given out.
            self.saved = min(self.saved, self._mixing.start(self._epoch + 1))
        resolved = {e: bytes(o.bits) for e, o in self._open.items()}
        return CursorState(self._epoch, self._position, self.saved, resolved)

    def load(self, state: CursorState) -> None:
        """Go on from there."""
        self._start(state.epoch, state.position)
        self._open = {e: _Epoch(self._mixing.order(e), len(self.prompts), bits) for e, bits in state.resolved.items()}
        self.saved = state.reserved

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        if epoch >= 0:
            self._order = self._mixing.order(epoch)
