"""Which group is where: every open group is pending, leased, kept, queued or taken; every other is resolved.

Moves and totals go through here only, so the number of groups in flight cannot drift from the truth.
Knows no version and no age.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.arrays import Buffer
from asyncrl.replay.curriculum import Curriculum, CurriculumState
from asyncrl.replay.cursor import Cursor, CursorState
from asyncrl.replay.digest import GroupDigest
from asyncrl.replay.tally import Tally
from asyncrl.types import Prompt, Version


class State(enum.StrEnum):
    """Where an open group is."""

    PENDING = "pending"  # waits to be leased again
    LEASED = "leased"
    KEPT = "kept"  # finished, but its generator keeps the payload: there was no room
    QUEUED = "queued"
    TAKEN = "taken"  # in a take, not yet committed


@dataclass(frozen=True, slots=True)
class Lease:
    """A prompt given to a generator that held `version`, until `expires` (seconds of the caller's clock).

    seq: of the Leases that it travelled in; 0 when the generator had it before.
    """

    lease_id: str
    group_id: str
    attempt: int
    prompt: Prompt
    generator_id: str
    version: Version
    expires: float
    seq: int = 0


@dataclass(slots=True)
class Entry:
    """One open group. attempt counts its leases; results of attempts below min_attempt are void.

    restored: an earlier process opened it, and may have leased it oftener than it could save. num_bytes is what
    its payload takes here now, size what it takes when it is here. asked_at, told_at: when a kept payload was asked for
    first and last. orphan: its generator died, so the payload here is the only copy. excused: attempts that do not
    count against max_attempts. late: the last attempt of each generator that lost its lease and may yet answer.
    """

    @property
    def age(self) -> tuple[Version, int]:
        """Sorts finished groups, the oldest first: lowest token version, then arrival."""
        assert self.digest is not None
        return self.digest.oldest, self.arrived

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
    size: int = 0
    sender: str = ""
    arrived: int = 0
    take_id: int = -1
    restored: bool = False
    asked_at: float | None = None
    told_at: float | None = None
    orphan: bool = False
    excused: int = 0
    late: dict[str, int] = field(default_factory=dict)


class Taken(NamedTuple):
    """What the disk knows of a group in a take: all but its payload."""

    take_id: int
    sender: str
    digest: GroupDigest


class Open(NamedTuple):
    """An open group on disk. Leases and queued results are not kept: their generators have them."""

    data_epoch: int
    prompt: int
    attempt: int
    min_attempt: int
    excused: int
    taken: Taken | None


class LedgerState(NamedTuple):
    """A ledger on disk."""

    cursor: CursorState
    largest_bytes: int
    open: list[Open]
    curriculum: CurriculumState = CurriculumState()


class Ledger:
    """All groups, by id `<data epoch>/<prompt id>`, in the order of the cursor."""

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, weights: Mapping[str, float] | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:  # fmt: skip
        self.prompts = prompts
        self.curriculum = curriculum or Curriculum(len(prompts), None, Tally())
        self.cursor = Cursor(prompts, seed, weights, self.curriculum)
        self.entries: dict[str, Entry] = {}
        self.pending: dict[str, Entry] = {}
        self._fresh: dict[str, Entry] = {}
        self.num_bytes = 0
        self.kept_bytes = 0
        self.largest_bytes = 0
        self.moves = 0
        """Changes of state so far: what depends on states only is the same while this is."""
        self._counts: Counter[State] = Counter()
        self._arrivals = 0

    def count(self, state: State) -> int:
        """Groups in a state."""
        return self._counts[state]

    @property
    def in_flight(self) -> int:
        """Groups leased, kept, queued or taken and not yet resolved: `a` of the admission rule."""
        return len(self.entries) - self._counts[State.PENDING]

    def of_state(self, state: State) -> list[Entry]:
        """Entries in a state."""
        return [e for e in self.entries.values() if e.state is state]

    def by_age(self, *states: State) -> list[Entry]:
        """Finished groups, the oldest first."""
        return sorted((e for e in self.entries.values() if e.state in states), key=lambda e: e.age)

    def next_entry(self) -> Entry:
        """The group to lease next: one that must be leased again, else the next prompt.

        In this order, so that not more groups are ever out than the admission rule allows at once.
        """
        for waiting in (self.pending, self._fresh):
            if waiting:
                return next(iter(waiting.values()))
        return self._open(*self.cursor.next())

    def move(self, entry: Entry, state: State) -> None:
        """Change an entry's state. The payload is dropped on the way back to pending."""
        self.moves += 1
        self._counts[entry.state] -= 1
        self._counts[state] += 1
        self.kept_bytes += entry.size * ((state is State.KEPT) - (entry.state is State.KEPT))
        self.pending.pop(entry.group_id, None)
        self._fresh.pop(entry.group_id, None)
        entry.state = state
        if state is not State.LEASED:
            entry.lease = None
        if state is State.PENDING:
            self.pending[entry.group_id] = entry
            self._forget_payload(entry)

    def finish(self, entry: Entry, digest: GroupDigest, size: int, sender: str) -> None:
        """A result of that many bytes came; `store` holds its payload, until then its generator keeps it."""
        self._arrivals += 1
        entry.digest, entry.size, entry.sender, entry.arrived = digest, size, sender, self._arrivals
        self.largest_bytes = max(self.largest_bytes, size)
        self.move(entry, State.KEPT)

    def store(self, entry: Entry, payload: Sequence[Buffer]) -> None:
        """Put the payload of a kept group into the queue."""
        assert entry.state is State.KEPT
        self._hold(entry, payload)
        self.move(entry, State.QUEUED)

    def keep(self, entry: Entry) -> None:
        """Let go of the payload of a queued group: its generator keeps it."""
        assert entry.state is State.QUEUED
        self._let_go(entry)
        self.move(entry, State.KEPT)

    def resolve(self, entry: Entry) -> None:
        """Close a group for good."""
        self.moves += 1
        self.kept_bytes -= entry.size * (entry.state is State.KEPT)
        self._forget_payload(entry)
        self._counts[entry.state] -= 1
        self.pending.pop(entry.group_id, None)
        self._fresh.pop(entry.group_id, None)
        del self.entries[entry.group_id]
        self.cursor.resolve(entry.data_epoch, entry.index)

    def reopen(self, group_id: str) -> bool:
        """Open a closed group once more, to be leased from its first attempt on. False for any other."""
        found = self.cursor.reopen(group_id)
        if found is not None:
            # Leased before, and results of then may still come: as good as what an earlier process gave out.
            self._open(*found).restored = True
        return found is not None

    def is_resolved(self, group_id: str) -> bool:
        """True for a group that was open once and is not any more."""
        return self.cursor.is_resolved(group_id)

    def refill(self, entry: Entry, payload: Sequence[Buffer]) -> None:
        """The payload of a group in a take came again."""
        assert entry.state is State.TAKEN and not entry.payload
        self._hold(entry, payload)

    def save(self) -> LedgerState:
        """Every open group, and the cursor with its reserve."""
        opened = [
            Open(e.data_epoch, e.index, e.attempt, e.min_attempt, e.excused, _taken(e)) for e in self.entries.values()
        ]
        cursor = self.cursor.save(self._counts[State.PENDING])
        return LedgerState(cursor, self.largest_bytes, opened, self.curriculum.save())

    def load(self, state: LedgerState) -> None:
        """Go on from there: what is not in a take waits to be leased or claimed, also what was only reserved."""
        assert not self.entries
        self.curriculum.load(state.curriculum)
        self.cursor.load(state.cursor)
        self.largest_bytes = state.largest_bytes
        for o in state.open:
            entry = self._open(o.data_epoch, o.prompt)
            entry.attempt, entry.min_attempt, entry.excused = o.attempt, o.min_attempt, o.excused
            if o.taken is not None:
                entry.digest, entry.sender = o.taken.digest, o.taken.sender
                self.move(entry, State.TAKEN)
                entry.take_id = o.taken.take_id
        while self.cursor.given < state.cursor.reserved:
            self._open(*self.cursor.next())
        self._fresh = {i: e for i, e in self.pending.items() if e.attempt == 0}
        self.pending = {i: e for i, e in self.pending.items() if e.attempt > 0}
        for entry in self.entries.values():
            entry.restored = True

    def _open(self, data_epoch: int, index: int) -> Entry:
        entry = Entry(self.cursor.group_id(data_epoch, index), index, data_epoch)
        assert entry.group_id not in self.entries
        self.entries[entry.group_id] = self.pending[entry.group_id] = entry
        self._counts[State.PENDING] += 1
        return entry

    def _hold(self, entry: Entry, payload: Sequence[Buffer]) -> None:
        entry.payload, entry.num_bytes = tuple(payload), num_bytes(payload)
        entry.asked_at = entry.told_at = None
        entry.orphan = False
        self.num_bytes += entry.num_bytes

    def _let_go(self, entry: Entry) -> None:
        self.num_bytes -= entry.num_bytes
        entry.payload, entry.num_bytes = (), 0

    def _forget_payload(self, entry: Entry) -> None:
        self._let_go(entry)
        entry.digest, entry.take_id, entry.size = None, -1, 0
        entry.asked_at = entry.told_at = None
        entry.orphan = False


def lease_id_of(group_id: str, attempt: int) -> str:
    """The name of a group's lease on the wire."""
    return f"{group_id}#{attempt}"


def num_bytes(payload: Sequence[Buffer]) -> int:
    """Size of a group's frames, the word for their kind included."""
    return sum(map(len, payload))


def _taken(entry: Entry) -> Taken | None:
    if entry.state is not State.TAKEN:
        return None
    assert entry.digest is not None
    return Taken(entry.take_id, entry.sender, entry.digest)
