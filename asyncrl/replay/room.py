"""Memory for payloads: never more than capacity_bytes, and the oldest group first.

A finished group for which there is no room is kept by its generator and asked for when there is. Nothing
is lost by that: a generator keeps every group until it is resolved. Pure: `now` is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.replay.exits import Exits
from asyncrl.replay.ledger import Entry, Ledger, State
from asyncrl.replay.limits import Limits
from asyncrl.replay.tally import Tally

ASK_S = 5.0
"""A payload that was asked for and did not come is asked for again after this long."""


@dataclass(slots=True)
class Room:
    """Who may have the room that is left, by the rules of `limits`."""

    limits: Limits
    ledger: Ledger
    tally: Tally
    exits: Exits

    def make(self, entry: Entry) -> bool:
        """Make room for the payload of a kept or taken group. False: there is none yet.

        Younger queued groups go back to their generators, the youngest first; those whose generator died stay, for
        nobody else has them: only a take may push them out, and their prompts are leased again. What older kept
        groups need stays free.
        """
        ledger = self.ledger
        need = entry.size + ledger.num_bytes - self.limits.capacity_bytes
        if entry.state is State.KEPT and ledger.count(State.KEPT) > 1:
            need += sum(e.size for e in self.ledger.of_state(State.KEPT) if e.age < entry.age)
        if need <= 0:
            return True
        queued = ledger.by_age(State.QUEUED)
        if entry.state is State.TAKEN:
            # A take must become whole, if need be at the cost of what nobody else has.
            younger = sorted(queued, key=lambda e: not e.orphan)
        else:
            younger = [e for e in queued if e.age > entry.age and not e.orphan]
        if sum(e.num_bytes for e in younger) < need:
            return False
        for e in reversed(younger):
            if need <= 0:
                break
            need -= e.num_bytes
            if e.orphan:
                self.exits.lose(e)
            else:
                ledger.keep(e)
                self.tally.count("no_room")
        return True

    def ask(self, now: float) -> list[tuple[str, str]]:
        """(sender, group id) of kept groups that have room now and are to be sent, oldest first."""
        if not self.ledger.count(State.KEPT):
            return []
        out = []
        finished = [e for e in self.ledger.by_age(State.KEPT, State.QUEUED) if not e.orphan]
        # All but takes and only copies is for the oldest; younger groups in the queue would have to leave.
        left = self.limits.capacity_bytes - self.ledger.num_bytes + sum(e.num_bytes for e in finished)
        for e in finished:
            left -= e.size
            if left < 0:
                break
            if e.state is State.KEPT and (e.told_at is None or now - e.told_at >= ASK_S):
                e.asked_at = now if e.asked_at is None else e.asked_at
                e.told_at = now
                out.append((e.sender, e.group_id))
        return out

    def overdue(self, now: float, limit_s: float) -> list[Entry]:
        """Kept groups that were asked for and did not come for longer than limit_s: nobody has them any more."""
        kept = self.ledger.of_state(State.KEPT) if self.ledger.count(State.KEPT) else []
        return [e for e in kept if e.asked_at is not None and now - e.asked_at >= limit_s]
