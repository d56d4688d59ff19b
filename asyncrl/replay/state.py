"""The state of replay as StatusReply carries it: `asyncrl status` and the metrics are made of it."""

from __future__ import annotations

import time
from typing import Any

from asyncrl.replay.evals import Evaluations
from asyncrl.replay.ledger import State
from asyncrl.replay.peers import Peers
from asyncrl.replay.queue import ReplayQueue


def state(queue: ReplayQueue, evaluations: Evaluations, peers: Peers, now: float, **more: object) -> dict[str, Any]:
    """Gauges now, counters of the run, finished evaluations, who takes part, and `more` as it is. JSON-like."""
    tally, limits = queue.tally, queue.limits
    ranks = sum(p.role == "learner" for p in peers.known.values())
    seen_s = now - peers.learner_seen if peers.learner_seen is not None else None
    return {
        "time": time.time(),
        "total_updates": limits.total_updates,
        "max_lag": limits.max_lag,
        "sync_every": limits.sync_every,
        "groups_per_update": limits.groups_per_update,
        "capacity_bytes": limits.capacity_bytes,
        "learner": {"ranks": ranks, "seen_s": seen_s},
        "update": queue.clock.update,
        "epoch": queue.clock.epoch,
        "newest": list(queue.clock.newest) if queue.clock.newest is not None else None,
        "queue_depth": queue.ledger.count(State.QUEUED),
        "kept": queue.ledger.count(State.KEPT),
        "taken": queue.ledger.count(State.TAKEN),
        "leased": queue.ledger.count(State.LEASED),
        "bytes": queue.ledger.num_bytes,
        "peak_bytes": tally.peak_bytes,
        "waits": {"count": tally.waits, "seconds": tally.wait_s},
        "counters": dict(tally.counters),
        "idle": dict(tally.idle),
        "data": tally.data,
        "left_out": tally.left_out.as_dict(),
        "trained": tally.trained.as_dict(),
        "dropped": [list(pair) for pair in tally.dropped],
        "waiting": queue.waiting,
        "generators": {n: g.state() | {"seen_s": now - g.last_seen} for n, g in peers.generators.items()},
        "quarantine": queue.quarantine.state(),
        "tuned": queue.knobs.state(),
        "evaluations": evaluations.finished,
        "measuring": [list(version) for version in evaluations.measuring],
        "closed": queue.closed,
        **more,
    }
