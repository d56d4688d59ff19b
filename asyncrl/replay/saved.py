"""What the queue answers and writes down: records without behaviour."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.replay.clock import ClockState
from asyncrl.replay.knobs import KnobsState
from asyncrl.replay.ledger import Lease, LedgerState
from asyncrl.replay.quarantine import QuarantineState
from asyncrl.replay.takes import Take
from asyncrl.replay.tally import TallyState


class Grant(NamedTuple):
    """Answer to a lease request; idle says why there are fewer leases than asked for."""

    leases: list[Lease]
    idle: str


class Committed(NamedTuple):
    """One group that a learner's batch used up, for the run's record. epoch is the run epoch."""

    update: int
    epoch: int
    group_id: str
    generator_id: str
    outcome: str
    batch: int = -1


class QueueState(NamedTuple):
    """A queue on disk: what its generators and the learner cannot tell it again."""

    clock: ClockState
    ledger: LedgerState
    tally: TallyState
    takes: list[Take]
    retired_take: int
    closed: bool
    knobs: KnobsState
    quarantine: QuarantineState
