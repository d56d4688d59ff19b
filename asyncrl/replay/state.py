"""The state of replay as StatusReply carries it: `asyncrl status` and the metrics are made of it."""

from __future__ import annotations

from typing import Any

from asyncrl.replay.evals import Evaluations
from asyncrl.replay.ledger import State
from asyncrl.replay.peers import Peers
from asyncrl.replay.queue import ReplayQueue


def state(queue: ReplayQueue, evaluations: Evaluations, peers: Peers, finished: bool, restarts: int) -> dict[str, Any]:
    """Gauges now, counters of the run, finished evaluations, restarts of replay. JSON-like."""
    tally = queue.tally
    return {
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
        "left_out": tally.left_out.as_dict(),
        "trained": tally.trained.as_dict(),
        "dropped": [list(pair) for pair in tally.dropped],
        "waiting": queue.waiting,
        "generators": {name: g.state() for name, g in peers.generators.items()},
        "evaluations": evaluations.finished,
        "finished": finished,
        "closed": queue.closed,
        "restarts": restarts,
    }
