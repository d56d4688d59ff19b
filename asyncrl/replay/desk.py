"""Parked takes: ranks that wait for a take, answered as soon as the queue has one."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl import wire
from asyncrl.replay.queue import ReplayQueue

NOTE_S = 5.0
"""A parked rank is told this often what is missing; its take stays parked."""


@dataclass(slots=True)
class Parked:
    """One waiting rank."""

    request: wire.Take
    told_at: float


class Desk:
    """Waiting ranks by socket identity; a rank waits for one take at a time."""

    def __init__(self, queue: ReplayQueue) -> None:
        self._queue = queue
        self._parked: dict[bytes, Parked] = {}

    def park(self, identity: bytes, request: wire.Take, now: float) -> None:
        """Let a rank wait; a repeated request keeps its place."""
        old = self._parked.get(identity)
        self._parked[identity] = Parked(request, old.told_at if old and old.request == request else now)

    def forget_all_but(self, identities: set[bytes]) -> None:
        """Drop ranks that are gone."""
        self._parked = {i: p for i, p in self._parked.items() if i in identities}

    def answers(self, now: float, note: str) -> list[tuple[bytes, list[wire.Buffer]]]:
        """Replies that are due: whole shards, refusals, and now and then what is missing."""
        out: list[tuple[bytes, list[wire.Buffer]]] = []
        for identity, parked in list(self._parked.items()):
            try:
                frames = self._answer(parked.request)
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

    def _answer(self, request: wire.Take) -> list[wire.Buffer] | None:
        """The shard with the groups' own frames as they were received, or None while there are too few."""
        if not 0 <= request.rank < request.world:
            raise ValueError(f"rank {request.rank} of a world of {request.world}")
        take = self._queue.take(request.take_id, request.update)
        if take is None:
            return None
        shard = self._queue.shard(request.take_id, request.rank, request.world)
        reply = wire.TakeReply(
            request.take_id,
            True,
            "",
            [m for m, _ in shard],
            list(take.bounds),
            [len(entry.payload) - 1 for _, entry in shard],
        )
        return wire.encode(reply, *(buffer for _, entry in shard for buffer in entry.payload[1:]))
