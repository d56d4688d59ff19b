"""The learner's loop: take -> collate -> score -> drift -> select -> update -> commit -> publish.

One Learner per rank under torchrun. Rank 0 alone commits, publishes and writes metrics.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from asyncrl.config import Config, to_yaml
from asyncrl.errors import TrainingError
from asyncrl.learner.alarming import Alarming, ended_by
from asyncrl.learner.batch import Row, rows_of
from asyncrl.learner.best import Best
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.client import ReplayClient, Shard, answer_limit
from asyncrl.learner.dumping import Dumps
from asyncrl.learner.health import Skips
from asyncrl.learner.probing import score_probes
from asyncrl.learner.publish import export, published_dtype
from asyncrl.learner.publishing import Due, Publishing
from asyncrl.learner.recorder import Recorder, absent
from asyncrl.learner.reference import open_reference
from asyncrl.learner.sentinel import Sentinel
from asyncrl.learner.settings import LiveSettings, as_text, is_paused
from asyncrl.learner.shard import World, build_policy, init_world
from asyncrl.learner.start import begin, evaluated, model_fingerprint
from asyncrl.learner.step import Updater
from asyncrl.learner.stop import Stopped, StopSignal, time_to_leave
from asyncrl.learner.stored import Progress
from asyncrl.learner.table import Table, all_bytes, all_max
from asyncrl.learner.taking import take_together
from asyncrl.learner.update import Outcome, TakeState, run_update, score_take
from asyncrl.metrics.sink import Sink, hold
from asyncrl.models.describe import describe
from asyncrl.transport.keys import client_keys
from asyncrl.types import Version
from asyncrl.weights.collective.publisher import Groups
from asyncrl.weights.publisher import Engines, open_publisher

log = logging.getLogger(__name__)

MAX_UNFORCED = 10
"""Updates under R3 without a single forced row before the run ends."""

PAUSE_S = 1.0
"""How often a paused learner asks whether it may go on."""


class Learner:
    """State of one rank. The clock is `update`; it advances only on a real optimizer step."""

    def __init__(self, config: Config, run_dir: Path, world: World, stop: StopSignal) -> None:
        self.config, self.run_dir, self.world, self.stop = config, run_dir, world, stop
        self.settings = LiveSettings(config)
        s = config.learner
        self.info = describe(config.model.path)
        self.policy = build_policy(config.model, s, config.algorithm.replays, world)
        self.reference = open_reference(config, world)
        self.updater = Updater(self.policy, s, config.algorithm, world)
        r, limit_s = config.replay, config.run.start_timeout_s
        keys = client_keys(r.security, r.keys, r.client)
        # First the lock on the metrics: a second learner in this folder must not displace the first at replay.
        lock = hold(run_dir) if world.is_writer else None
        self.checkpoints = Checkpoints(
            run_dir, model_fingerprint(config, self.info), s.keep_checkpoints, world, s.checkpoint_timeout_s
        )
        found = self.checkpoints.load(self.policy, self.updater)
        place, settings = r.connect or run_dir / "replay.address", config.shared_settings()
        self.client = ReplayClient(
            place, world.rank, self.info, limit_s, keys, settings,
            answer_limit(limit_s, s.collective_timeout_s, world.size),
        )  # fmt: skip
        w, n = config.weights, config.staleness
        self.publisher = (
            open_publisher(
                w.carrier, Path(w.dir or run_dir / "weights"), w.keep_versions, bind=w.bind,
                security=config.weights_security, keys=config.weights_keys, with_delta=w.delta,
                engines=_engines(config, world),
            ) if world.is_writer else None
        )  # fmt: skip
        due = Due(n.sync_every, n.max_lag)
        told, dtype = self.client.published, published_dtype(self.policy, config.model)
        self.publishing = Publishing(self.publisher, world, due, s.collective_timeout_s, told, dtype)
        # Between the micro-batches of a step.
        self.policy.register_forward_pre_hook(self._between)
        start = begin(found, self.client.welcome, world)
        self.epoch, self.update, self.batches, self.carry = start.epoch, start.update, start.batches, start.carry
        self.client.epoch, self.client.stopping = start.epoch, lambda: stop.asked
        self.dumps = Dumps(run_dir, world, self.info, anew=start.epoch == 0)
        self.skips = Skips(s.max_skipped_updates, start.skips)
        self.unforced_in_a_row = start.unforced_in_a_row
        self.take_id = 0
        self.over = self._over()
        first = s.updates + 1 if self.over else start.update
        self.recorder: Recorder | None = None
        keeps = world.is_writer and s.keep_best is not None
        self.best = self.publishing.keeper = Best(config, start.epoch, start.update, self.over) if keeps else None
        if world.is_writer:
            known, g = evaluated(run_dir) if start.epoch else set(), config.logging
            sink = Sink(run_dir, g.tensorboard, first, start.epoch > 0, lock, absent(config))
            alarming = Alarming(run_dir, self.client, config, first, start.epoch > 0)
            self.recorder = Recorder(sink, self.client, self.info, known, alarming, Sentinel(config.sentinel))
            self.recorder.best = self.best
            self.recorder.resolved(first, to_yaml(config))

    def run(self) -> None:
        """Train to the last update, publish it, and wait for the final evaluation.

        Told to stop, it ends behind the running update, with a last checkpoint: SystemExit.
        """
        if self.over:
            return self.finish()
        with self.stop.orderly(time_to_leave(self.config.run.shutdown_s)):
            try:
                self.train()
            except Stopped:
                self.leave()
        # The last version is for the last evaluation; nobody else would load it before it is removed.
        self.publish_if_due(final=self.config.eval.every > 0)
        export(self.policy, self.config.model.path, self.run_dir / "model", self.world)
        if self.world.is_writer:
            self.client.done(self.update)
        self.finish()

    def train(self) -> None:
        """Take after take, up to the last update."""
        # What the settings of the newest take said is told again with the first take; but before it a version is due.
        paused = self.world.is_writer and is_paused(self.client.welcome.tuned, self.settings.base)
        self.publishing.paused = any(all_max([paused], self.world))
        self.publish_if_due()
        self._wait_while_paused()
        # No rank may ask for a take before replay heard of the run epoch, which makes earlier takes void.
        all_max([0.0], self.world)
        while self.update < self.config.learner.updates:
            self._wait_while_paused()
            started = time.monotonic()
            s = self.config.learner
            shard = take_together(
                self.client, self.take_id, self.update, self.world, s.take_timeout_s, s.collective_timeout_s,
                self.publishing.announce if self.publishing.unannounced else None, self._seal,
            )  # fmt: skip
            self._tune(shard)
            self.train_on(shard, time.monotonic() - started)
            self.take_id += 1

    def _tune(self, shard: Shard) -> None:
        """Go on with the live settings of a take; versions are published by the newest ones."""
        changed = self.settings.take(shard.tuned, shard.coming)
        self.config, n = self.settings.config, self.settings.coming
        self.publishing.follow(Due(n.staleness.sync_every, n.staleness.max_lag), n.weights.paused)
        if changed is None:
            return
        self.updater.tune(self.config.learner, self.config.algorithm)
        if self.best is not None:
            self.best.follow(self.config)
        if self.recorder is not None:
            self.recorder.tuned(self.update, as_text(shard.tuned.seq, changed))

    def _wait_while_paused(self) -> None:
        """Wait as long as weights.paused keeps back a version that the next take needs. A collective.

        No limit but the user's: it ends when replay says so, or when the learner is told to stop (Stopped).
        """
        started, told = time.monotonic(), False
        while self.publishing.held(self.update, self._next_batches(self.config.staleness.updates_per_take)):
            paused = self.world.is_writer and is_paused(self.client.tuned(), self.settings.base)
            still, stopping = all_max([paused, self.stop.asked], self.world)
            if stopping:
                raise Stopped
            self._seal()
            if still and self.world.is_writer and not told:
                log.warning(
                    "paused at update %d: the next take needs a version, and weights.paused keeps it back; "
                    "asyncrl tune RUN weights.paused=false goes on", self.update,
                )  # fmt: skip
            told = True
            if still:
                time.sleep(PAUSE_S)
                continue
            log.info("no longer paused at update %d", self.update)
            self.publishing.sync_s += time.monotonic() - started
            self.publishing.paused = False
            self.publish_if_due(self.config.staleness.updates_per_take)

    def _next_batches(self, num_batches: int) -> int:
        return max(1, min(num_batches, self.config.learner.updates - self.update))

    def leave(self) -> None:
        """Save what is new, as far as the time for it goes, and end. A collective; what was trained is committed."""
        c, u = self.checkpoints, self.update
        known = c.newest if c.pending is None else c.pending.update
        if self.config.learner.checkpoint_every and u > max(known, 0):
            c.begin(self.policy, self.updater, self._progress())
        c.settle(self.config.run.shutdown_s)
        number = int(all_max([self.stop.number], self.world)[0])
        log.warning("told to stop at update %d of %d; the newest checkpoint: %s", u, self.config.learner.updates, c)
        raise SystemExit(128 + number)

    def _over(self) -> bool:
        """True when an earlier learner of this run made the last update, and was killed after it. A collective."""
        closed = self.world.is_writer and bool(self.client.status()["closed"])
        return bool(all_max([float(closed)], self.world)[0])

    def finish(self) -> None:
        """What is left after the last update."""
        self.checkpoints.remove()
        if self.recorder is not None:
            self.recorder.wait_for_evaluations(self.config.eval.timeout_s + 30)
        if self.best is not None:
            self.best.finish()

    def train_on(self, shard: Shard, waited: float) -> None:
        """Every batch of one take, one update each."""
        state: TakeState | None = None
        # Before anything moves the weights that the first batch is scored with.
        probes = score_probes(
            self.policy, shard.probes, self.update, shard.bounds[0], self.config, self.info, self.world
        )
        if len(shard.batches) > 1:
            everything = [r for m in range(len(shard.batches)) for r in self._rows(shard, m)]
            state = score_take(self.policy, everything, self.config, self.info, self.world)
        for m in range(len(shard.batches)):
            self.publishing.announce_soon()
            if self.update >= self.config.learner.updates:
                return
            self.dumps.begin(self.policy, self.update, self.epoch, self.carry, self.config)
            started, wall = time.monotonic(), time.time()
            outcome = run_update(
                self.policy, self.updater, self._rows(shard, m), self.update, self.carry, state, self.config,
                self.info, self.world, self.dumps.due, self.reference,
            )  # fmt: skip
            step_s = time.monotonic() - started
            if self.recorder is not None:
                self.recorder.stepped(wall, time.time())
            used_at = self.update
            self._advance(outcome)
            self._commit(shard.take_id, outcome)
            self._seal()
            stopping = any(all_max([self.stop.asked], self.world))
            last = m + 1 == len(shard.batches)
            if not stopping:
                self.publish_if_due(self.config.staleness.updates_per_take if last else 1)
            self.dumps.finish(shard.batches[m], shard.bounds[m], state, outcome)
            self._record(used_at, outcome, step_s, waited, probes if m == 0 else None)
            self._heed_alarms()
            if stopping:
                raise Stopped
            self._save_if_due(outcome)
            waited = 0.0

    def _between(self, *_: object) -> None:
        self.publishing.announce()

    def _rows(self, shard: Shard, batch: int) -> list[Row]:
        masks = self.config.algorithm.truncated == "mask"
        return rows_of(shard.batches[batch], self.update, shard.bounds[batch], self.info, masks)

    def _advance(self, outcome: Outcome) -> None:
        if outcome.step.outcome == "stepped":
            self.update += 1
            self.carry = outcome.selection.carry
            self.skips.stepped()
            self._check_replay(outcome)
            return
        self.skips.note(outcome.step.reason, self.update)

    def _check_replay(self, outcome: Outcome) -> None:
        """R3 that forces nothing is a silent no-op: an error after MAX_UNFORCED updates."""
        if self.config.algorithm.routes != "r3":
            return
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
            ids = list(dict.fromkeys(n[1] for n in outcome.table.names))
            self.client.commit(take_id, self.update, result, ids, self.batches)
        self.batches += 1

    def _save_if_due(self, outcome: Outcome) -> None:
        """A checkpoint every checkpoint_every updates, when what it holds is committed. A collective."""
        every, u = self.config.learner.checkpoint_every, self.update
        if not every or u % every or outcome.step.outcome != "stepped" or u >= self.config.learner.updates:
            return
        s, c = self.config.learner, self.checkpoints
        if c.begin(self.policy, self.updater, self._progress()) and not s.async_checkpoints:
            c.settle(s.checkpoint_timeout_s)

    def _progress(self) -> Progress:
        return Progress(
            self.epoch, self.update, self.batches, self.carry, self.unforced_in_a_row, dict(self.skips.by_reason)
        )

    def _seal(self) -> bool:
        """Give a checkpoint that was written meanwhile its name. True while one is being written. A collective."""
        self.checkpoints.settle()
        return self.checkpoints.pending is not None

    def publish_if_due(self, num_batches: int = 1, final: bool = False) -> None:
        """Publish what is due before a take of num_batches, as far as the run still needs them. A collective."""
        num_batches = self._next_batches(num_batches)
        version = Version(self.epoch, self.update)
        self.publishing.publish_if_due(self.policy, version, self.batches, num_batches, final)

    def _record(self, used_at: int, outcome: Outcome, step_s: float, wait_s: float, probes: Table | None) -> None:
        if self.recorder is None:
            return
        others = {
            **self.skips.scalars(),
            "throughput/sync_s": self.publishing.sync_s,
            **self.publishing.scalars(),
            "staleness/published": float(self.publishing.published),
            "run/epoch": float(self.epoch),
            **self.checkpoints.scalars(),
            **self.dumps.scalars(),
            **self.settings.scalars(),
            **(self.best.scalars() if self.best is not None else {}),
        }
        self.publishing.sync_s = 0.0
        self.recorder.record(used_at, outcome, step_s, wait_s, others, self.config, probes)
        if self.best is not None:
            self.best.settle(self.checkpoints.newest)

    def _heed_alarms(self) -> None:
        """TrainingError on every rank when an alarm ends the run, which then has no newer checkpoint. A collective."""
        ending = None
        if self.recorder is not None:
            ending = self.recorder.alarming.ending
            self.checkpoints.suspect = self.recorder.alarming.suspect()
        since = int(all_max([-1 if ending is None else ending.since], self.world)[0])
        if since < 0:
            return
        self.checkpoints.go_back(since)
        cause = "" if ending is None else ended_by(ending, str(self.checkpoints))
        raise TrainingError(next(filter(None, map(bytes.decode, all_bytes(cause.encode(), self.world)))))

    def close(self) -> None:
        """Flush metrics and close sockets; published versions are removed."""
        self.client.close()
        if self.recorder is not None:
            self.recorder.close()
        self.publishing.close()
        if self.best is not None:
            self.best.close()
        if self.recorder is not None:
            # At an end of its own the last command may be about it; told to stop, the supervisor does not wait for it.
            self.recorder.alarming.close(1.0 if self.stop.asked else self.config.alarms.command_timeout_s)


def _engines(config: Config, world: World) -> Engines:
    """What the carriers must know of the engines."""
    g, w = config.generator, config.weights
    groups = Groups(w.backend, str(world.device), w.bucket_bytes, w.timeout_s)
    return Engines(Path(g.model or config.model.path), g.engine == "sglang", w.quantize, groups)


def run(config: Config, run_dir: Path) -> None:
    """The learner role. Raises TrainingError, TransportError or WeightSyncError with the cause."""
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    world = init_world(config.learner.collective_timeout_s, config.learner.device)
    # Published versions and metrics are closed in order; other ranks may die at once.
    stop = StopSignal(hard=not world.is_writer)
    learner = Learner(config, run_dir, world, stop)
    try:
        learner.run()
    except (Exception, SystemExit) as exc:
        if not stop.asked:
            raise
        if stop.gave_up or not isinstance(exc, SystemExit):
            # Ranks that were cut off tear the others out of their collectives.
            log.warning(
                "told to stop, and cut off in update %d after %g s (of run.shutdown_s): %r; the newest checkpoint: %s",
                learner.update, time_to_leave(config.run.shutdown_s), exc, learner.checkpoints,
            )  # fmt: skip
        raise SystemExit(128 + stop.number) from exc
    finally:
        stop.closing()
        learner.close()
        torch.distributed.destroy_process_group()
