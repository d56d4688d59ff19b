"""The learner's loop: take -> collate -> score -> drift -> select -> update -> commit -> publish.

One Learner per rank under torchrun. Rank 0 alone commits, publishes and writes metrics.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from pathlib import Path

import torch

from asyncrl.config import Config
from asyncrl.errors import TrainingError
from asyncrl.learner.batch import Row, rows_of
from asyncrl.learner.client import ReplayClient, Shard
from asyncrl.learner.fleet import FleetRates
from asyncrl.learner.publish import export, publish
from asyncrl.learner.records import histograms, update_scalars
from asyncrl.learner.shard import World, build_policy, init_world
from asyncrl.learner.step import Updater
from asyncrl.learner.update import Outcome, TakeState, run_update, score_take
from asyncrl.metrics.sink import Sink
from asyncrl.models.describe import describe
from asyncrl.transport.keys import client_keys
from asyncrl.types import Version
from asyncrl.weights.shm import Publisher

log = logging.getLogger(__name__)

MAX_UNFORCED = 10
"""Updates under R3 without a single forced row before the run ends."""


class Learner:
    """State of one rank. The clock is `update`; it advances only on a real optimizer step."""

    def __init__(self, config: Config, run_dir: Path, world: World) -> None:
        self.config, self.run_dir, self.world = config, run_dir, world
        m, s = config.model, config.learner
        self.info = describe(m.path)
        replay = config.algorithm.routes == "r3"
        self.policy = build_policy(m.path, m.dtype, m.attention, m.experts, s.logprob_chunk, replay, world)
        self.updater = Updater(self.policy, s, config.algorithm, world)
        r, limit_s = config.replay, config.run.start_timeout_s
        keys = client_keys(r.security, r.keys, r.client)
        self.client = ReplayClient(run_dir / "replay.address", world.rank, self.info, limit_s, keys)
        self.sink = Sink(run_dir, tensorboard=config.logging.tensorboard) if world.is_writer else None
        keep = config.weights.keep_versions
        self.publisher = Publisher(run_dir / "weights", keep=keep) if world.is_writer else None
        self.fleet = FleetRates()
        self.epoch = self.client.welcome.epoch
        self.update, self.take_id, self.carry = 0, 0, 0.0
        self.published = -1
        self.skipped, self.skipped_in_a_row, self.unforced_in_a_row = 0, 0, 0
        self.sync_s = 0.0
        self.record_time = time.monotonic()
        self.evaluations: set[str] = set()

    def run(self) -> None:
        """Train to the last update, publish it, and wait for the final evaluation."""
        self.publish_if_due()
        while self.update < self.config.learner.updates:
            started = time.monotonic()
            shard = self.client.take(
                self.take_id, self.update, self.world.rank, self.world.size, self.config.learner.take_timeout_s
            )
            self.train_on(shard, time.monotonic() - started)
            self.take_id += 1
        # The last version is for the last evaluation; nobody else would load it before it is removed.
        self.publish_if_due(final=self.config.eval.every > 0)
        export(self.policy, self.config.model.path, self.run_dir / "model", self.world)
        if self.world.is_writer:
            self.client.done(self.update)
            self.wait_for_evaluations()

    def train_on(self, shard: Shard, waited: float) -> None:
        """Every batch of one take, one update each."""
        state: TakeState | None = None
        if len(shard.batches) > 1:
            everything = [r for m in range(len(shard.batches)) for r in self._rows(shard, m)]
            state = score_take(self.policy, everything, self.config, self.info, self.world)
        for m in range(len(shard.batches)):
            if self.update >= self.config.learner.updates:
                return
            started, wall = time.monotonic(), time.time()
            outcome = run_update(
                self.policy, self.updater, self._rows(shard, m), self.update, self.carry, state, self.config,
                self.info, self.world,
            )  # fmt: skip
            step_s = time.monotonic() - started
            self.fleet.overlap.step(wall, time.time())
            used_at = self.update
            self._advance(outcome)
            self._commit(shard.take_id, outcome)
            self.publish_if_due()
            self._record(used_at, outcome, step_s, waited)
            waited = 0.0

    def _rows(self, shard: Shard, batch: int) -> list[Row]:
        return rows_of(shard.batches[batch], self.update, shard.bounds[batch], self.info)

    def _advance(self, outcome: Outcome) -> None:
        if outcome.step.outcome == "stepped":
            self.update += 1
            self.carry = outcome.selection.carry
            self.skipped_in_a_row = 0
            self._check_replay(outcome)
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        log.warning("update %d skipped: %s", self.update, outcome.step.outcome)
        if self.skipped_in_a_row >= self.config.learner.max_skipped_updates:
            raise TrainingError(
                f"{self.skipped_in_a_row} updates in a row were skipped (last: {outcome.step.outcome}) at update "
                f"{self.update}; look at optim/grad_norm and filter/dropped, lower learner.lr or algorithm.rdc.q"
            )

    def _check_replay(self, outcome: Outcome) -> None:
        """R3 that forces nothing is a silent no-op: an error after MAX_UNFORCED updates."""
        self.unforced_in_a_row = self.unforced_in_a_row + 1 if outcome.forced_fraction == 0 else 0
        if self.unforced_in_a_row >= MAX_UNFORCED:
            raise TrainingError(
                f"algorithm.routes=r3, but no route was forced in {MAX_UNFORCED} updates (r3/forced_fraction = 0): "
                "the generators send no usable routes; set algorithm.routes=native or repair the engine"
            )

    def _commit(self, take_id: int, outcome: Outcome) -> None:
        """Rank 0 resolves the groups of all ranks; the table holds their ids."""
        if self.world.is_writer:
            result = "trained" if outcome.step.outcome == "stepped" else "skipped"
            self.client.commit(take_id, self.update, result, list(dict.fromkeys(n[1] for n in outcome.table.names)))

    def publish_if_due(self, final: bool = False) -> None:
        """Publish at update 0, every sync_every updates and at the end; retry a failed one."""
        n, u = self.config.staleness.sync_every, self.update
        if u == self.published or not (final or u // n > self.published // n or self.published < 0):
            return
        started = time.monotonic()
        version = Version(self.epoch, u)
        source = publish(self.policy, self.publisher, version, self.world)
        self.sync_s = time.monotonic() - started
        if source is not None:
            self.published = u
            if self.world.is_writer:
                self.client.published(version, source)
        elif self.published < 0 or u - self.published > self.config.staleness.max_lag:
            raise TrainingError(f"no version could be published since update {self.published}; see the error above")

    def _record(self, used_at: int, outcome: Outcome, step_s: float, wait_s: float) -> None:
        if self.sink is None:
            return
        now = time.monotonic()
        span, self.record_time = now - self.record_time, now
        state = self.client.status()
        scalars = update_scalars(outcome, self.info) | self.fleet.scalars(state, span)
        scalars |= {
            "optim/skipped_updates": float(self.skipped),
            "optim/stepped": float(outcome.step.outcome == "stepped"),
            "throughput/step_s": step_s,
            "throughput/wait_s": wait_s,
            "throughput/sync_s": self.sync_s,
            "throughput/update_s": span,
            "throughput/learner_busy_fraction": min(1.0, step_s / span) if span > 0 else 0.0,
            "throughput/learner_tokens_per_s": float(outcome.table["tokens"].sum()) / span if span > 0 else 0.0,
            "throughput/fused_scoring": float(outcome.fused),
            "staleness/published": float(self.published),
        }
        every = self.config.logging.histograms_every
        self.sink.write(used_at, scalars, histograms(outcome) if every and used_at % every == 0 else None)
        self._record_evaluations(state["evaluations"])

    def _record_evaluations(self, evaluations: list[dict[str, object]]) -> None:
        assert self.sink is not None
        for e in evaluations:
            if str(e["eval_id"]) in self.evaluations:
                continue
            self.evaluations.add(str(e["eval_id"]))
            values = {f"eval/{k}": float(v) for k, v in e.items() if isinstance(v, int | float)}
            self.sink.write(int(values["eval/version"]), values)
            log.info("evaluation %s", json.dumps(e, default=str))

    def wait_for_evaluations(self) -> None:
        """Waits for replay to finish the last evaluation, at most eval.timeout_s and a margin."""
        deadline = time.monotonic() + self.config.eval.timeout_s + 30
        while time.monotonic() < deadline:
            state = self.client.status()
            self._record_evaluations(state["evaluations"])
            if state["finished"]:
                return
            time.sleep(0.1)
        log.warning("the last evaluation did not finish within %g s", self.config.eval.timeout_s + 30)

    def close(self) -> None:
        """Flush metrics and close sockets; published versions are removed."""
        self.client.close()
        if self.sink is not None:
            self.sink.close()
        if self.publisher is not None:
            self.publisher.close()


def run(config: Config, run_dir: Path) -> None:
    """The learner role. Raises TrainingError, TransportError or WeightSyncError with the cause."""
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    world = init_world(config.learner.collective_timeout_s)
    if world.is_writer:
        # Published versions and metrics are closed in order; other ranks may die at once.
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    learner = Learner(config, run_dir, world)
    try:
        learner.run()
    finally:
        learner.close()
        torch.distributed.destroy_process_group()
