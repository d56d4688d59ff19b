"""Parked takes: ranks that wait for a take, answered as soon as the queue has one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from asyncrl import wire
from asyncrl.replay.queue import ReplayQueue

NOTE_S = 5.0
"""A parked rank is told this often what is missing; its take stays parked."""
PROBE_BATCH = -1
"""The batch of groups that are scored and never trained (wire.TakeReply)."""
PATIENCE_S = 10.0
"""After a restart: how long a rank whose groups are lost waits for the others to ask for the same take."""


@dataclass(slots=True)
class Parked:
    """One waiting rank."""

    request: wire.Take
    since: float
    told_at: float


class Desk:
    """Waiting ranks by socket identity; a rank waits for one take at a time."""

    def __init__(self, queue: ReplayQueue) -> None:
        self._queue = queue
        self._parked: dict[bytes, Parked] = {}
        self._given: tuple[int, set[int]] = (-1, set())
        self._looked_at: float | None = None
        self.waited: defaultdict[str, float] = defaultdict(float)
        """Seconds that rank 0 waited for takes, by what was missing (`ReplayQueue.lacks`)."""

    @property
    def waits(self) -> bool:
        """True while a rank waits for its take."""
        return bool(self._parked)

    def park(self, identity: bytes, request: wire.Take, now: float) -> None:
        """Let a rank wait; a repeated request keeps its place."""
        old = self._parked.get(identity)
        if old is None or old.request != request:
            self._parked[identity] = Parked(request, now, now)

    def clear(self) -> None:
        """Another learner: the takes that ranks of the one before had or wait for are void."""
        self._parked.clear()
        self._given = (-1, set())
        self._queue.quarantine.forget_takes()

    def forget_all_but(self, identities: set[bytes]) -> None:
        """Drop ranks that are gone."""
        self._parked = {i: p for i, p in self._parked.items() if i in identities}

    def answers(self, now: float, note: str) -> list[tuple[bytes, list[wire.Buffer]]]:
        """Replies that are due: whole shards, refusals, and now and then what is missing."""
        out: list[tuple[bytes, list[wire.Buffer]]] = []
        before, self._looked_at = self._looked_at, now
        for identity, parked in list(self._parked.items()):
            if parked.request.rank == 0:
                # What was missing when it was looked for last is what the time since then was lost to.
                self.waited[self._queue.lacks] += now - max(parked.since, before if before is not None else now)
            try:
                frames = self._answer(parked.request, parked.since, now)
            except ValueError as exc:
                frames = wire.encode(wire.Refused(str(exc)))
            if frames is not None:
                del self._parked[identity]
                out.append((identity, frames))
            elif now - parked.told_at >= NOTE_S:
                parked.told_at = now
                waiting = f"{self._queue.waiting}; {note}"
                out.append((identity, wire.encode(wire.TakeReply(parked.request.take_id, False, waiting, [], [], []))))
        return out

    def _answer(self, request: wire.Take, since: float, now: float) -> list[wire.Buffer] | None:
        """The shard with the groups' own frames as they were received, or None while there are too few."""
        if not 0 <= request.rank < request.world:
            raise ValueError(f"rank {request.rank} of a world of {request.world}")
        if request.update > self._queue.clock.update:
            # Nothing may be made or evicted for it before rank 0 has committed.
            self._queue.waiting, self._queue.lacks = f"the commit of update {self._queue.clock.update}", "commit"
            return None
        take = self._queue.take(request.take_id, request.update, now)
        if take is None or not self._whole(request, now - since):
            return None
        if self._given[0] != request.take_id:
            self._given = (request.take_id, set())
        self._given[1].add(request.rank)
        shard = [(m, e.payload) for m, e in self._queue.shard(request.take_id, request.rank, request.world)]
        if request.rank == 0:
            shard += [(PROBE_BATCH, payload) for payload in self._queue.quarantine.ride(request.take_id)]
        reply = wire.TakeReply(
            request.take_id,
            True,
            "",
            [m for m, _ in shard],
            list(take.bounds),
            [len(payload) - 1 for _, payload in shard],
            take.tuned,
            take.coming,
        )
        return wire.encode(reply, *(buffer for _, payload in shard for buffer in payload[1:]))

    def _whole(self, request: wire.Take, waited: float) -> bool:
        """True when every payload of this rank's shard is here.

        One that is not was received by an earlier process, and its generator sends it again. When the
        generator is gone as well: nobody has the take if every rank asks for it, so it is made anew.
        Otherwise other ranks hold their shards already, and this one goes without what is lost.
        """
        queue, take_id = self._queue, request.take_id
        missing = [e for _, e in queue.shard(take_id, request.rank, request.world) if not e.payload]
        if not missing:
            return True
        queue.waiting, queue.lacks = f"{len(missing)} groups of take {take_id} to be sent again", "sent_again"
        if any(queue.recovery.expects(e.group_id) for e in missing):
            return False
        asking = {p.request.rank for p in self._parked.values() if p.request.take_id == take_id}
        given = self._given[1] if self._given[0] == take_id else set()
        if len(asking) == request.world and not given:
            queue.dissolve(take_id)
        elif waited >= PATIENCE_S:
            for entry in missing:
                queue.give_up(entry)
            return True
        return False
