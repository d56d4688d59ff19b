"""Probes of generators in quarantine, as they pass through the queue: leased, given back, received. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.arrays import Buffer
from asyncrl.replay.clock import Clock
from asyncrl.replay.intake import Intake, Put
from asyncrl.replay.ledger import Lease, num_bytes
from asyncrl.replay.quarantine import PROBE, Quarantine
from asyncrl.replay.saved import Grant
from asyncrl.replay.tally import Tally
from asyncrl.types import Version
from asyncrl.wire import GroupHead


def is_probe(name: str) -> bool:
    """True for a group id or lease id of a probe."""
    return name.startswith(PROBE)


def no_probes(ids: Iterable[str]) -> list[str]:
    """The other ones."""
    return [i for i in ids if not is_probe(i)]


@dataclass(slots=True)
class Probes:
    """The queue's part of it, by the rules of the intake."""

    quarantine: Quarantine
    clock: Clock
    tally: Tally
    intake: Intake

    def grant(self, generator_id: str, held: Version, want: int, now: float, seq: int, wait: bool) -> Grant:
        """What a generator in quarantine gets: leases of a probe, when it is time for one. wait: not now."""
        leases: list[Lease] = []
        if not wait:
            leases = self.quarantine.lease(generator_id, held, self.clock.newest, want, now, seq)
        idle = self.quarantine.refusal() if len(leases) < want else ""
        if idle:
            self.tally.idle[idle] += 1
        return Grant(leases, idle)

    def withdraw(self, leases: Iterable[Lease]) -> None:
        """Leases that never reached their generator, of probes or not."""
        for lease in leases:
            if is_probe(lease.group_id):
                self.quarantine.lost(lease.generator_id)

    def fail(self, generator_id: str, lease_id: str, reason: str) -> bool:
        """A lease of a probe came back. False when it is not awaited."""
        if not self.quarantine.samples(generator_id, lease_id):
            return False
        self.tally.count_foreign("failed", reason)
        self.quarantine.lost(generator_id)
        return True

    def put(self, group: GroupHead, payload: Sequence[Buffer], sender: str) -> Put:
        """An answer to a probe; its generator need not keep it: a probe that is lost is made anew."""
        if self.quarantine.expects(sender, group):
            if self.intake.refused(group, sender) or self._too_large(payload):
                self.quarantine.lost(sender)
            else:
                self.quarantine.put(sender, group, payload)
        return Put("resolved")

    def _too_large(self, payload: Sequence[Buffer]) -> bool:
        large = num_bytes(payload) > self.intake.limits.share_bytes
        if large:
            self.tally.count("too_large")
        return large
