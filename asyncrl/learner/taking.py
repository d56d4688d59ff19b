"""The ranks' takes, had together: no rank waits in a collective for one that replay did not answer yet."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl.errors import NoAnswer
from asyncrl.learner.client import ReplayClient, Shard
from asyncrl.learner.shard import World
from asyncrl.learner.stop import Stopped
from asyncrl.learner.table import all_max

SLICE_SHARE = 0.2
"""Share of a collective's timeout after which ranks tell each other whether they have their shard. What rank 0 may
announce meanwhile takes ANSWER_SHARE of it at most, which leaves room for both."""

BUSY_S = 1.0
"""The same while there is something that all ranks must look after together."""


def take_together(
    client: ReplayClient,
    take_id: int,
    update: int,
    world: World,
    timeout_s: float,
    collective_timeout_s: float,
    meanwhile: Callable[[], bool] | None = None,
    busy: Callable[[], bool] = lambda: False,
) -> Shard:
    """This rank's shard, when every rank has its own; NoAnswer when one has none after timeout_s. A collective.

    meanwhile: as of ReplayClient.take. busy: a collective that is called now and then while the ranks wait, once a
    second as long as it returns True. Stopped, on every rank, when one was told to stop.
    """
    deadline = time.monotonic() + timeout_s
    longest_s = timeout_s if world.size == 1 else SLICE_SHARE * collective_timeout_s
    shard: Shard | None = None
    while True:
        slice_s = min(longest_s, BUSY_S) if busy() else longest_s
        if shard is None:
            left = deadline - time.monotonic()
            try:
                shard = client.take(take_id, update, world.rank, world.size, min(left, slice_s), meanwhile, timeout_s)
            except NoAnswer:
                if left <= slice_s:
                    raise
            except Stopped:
                shard = None
        missing, stopping = all_max([shard is None, client.stopping()], world)
        if stopping:
            raise Stopped
        if not missing:
            assert shard is not None
            return shard
