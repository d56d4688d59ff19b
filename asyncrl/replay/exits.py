"""Every way in which a group leaves: evicted, leased again, given up, committed. Each is counted.

Also remembers who must be told: senders whose group is resolved, generators whose lease is useless.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from asyncrl.replay.clock import Clock
from asyncrl.replay.digest import GroupDigest
from asyncrl.replay.ledger import Entry, Ledger, State
from asyncrl.replay.limits import Limits
from asyncrl.replay.tally import Tally

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Exits:
    """The moves out of the ledger, by the rules of `limits`."""

    limits: Limits
    clock: Clock
    ledger: Ledger
    tally: Tally
    resolved: list[tuple[str, str]] = field(default_factory=list)
    """(sender, group id) of results that need not be kept any more."""
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    """(generator, lease id) of leases that became useless."""

    def evict_old(self, update: int) -> None:
        """Evict what no update from `update` on may use; cancel leases that can only become that."""
        m = self.limits
        for entry in [*self.ledger.of_state(State.QUEUED), *self.ledger.of_state(State.KEPT)]:
            assert entry.digest is not None
            if any(self.clock.lost(v) for v in entry.digest.versions):
                self.evict(entry, "lost_version")
            elif entry.digest.last_update(m.stale, m.max_lag) < update:
                self.evict(entry, "stale")
        for entry in self.ledger.of_state(State.LEASED):
            assert entry.lease is not None
            lost = self.clock.lost(entry.lease.version)
            # Under evict and wait one old token is enough, and the first token was sampled under this version.
            if lost or (m.stale != "mask" and entry.lease.version.update + m.max_lag < update):
                self.tally.count("lost_version" if lost else "doomed_lease")
                entry.excused += lost
                self.cancel(entry)
                self.give_back(entry)

    def bar(self, generator_id: str) -> None:
        """Nothing of a generator is used but what is in a take: its leases end, its finished groups are evicted."""
        for entry in self.ledger.of_state(State.LEASED):
            if entry.lease is not None and entry.lease.generator_id == generator_id:
                self.tally.count("quarantined")
                # Also a result that is on its way must not come in.
                entry.min_attempt, entry.excused = entry.lease.attempt + 1, entry.excused + 1
                self.cancel(entry)
                self.give_back(entry)
        for entry in [*self.ledger.of_state(State.QUEUED), *self.ledger.of_state(State.KEPT)]:
            if entry.sender == generator_id:
                self.evict(entry, "quarantined")
        for entry in self.ledger.entries.values():
            # It may sample those still, and send them when it is in again.
            entry.min_attempt = max(entry.min_attempt, entry.late.pop(generator_id, 0) + 1)

    def evict(self, entry: Entry, reason: str) -> None:
        """A finished group goes untrained; its prompt is leased again or, if it is stale, goes as on_evict says."""
        d = entry.digest
        assert d is not None and entry.state in (State.QUEUED, State.KEPT)
        self.resolved.append((entry.sender, entry.group_id))
        self.age_out(entry, d, reason)

    def age_out(self, entry: Entry, d: GroupDigest, reason: str) -> None:
        """The same for a result that never entered the queue."""
        self.tally.count(reason)
        if reason != "quarantined":
            self.tally.leave_out(d, self.clock.update)  # those are what age costs
        # A late copy of this result must not come back in.
        entry.min_attempt = d.attempt + 1
        # That a learner went back, or a generator was faulty, says nothing about the prompt: it costs the epoch none.
        lost = reason in ("lost_version", "quarantined")
        entry.excused += lost
        if self.limits.on_evict == "drop" and not lost:
            self._give_up(entry, reason)
        else:
            self.give_back(entry)

    def give_back(self, entry: Entry) -> None:
        """Lease the prompt again, unless it had all its attempts.

        An attempt that died with its generator counts: the prompt may be what kills it.
        """
        if entry.attempt - entry.excused >= self.limits.max_attempts:
            self.drop(entry, "max_attempts")
        else:
            self.ledger.move(entry, State.PENDING)

    def outlast(self, entry: Entry, reason: str) -> None:
        """A lease ends, though its generator may sample it still: a late result is welcome once."""
        self.tally.count(reason)
        if entry.lease is not None:
            entry.late[entry.lease.generator_id] = entry.lease.attempt
        self.give_back(entry)

    def lose(self, entry: Entry) -> None:
        """Nobody has the payload of this group any more: lease the prompt again."""
        self.tally.count("lost_payload")
        self.give_back(entry)

    def drop(self, entry: Entry, reason: str) -> None:
        """Give a prompt up for good."""
        self.tally.count(reason)
        self._give_up(entry, reason)

    def _give_up(self, entry: Entry, reason: str) -> None:
        # Equal rewards are ordinary; every other reason costs a prompt that could have taught something.
        level = logging.DEBUG if reason == "zero_variance" else logging.WARNING
        log.log(level, "group %s dropped (%s) after %d attempts", entry.group_id, reason, entry.attempt)
        self.tally.drop(entry.group_id, reason)
        self.ledger.resolve(entry)

    def resolve(self, entry: Entry) -> None:
        """Close a group and tell whoever keeps its result."""
        if entry.state in (State.QUEUED, State.KEPT, State.TAKEN):
            self.resolved.append((entry.sender, entry.group_id))
        self.ledger.resolve(entry)

    def cancel(self, entry: Entry, but: int = 0) -> None:
        """Tell the generator that samples this group to stop, unless it is attempt `but`."""
        if entry.lease is not None and entry.lease.attempt != but:
            self.cancelled.append((entry.lease.generator_id, entry.lease.lease_id))
