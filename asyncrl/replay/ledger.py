"""Which group is where: every open group is pending, leased, queued or taken; every other is resolved.

Moves and totals go through here only, so the number of groups in flight cannot drift from the truth.
Knows no version and no age.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.arrays import Buffer
from asyncrl.errors import TaskError
from asyncrl.replay.digest import GroupDigest
from asyncrl.types import Prompt, Version


class State(enum.StrEnum):
    """Where an open group is."""

    PENDING = "pending"  # waits to be leased again
    LEASED = "leased"
    QUEUED = "queued"
    TAKEN = "taken"  # in a take, not yet committed


@dataclass(frozen=True, slots=True)
class Lease:
    """A prompt given to a generator that held `version`, until `expires` (seconds of the caller's clock)."""

    lease_id: str
    group_id: str
    attempt: int
    prompt: Prompt
    generator_id: str
    version: Version
    expires: float


@dataclass(slots=True)
class Entry:
    """One open group. attempt counts its leases; results of attempts below min_attempt are void."""

    group_id: str
    index: int
    data_epoch: int
    state: State = State.PENDING
    attempt: int = 0
    min_attempt: int = 1
    lease: Lease | None = None
    digest: GroupDigest | None = None
    payload: tuple[Buffer, ...] = ()
    num_bytes: int = 0
    sender: str = ""
    arrived: int = 0
    take_id: int = -1


class Ledger:
    """All groups, by id `<data epoch>/<prompt id>`; walks the prompts in a seeded order per data epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not len(prompts):
            raise TaskError("the task has no training prompts")
        self.prompts = prompts
        self.entries: dict[str, Entry] = {}
        self.pending: dict[str, Entry] = {}
        self.num_bytes = 0
        self.largest_bytes = 0
        self._seed = seed
        self._data_epoch, self._position = -1, len(prompts)
        self._order: NDArray[np.int64] = np.empty(0, np.int64)
        self._counts: Counter[State] = Counter()
        self._resolved: dict[int, set[str]] = {}
        self._arrivals = 0

    def count(self, state: State) -> int:
        """Groups in a state."""
        return self._counts[state]

    @property
    def in_flight(self) -> int:
        """Groups leased, queued or taken and not yet resolved: `a` of the admission rule."""
        return len(self.entries) - self._counts[State.PENDING]

    def of_state(self, state: State) -> list[Entry]:
        """Entries in a state."""
        return [e for e in self.entries.values() if e.state is state]

    def next_entry(self) -> Entry:
        """The group to lease next: one that must be leased again, else the next prompt."""
        if self.pending:
            return next(iter(self.pending.values()))
        if self._position == len(self.prompts):
            self._data_epoch += 1
            self._position = 0
            self._order = np.random.default_rng([self._seed, self._data_epoch]).permutation(len(self.prompts))
            # An epoch with every prompt resolved needs no ids: its groups are known by their number.
            self._resolved = {e: ids for e, ids in self._resolved.items() if len(ids) < len(self.prompts)}
            self._resolved[self._data_epoch] = set()
        index = int(self._order[self._position])
        self._position += 1
        group_id = f"{self._data_epoch}/{self.prompts[index].prompt_id}"
        if group_id in self.entries or self.is_resolved(group_id):
            raise TaskError(f"two training prompts have the id {self.prompts[index].prompt_id!r}")
        entry = Entry(group_id, index, self._data_epoch)
        self.entries[group_id] = self.pending[group_id] = entry
        self._counts[State.PENDING] += 1
        return entry

    def move(self, entry: Entry, state: State) -> None:
        """Change an entry's state. The payload is dropped on the way back to pending."""
        self._counts[entry.state] -= 1
        self._counts[state] += 1
        self.pending.pop(entry.group_id, None)
        entry.state = state
        if state is not State.LEASED:
            entry.lease = None
        if state is State.PENDING:
            self.pending[entry.group_id] = entry
            self._forget_payload(entry)

    def store(self, entry: Entry, digest: GroupDigest, payload: Sequence[Buffer], sender: str) -> None:
        """Put a result into the queue."""
        self._arrivals += 1
        entry.digest, entry.payload, entry.sender, entry.arrived = digest, tuple(payload), sender, self._arrivals
        entry.num_bytes = sum(len(b) for b in payload)
        self.num_bytes += entry.num_bytes
        self.largest_bytes = max(self.largest_bytes, entry.num_bytes)
        self.move(entry, State.QUEUED)

    def resolve(self, entry: Entry) -> None:
        """Close a group for good; its id stays known until its data epoch is complete."""
        self._forget_payload(entry)
        self._counts[entry.state] -= 1
        self.pending.pop(entry.group_id, None)
        del self.entries[entry.group_id]
        self._resolved[entry.data_epoch].add(entry.group_id)

    def is_resolved(self, group_id: str) -> bool:
        """True for a group that was open once and is not any more."""
        number = group_id.partition("/")[0]
        if not (number.isascii() and number.isdigit() and len(number) < 10) or int(number) > self._data_epoch:
            return False
        ids = self._resolved.get(int(number))
        return ids is None or group_id in ids

    def _forget_payload(self, entry: Entry) -> None:
        self.num_bytes -= entry.num_bytes
        entry.payload, entry.num_bytes, entry.digest, entry.take_id = (), 0, None, -1
