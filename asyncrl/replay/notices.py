"""What generators are to hear about their groups: one Ack for all that a poll brought. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from asyncrl.replay.ledger import lease_id_of
from asyncrl.wire import Ack, GroupHead


class Notices:
    """By generator, until it was told."""

    def __init__(self) -> None:
        self._acks: defaultdict[str, Ack] = defaultdict(lambda: Ack([], []))
        self._owed: defaultdict[str, list[str]] = defaultdict(list)

    def result(self, name: str, group: GroupHead, status: str, is_open: bool) -> None:
        """What became of a group that came. is_open: another result of it may be wanted, also of this generator."""
        ack = self._acks[name]
        if status in ("admitted", "known"):
            ack.admitted.append(group.group_id)
        elif is_open:
            ack.void.append(lease_id_of(group.group_id, group.attempt))
        else:
            ack.resolved.append(group.group_id)

    def resolved(self, pairs: Iterable[tuple[str, str]]) -> None:
        """(generator, group id) of groups that need not be kept any more."""
        for name, group_id in pairs:
            self._owed[name].append(group_id)

    def drain(self) -> list[tuple[str, Ack, list[str]]]:
        """(generator, what to tell it, what of that is said once only); `untold` takes back what was not delivered."""
        acks, owed = self._acks.copy(), self._owed.copy()
        self._acks.clear()
        self._owed.clear()
        for name, group_ids in owed.items():
            acks[name].resolved.extend(group_ids)
        return [(name, ack, owed.get(name, [])) for name, ack in acks.items()]

    def untold(self, name: str, owed: list[str]) -> None:
        """Keep what is said once only; the rest is asked again, for a generator sends its groups until it hears.

        So a peer that sends what nobody asked for, and reads no answer, fills nothing.
        """
        if owed:
            self._owed[name].extend(owed)
