"""Which messages of a learner count: those of replay's run epoch, with numbers that fit its clock.

A learner that a newer one replaced may live on, whole or by single ranks: nothing that it says may change anything.
Decided before a message has any effect.
"""

from __future__ import annotations

from asyncrl import wire
from asyncrl.replay.ledger import State
from asyncrl.replay.peers import replaced
from asyncrl.replay.queue import ReplayQueue

WRITER = "learner-0"
"""Peer id of rank 0, which alone commits, publishes, reports and ends the run."""
MAX_SKIPPED_EPOCHS = 1024
"""A new run epoch is one more than the newest that its learner knows of; replay may know less, after its loss."""


def check(name: str, message: wire.Message, queue: ReplayQueue) -> None:
    """ValueError for a message of the learner rank `name` that is of another run epoch or contradicts the clock."""
    writes = wire.Commit | wire.Published | wire.Report | wire.Verdict | wire.Done
    if isinstance(message, writes) and name != WRITER:
        raise ValueError(f"{name} may not send {type(message).__name__}: rank 0 does, as {WRITER}")
    match message:
        case wire.Take(epoch=epoch):
            _same_epoch(epoch, queue)
            _take(message, queue.clock.update)
        case wire.Commit(epoch=epoch):
            _same_epoch(epoch, queue)
            _commit(message, queue)
        case wire.Report(epoch=epoch) | wire.Verdict(epoch=epoch):
            _same_epoch(epoch, queue)
        case wire.Done(update=update, epoch=epoch):
            _same_epoch(epoch, queue)
            clock, total = queue.clock.update, queue.limits.total_updates
            if update != clock or update < total:
                raise ValueError(f"Done at update {update}: the clock is at {clock} of {total or 'unlimited'} updates")
        case wire.Published():
            _published(message, queue)


def _same_epoch(epoch: int, queue: ReplayQueue) -> None:
    newest = queue.clock.newest
    if newest is None or epoch == newest.epoch:
        return
    if epoch < newest.epoch:
        raise ValueError(replaced(epoch, newest.epoch))
    raise ValueError(f"no version of run epoch {epoch} was published, replay is in run epoch {newest.epoch}")


def _take(take: wire.Take, clock: int) -> None:
    """Another rank may ask for its next take while rank 0 still commits; the desk lets it wait."""
    if take.update > clock + (take.rank > 0):
        raise ValueError(f"take {take.take_id} for update {take.update}, the clock is at {clock}")


def _commit(commit: wire.Commit, queue: ReplayQueue) -> None:
    """One that was acknowledged before may come again, late, when it has nothing left to resolve."""
    clock = queue.clock.update
    if min(commit.update, commit.batch) < 0:
        raise ValueError(f"commit of batch {commit.batch} at update {commit.update} is negative")
    if commit.update > clock + (commit.outcome == "trained"):
        raise ValueError(f"commit ({commit.outcome}) at update {commit.update}, the clock is at {clock}")
    if commit.update < clock:
        found = (queue.ledger.entries.get(i) for i in commit.group_ids)
        if any(e is not None and e.state is State.TAKEN and e.take_id == commit.take_id for e in found):
            raise ValueError(f"commit at update {commit.update} of groups not committed yet, the clock is at {clock}")


def _published(message: wire.Published, queue: ReplayQueue) -> None:
    """A run's first version may be of any update: replay may be new while the learner has a checkpoint."""
    clock, total = queue.clock, queue.limits.total_updates
    version = f"version {message.epoch}.{message.update}"
    if message.epoch > clock.epoch + MAX_SKIPPED_EPOCHS:
        raise ValueError(f"{version}: replay is in run epoch {clock.epoch}")
    if total and message.update > total:
        raise ValueError(f"{version}: the run has {total} updates (learner.updates)")
    if clock.newest is None:
        return
    if message.epoch < clock.epoch:
        raise ValueError(replaced(message.epoch, clock.epoch))
    if message.epoch == clock.epoch and message.update > clock.update:
        raise ValueError(f"{version} before its update is committed, the clock is at {clock.update}")
    if message.update > clock.reached:
        raise ValueError(
            f"{version}: replay knows of updates up to {clock.reached} only; was its run folder restored from an older "
            "copy? Remove replay.snapshot there while replay is down to give every prompt out again"
        )
