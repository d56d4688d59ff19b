"""The ranks' takes, had together: no rank waits in a collective for one that replay did not answer yet."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl.errors import NoAnswer
from asyncrl.learner.client import ReplayClient, Shard
from asyncrl.learner.shard import World
from asyncrl.learner.table import all_max

SLICE_SHARE = 0.2
"""Share of a collective's timeout after which ranks tell each other whether they have their shard. What rank 0 may
announce meanwhile takes ANSWER_SHARE of it at most, which leaves room for both."""


def take_together(
    client: ReplayClient,
    take_id: int,
    update: int,
    world: World,
    timeout_s: float,
    collective_timeout_s: float,
    meanwhile: Callable[[], bool] | None = None,
) -> Shard:
    """This rank's shard, when every rank has its own; NoAnswer when one has none after timeout_s. A collective.

    meanwhile: as of ReplayClient.take.
    """
    deadline = time.monotonic() + timeout_s
    slice_s = timeout_s if world.size == 1 else SLICE_SHARE * collective_timeout_s
    shard: Shard | None = None
    while True:
        if shard is None:
            left = deadline - time.monotonic()
            try:
                shard = client.take(take_id, update, world.rank, world.size, min(left, slice_s), meanwhile)
            except NoAnswer:
                if left <= slice_s:
                    raise
        if not any(all_max([shard is None], world)):
            assert shard is not None
            return shard
