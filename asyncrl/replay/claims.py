"""What a generator says that it has, against what the ledger knows: which leases and results are of use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.replay.intake import Intake
from asyncrl.replay.ledger import Entry, Lease, Ledger, State, lease_id_of
from asyncrl.replay.limits import Limits
from asyncrl.replay.recovery import Recovery
from asyncrl.replay.tally import Tally
from asyncrl.types import Version
from asyncrl.wire import Ack, Cancel, LeaseMsg, Message, Send, prompt_to_msg


class Claim(NamedTuple):
    """The answer to a Hello: leases to stop sampling, leases whose results to forget, groups to send again."""

    useless: list[str]
    void: list[str]
    wanted: list[str]

    def messages(self, again: bool) -> list[Message]:
        """The same on the wire. again: it said Hello before, so that it sends nothing unless it is asked."""
        out: list[Message] = [Ack([], [], 0, self.void)] if self.void else []
        out += [Cancel(self.useless)] if self.useless else []
        return out + ([Send(self.wanted)] if self.wanted and again else [])


def lease_message(lease: Lease, now: float) -> LeaseMsg:
    """A lease on the wire."""
    prompt = prompt_to_msg(lease.prompt)
    return LeaseMsg(lease.lease_id, lease.group_id, lease.attempt, prompt, lease.expires - now)


@dataclass(slots=True)
class Claims:
    """Hellos of generators, by the rules of the intake."""

    limits: Limits
    ledger: Ledger
    tally: Tally
    recovery: Recovery
    intake: Intake
    barred: set[str]
    """Generators in quarantine: only what they have of a take is of use."""

    def claim(
        self, generator_id: str, held: Version, sampling: Sequence[str], kept: Sequence[str], now: float, heard: int
    ) -> Claim:
        """See ReplayQueue.claim."""
        out, finished = Claim([], [], []), set(kept)
        for lease_id in sampling:
            if lease_id not in finished and not self._samples(lease_id, generator_id, held, now):
                out.useless.append(lease_id)
        for lease_id in kept:
            entry, attempt = self._find(lease_id)
            if entry is None or not self._keeps(entry, attempt, generator_id, held, now):
                out.void.append(lease_id)
            elif not entry.payload and entry.state is not State.KEPT:
                # Everything was sent before this Hello, so it is lost. What is KEPT is asked for when there is room.
                self.recovery.promise(entry.group_id, generator_id)
                out.wanted.append(entry.group_id)
        named = {*sampling, *kept}
        for entry in self.ledger.of_state(State.LEASED):
            lease = entry.lease
            assert lease is not None
            if lease.generator_id == generator_id and lease.seq <= heard and lease.lease_id not in named:
                self.tally.count("lost_lease")
                self.withdraw([lease])
        self.recovery.returned(generator_id)
        return out

    def withdraw(self, leases: Iterable[Lease]) -> None:
        """Take back leases that never reached their generator; they do not count as attempts."""
        for lease in leases:
            entry = self.ledger.entries.get(lease.group_id)
            if entry is not None and entry.lease is lease:
                entry.attempt -= entry.attempt == lease.attempt
                self.ledger.move(entry, State.PENDING)

    def _samples(self, lease_id: str, generator_id: str, held: Version, now: float) -> bool:
        """True while the result may be of use."""
        entry, attempt = self._find(lease_id)
        taken = entry is not None and entry.digest is not None and (entry.payload or entry.state is State.KEPT)
        if entry is None or taken or generator_id in self.barred:
            return False
        if entry.state is State.PENDING:
            self._lease_out(entry, attempt, generator_id, held, now)
        # Leased once more, to whomever: the first result wins.
        return True

    def _keeps(self, entry: Entry, attempt: int, generator_id: str, held: Version, now: float) -> bool:
        """True while the result is of use: it is the one that is here, or none is."""
        if entry.digest is not None:
            ours = entry.sender == generator_id and entry.digest.attempt == attempt
            entry.orphan = entry.orphan and not ours
            return ours
        if generator_id in self.barred:
            return False
        if entry.state is State.PENDING:
            self._lease_out(entry, attempt, generator_id, held, now)
        return True

    def _find(self, lease_id: str) -> tuple[Entry | None, int]:
        """The open group of a lease whose result could still come in, and the lease's attempt."""
        group_id, _, number = lease_id.rpartition("#")
        attempt = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0
        entry = self.ledger.entries.get(group_id)
        if entry is None or not entry.min_attempt <= attempt <= self.intake.last_attempt(entry):
            return None, attempt
        return entry, attempt

    def _lease_out(self, entry: Entry, attempt: int, generator_id: str, held: Version, now: float) -> None:
        entry.attempt = max(entry.attempt, attempt)
        self.ledger.move(entry, State.LEASED)
        entry.lease = Lease(
            lease_id_of(entry.group_id, attempt), entry.group_id, attempt, self.ledger.prompts[entry.index],
            generator_id, held, now + self.limits.lease_timeout_s,
        )  # fmt: skip
