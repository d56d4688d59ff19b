"""Which prompts rest: those whose newest group was hardly ever, or nearly always, solved. Pure.

The solve rate of a prompt is the mean reward of its newest group that came in, whether it was trained or had equal
rewards. What rests is given out only in every rest-th of the data epochs that have it.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.replay.mixing import Indices
from asyncrl.replay.tally import Tally

log = logging.getLogger(__name__)


class Bounds(NamedTuple):
    """Rates at or beyond which a prompt rests, and the data epochs of which it is given out in one."""

    low: float
    high: float
    rest: int


class CurriculumState(NamedTuple):
    """A curriculum on disk: float32 rates (NaN: unknown) and int32 updates, little-endian, one of each per prompt."""

    rates: bytes = b""
    updates: bytes = b""


class Curriculum:
    """Solve rates of num_prompts prompts; bounds None is off. What rests is counted."""

    def __init__(self, num_prompts: int, bounds: Bounds | None, tally: Tally) -> None:
        self._num, self._bounds, self._tally = num_prompts if bounds else 0, bounds, tally
        self.rates: NDArray[np.float32] = np.full(self._num, np.nan, np.float32)
        self._updates = np.zeros(self._num, np.int32)
        self._num_useless = 0

    @property
    def is_on(self) -> bool:
        """True when prompts may rest."""
        return self._bounds is not None

    def note(self, index: int, rate: float, update: int) -> None:
        """The newest group of a prompt had that mean reward; update: of its newest version."""
        if self._bounds is not None:
            # A huge mean says no more than the largest bound.
            self.rates[index], self._updates[index] = min(2.0, max(-1.0, rate)), update

    def roll_back(self, update: int) -> None:
        """The learner went back: what was measured under later versions is unknown again."""
        self.rates[self._updates > update] = np.nan

    def resting(self, index: Indices, turns: Indices) -> NDArray[np.bool_]:
        """Which of a data epoch's prompts rest in it, bool [len(index)]; turns: data epochs that had them before.

        Never all of them: then none rests, and the log says so, the first time and at each doubling of it.
        """
        if self._bounds is None:
            return np.zeros(len(index), bool)
        rates, (low, high, rest) = self.rates[index], self._bounds
        with np.errstate(invalid="ignore"):
            # By their number, so that every data epoch has its part of what rests.
            rests: NDArray[np.bool_] = ((rates <= np.float32(low)) | (rates >= np.float32(high))) & (
                (turns + index) % rest != 0
            )
        if rests.all():
            self._num_useless += 1
            if self._num_useless & (self._num_useless - 1) == 0:
                log.warning(
                    "all %d prompts of a data epoch would rest by task.curriculum, so none does (%d so far): every one "
                    "is hardly ever or nearly always solved; train on others", len(index), self._num_useless,
                )  # fmt: skip
            return np.zeros(len(index), bool)
        self._tally.count("curriculum", int(rests.sum()))
        return rests

    def save(self) -> CurriculumState:
        """All of it."""
        return CurriculumState(self.rates.astype("<f4").tobytes(), self._updates.astype("<i4").tobytes())

    def load(self, state: CurriculumState) -> None:
        """Go on from there. A state of another number of prompts, or of none, leaves every rate unknown."""
        if len(state.rates) == 4 * self._num and len(state.updates) == 4 * self._num:
            self.rates = np.frombuffer(state.rates, "<f4").astype(np.float32)
            self._updates = np.frombuffer(state.updates, "<i4").astype(np.int32)
