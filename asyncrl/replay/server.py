"""The replay role: builds the task, binds, publishes its address, serves until the run is over.

One process, one poller loop, no torch.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from asyncrl.config import Config
from asyncrl.models.describe import describe
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.journal import Journal
from asyncrl.replay.limits import check_capacity, group_bytes, limits_of
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.service import ReplayServer
from asyncrl.replay.snapshot import SnapshotFile, fingerprint
from asyncrl.tasks import build
from asyncrl.transport.rendezvous import publish_address
from asyncrl.transport.sockets import Server

log = logging.getLogger(__name__)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; signals are left alone outside the main thread."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        event.set()

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def run(config: Config, run_dir: Path) -> None:
    """The replay role: serves until the run is over (Done and evaluations) or SIGTERM.

    Writes run_dir/replay.address once it is bound. Goes on from run_dir/replay.snapshot, if there is one.
    Raises ConfigError, TaskError, RunError or TransportError.
    """
    task = build(config.task, config.model.path)
    model = describe(config.model.path)
    one_group = group_bytes(config, model, task.train)
    check_capacity(config, one_group)
    queue = ReplayQueue(task.train, limits_of(config, one_group), model)
    evaluations = Evaluations(
        task.eval,
        queue.tally,
        every=config.eval.every,
        samples=config.eval.samples,
        greedy=config.eval.greedy,
        timeout_s=config.eval.timeout_s,
        lease_timeout_s=config.replay.lease_timeout_s,
        max_attempts=config.replay.max_attempts,
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    snapshots = SnapshotFile(run_dir, fingerprint(config, model))
    snapshot = snapshots.read()
    address = run_dir / "replay.address"
    address.unlink(missing_ok=True)
    r = config.replay
    socket = Server(r.bind, r.security, keys=r.keys, refused=queue.tally.counters)
    journal = Journal(run_dir)
    try:
        server = ReplayServer(
            queue,
            evaluations,
            socket,
            heartbeat_timeout_s=config.replay.heartbeat_timeout_s,
            journal=journal,
            snapshots=snapshots,
        )
        if snapshot is not None:
            server.resume(snapshot)
        server.save()
        with _stop_signals() as stop:
            publish_address(address, socket.address)
            log.info("serving at %s", socket.address)
            while not (stop.is_set() or server.over):
                server.step()
        if server.finished:
            snapshots.remove()
        log.info("stopped: %s", "the run is over" if server.over else "signal")
    finally:
        address.unlink(missing_ok=True)
        journal.close()
        socket.close()
