"""The replay role: builds the task, binds, publishes its address, serves until the run is over.

One process, one poller loop, no torch.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.models.describe import describe
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.journal import Journal
from asyncrl.replay.knobs import Knobs
from asyncrl.replay.limits import check_capacity, fits, group_bytes, largest_message, limits_of
from asyncrl.replay.quarantine import rules_of
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.service import ReplayServer
from asyncrl.replay.snapshot import SnapshotFile, data_fingerprint, fingerprint
from asyncrl.replay.tuning import Tuning
from asyncrl.replay.untune import done, ordered
from asyncrl.tasks import build
from asyncrl.tasks.held_out import asked_by_set, names_answers
from asyncrl.transport.rendezvous import publish_address
from asyncrl.transport.sockets import Server

log = logging.getLogger(__name__)

LOCK = "replay.lock"


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT write their number into; signals are left alone outside the main thread."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def only_one(run_dir: Path) -> Iterator[None]:
    """Hold the lock of run_dir, which ends with this process. Raises RunError when another one holds it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / LOCK, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise RunError(
                f"another replay serves the run folder {run_dir}; end it, or choose another run.name for this one"
            ) from exc
        yield


def run(config: Config, run_dir: Path) -> None:
    """The replay role: serves until the run is over (Done and evaluations) or SIGTERM.

    Writes run_dir/replay.address once it is bound. Goes on from run_dir/replay.snapshot, if there is one.
    Raises ConfigError, TaskError, RunError or TransportError; RunError also when nothing could progress.
    """
    with only_one(run_dir):
        _serve(config, run_dir)


def collect_rarely() -> None:
    """Keep the garbage collector from walking every group that waits, each time that a few hundred objects came.

    Groups have no cycles; this is a third of the time to decode one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _serve(config: Config, run_dir: Path) -> None:
    task = build(config.task, config.model.path)
    for note in task.notes:
        log.info("%s", note)
    model = describe(config.model.path)
    one_group = group_bytes(config, model, task.train)
    check_capacity(config, one_group)
    max_bytes, max_frames = largest_message(one_group, config.algorithm.group_size)
    knobs = Knobs(config, fits(model, task.train, max_bytes), ordered(run_dir))
    queue = ReplayQueue(task.train, limits_of(config, one_group, task.weights), model, knobs)
    queue.tally.data = dict(task.counts)
    queue.quarantine.rules = rules_of(config)
    evaluations = Evaluations(
        task.eval,
        queue.tally,
        every=config.eval.every,
        samples=config.eval.samples,
        greedy=config.eval.greedy,
        sets=asked_by_set(config.task, config.eval),
        timeout_s=config.eval.timeout_s,
        lease_timeout_s=config.replay.lease_timeout_s,
        max_attempts=config.replay.max_attempts,
        names_answers=names_answers(config.task),
    )
    snapshots = SnapshotFile(run_dir, fingerprint(config, model), data_fingerprint(task.train, task.eval))
    snapshot = snapshots.read()
    address = run_dir / "replay.address"
    address.unlink(missing_ok=True)
    r = config.replay
    socket = Server(
        r.bind, r.security, keys=r.keys, refused=queue.tally.counters, max_bytes=max_bytes, max_frames=max_frames
    )
    journal, tuning = Journal(run_dir), Tuning(queue, evaluations, run_dir)
    try:
        server = ReplayServer(
            queue,
            evaluations,
            socket,
            heartbeat_timeout_s=config.replay.heartbeat_timeout_s,
            watchdog_s=config.run.watchdog_s,
            settings=config.shared_settings(),
            name=config.run.name,
            journal=journal,
            snapshots=snapshots,
            tuning=tuning,
        )
        if snapshot is not None:
            server.resume(snapshot)
        else:
            journal.begin()
            tuning.begin()
        server.save()
        done(run_dir)
        collect_rarely()
        with _stop_signals() as stop:
            publish_address(address, socket.address)
            log.info("serving at %s", socket.address)
            while not (stop or server.over):
                server.step()
        if server.failure:
            raise RunError(server.failure)
        if server.finished:
            snapshots.remove()
        log.info("stopped: %s", "the run is over" if server.over else "signal")
    finally:
        address.unlink(missing_ok=True)
        journal.close()
        socket.close()
    if stop and not server.over:
        # Nobody in the run said that it is over: whoever watches starts this role again.
        raise SystemExit(128 + stop[0])
