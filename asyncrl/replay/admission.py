"""Who gets a lease, and how many batches a take has. Pure functions of the queue's state."""

from __future__ import annotations

from asyncrl.replay.clock import Clock
from asyncrl.replay.ledger import Ledger, State
from asyncrl.replay.limits import Limits
from asyncrl.types import Version


def refusal(held: Version, limits: Limits, clock: Clock, ledger: Ledger) -> str:
    """Why a generator that holds `held` gets no lease now, or "".

    The rule (DESIGN section 3): u + a // G - v <= max_lag. If what is ahead of the group is consumed
    in order, the group will still be young enough.
    """
    if clock.newest is None:
        return "no_version"
    if clock.unknown(held):
        return "unknown_version"
    if clock.lost(held):
        return "version_too_old"
    ahead = clock.update + ledger.in_flight // limits.groups_per_update
    if ahead - held.update > limits.max_lag:
        return "version_too_old" if held < clock.newest else "ahead_full"
    # One batch more than the run needs covers for stragglers among the last groups.
    if limits.total_updates and ahead > limits.total_updates:
        return "end_of_run"
    return "" if _has_room(limits, ledger) else "capacity"


def num_batches(update: int, limits: Limits, clock: Clock, follows: bool = True) -> int:
    """Batches of a take at `update`: M, unless the last of them could use no version that exists by then.

    By then means published, or due at `update`. Such a short take comes when M does not divide N, or
    when a skipped batch shifted the clock against the publications; waiting for M would never end. follows: whether
    the learner publishes by these limits; one that does not know them yet may not publish what is due.
    """
    assert clock.newest is not None
    due = update // limits.sync_every * limits.sync_every if follows else 0
    reach = max(clock.newest.update, due) + limits.max_lag - update + 1
    left = limits.total_updates - update if limits.total_updates else limits.updates_per_take
    return max(1, min(limits.updates_per_take, reach, left))


def _has_room(limits: Limits, ledger: Ledger) -> bool:
    """Bytes that are here, kept for later and reserved for leases fit.

    No group is larger than a take's share, so that without a take there is room for a take of leases.
    """
    out = ledger.count(State.LEASED) + 1
    reserve = min(max(limits.group_bytes, ledger.largest_bytes), limits.share_bytes)
    return ledger.num_bytes + ledger.kept_bytes + out * reserve <= limits.capacity_bytes
