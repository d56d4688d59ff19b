"""Which groups make a take, how it is cut into batches, and each rank's shard. Pure functions of values.

G groups per batch, M batches. Batch m trains update u + m.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.replay.ledger import Entry
from asyncrl.wire import Tuned

KEPT_TAKES = 64


class Take(NamedTuple):
    """A frozen take: batches[m] are the group ids for update + m, bounds[m] its lowest usable update.

    tokens[m] are the sizes of batches[m]: they decide which rank gets what, whatever became of the groups since.
    tuned and coming: the live settings in force, and the newest ones then.
    """

    take_id: int
    update: int
    batches: tuple[tuple[str, ...], ...]
    bounds: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    tuned: Tuned = Tuned()
    coming: Tuned = Tuned()

    def part(self, batch: int, rank: int, world: int) -> set[str]:
        """Group ids of one rank's part of a batch."""
        sizes = list(zip(self.batches[batch], self.tokens[batch], strict=True))
        return set(balance(sizes, world)[rank])


class Takes:
    """Frozen takes by id. Every id up to `retired` is over: whoever still names one repeats itself."""

    def __init__(self) -> None:
        self.by_id: dict[int, Take] = {}
        self.retired = -1

    def find(self, take_id: int, update: int, clock: int) -> Take | None:
        """The take of that id, None when it is to be made. ValueError for one that contradicts what was."""
        take = self.by_id.get(take_id)
        if take is not None and take.update != update:
            raise ValueError(f"take {take_id} was made for update {take.update}, not {update}")
        if take is None and (take_id <= self.retired or update < clock):
            raise ValueError(f"take {take_id} for update {update} is over, the clock is at {clock}")
        return take

    def check_commit(self, take_id: int, update: int, clock: int) -> None:
        """ValueError when no batch of that take can bring the learner's clock to `update`.

        A take that is over can only be committed again, by a learner that did not hear the answer.
        """
        take = self.by_id.get(take_id)
        if take is None and not 0 <= take_id <= self.retired:
            raise ValueError(f"commit of take {take_id}, which was never made")
        last = take.update + len(take.batches) if take is not None else clock
        if update > last:
            raise ValueError(f"commit of take {take_id} at update {update}; after it the clock is at most {last}")

    def max_lag(self, take_id: int, otherwise: int) -> int:
        """The max_lag under which that take was frozen; `otherwise` for one that is over."""
        take = self.by_id.get(take_id)
        return take.update - take.bounds[0] if take is not None else otherwise

    def add(self, take: Take) -> None:
        """Remember a take; the oldest of many are retired."""
        self.by_id[take.take_id] = take
        while len(self.by_id) > KEPT_TAKES:
            self.retired = next(iter(self.by_id))
            del self.by_id[self.retired]

    def shard(self, take_id: int, rank: int, world: int, entries: Mapping[str, Entry]) -> list[tuple[int, Entry]]:
        """`ReplayQueue.shard` of these open groups."""
        if not 0 <= rank < world <= 2**16:
            raise ValueError(f"rank {rank} of a world of {world}")
        take = self.by_id[take_id]
        out: list[tuple[int, Entry]] = []
        for m, ids in enumerate(take.batches):
            mine = take.part(m, rank, world)
            found = [e for i in ids if i in mine and (e := entries.get(i)) is not None]
            out += [(m, e) for e in found if e.take_id == take_id]
        return out

    def save(self, taken: Collection[int]) -> tuple[list[Take], int]:
        """Takes of which groups are not committed yet (`taken`), and what is retired without the others."""
        retired = max([self.retired, *(set(self.by_id) - set(taken))])
        return [t for t in self.by_id.values() if t.take_id in taken], retired


class Candidate(NamedTuple):
    """A queued group and the last update that may use it."""

    group_id: str
    last_update: int


def select(
    ordered: Sequence[Candidate], update: int, num_batches: int, batch_groups: int
) -> tuple[list[Candidate], list[str]]:
    """The first G * M groups, in the given order, that can all be used in time; and those that cannot.

    A group whose last update is update + k must fit into batches 0..k together with the others of
    that kind chosen before it. One that does not is late for every batch it could still be in.
    """
    chosen: list[Candidate] = []
    late: list[str] = []
    filled = [0] * num_batches
    for candidate in ordered:
        if len(chosen) == batch_groups * num_batches:
            break
        last = min(candidate.last_update - update, num_batches - 1)
        if last < 0 or any(filled[k] == (k + 1) * batch_groups for k in range(last, num_batches - 1)):
            late.append(candidate.group_id)
            continue
        for k in range(last, num_batches):
            filled[k] += 1
        chosen.append(candidate)
    return chosen, late


def cut(
    chosen: Sequence[Candidate], update: int, num_batches: int, batch_groups: int, seed: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """Shuffle (M > 1) and cut into batches so that no group is later than its last update.

    Filled from the last batch backwards with the first shuffled groups that may be in it: a uniform
    shuffle when all may be anywhere, and always possible for what `select` chose.
    """
    if num_batches == 1:
        return (tuple(c.group_id for c in chosen),)
    pool = [chosen[i] for i in np.random.default_rng(list(seed)).permutation(len(chosen))]
    batches: list[tuple[str, ...]] = []
    for m in reversed(range(num_batches)):
        fit = [c for c in pool if c.last_update >= update + m][:batch_groups]
        assert len(fit) == batch_groups, "select() chose groups that cannot all be used in time"
        batches.append(tuple(c.group_id for c in fit))
        used = set(batches[-1])
        pool = [c for c in pool if c.group_id not in used]
    return tuple(reversed(batches))


def balance(tokens: Sequence[tuple[str, int]], world: int) -> list[list[str]]:
    """Whole groups to ranks: largest first, each to the rank with the fewest tokens so far.

    Deterministic in the set of (group id, tokens), whatever their order; ranks may stay empty.
    """
    shards: list[list[str]] = [[] for _ in range(world)]
    load = [0] * world
    for group_id, size in sorted(tokens, key=lambda t: (-t[1], t[0])):
        rank = min(range(world), key=lambda r: (load[r], len(shards[r]), r))
        shards[rank].append(group_id)
        load[rank] += size
    return shards
