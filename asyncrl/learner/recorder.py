"""What rank 0 writes down: one record per update, and one per evaluation that replay finished."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from asyncrl.config import Config
from asyncrl.learner.alarming import Alarming
from asyncrl.learner.best import Best
from asyncrl.learner.client import ReplayClient
from asyncrl.learner.fleet import FleetRates
from asyncrl.learner.idle import learner_idle
from asyncrl.learner.records import Scalars, histograms, update_scalars, work_scalars
from asyncrl.learner.sentinel import Order, Sentinel
from asyncrl.learner.table import Table
from asyncrl.learner.update import Outcome
from asyncrl.metrics.sink import Sink
from asyncrl.types import ModelInfo, Version

log = logging.getLogger(__name__)


def absent(config: Config) -> tuple[str, ...]:
    """Beginnings of the metric names that no record of this run has, whatever is tuned."""
    a = config.algorithm
    missing = {f"{routes}/": a.routes != routes for routes in ("r3", "r2")}
    missing |= {"policy/ref_kl": not a.kl.coef, "policy/kl_loss": not a.kl_in_loss}
    missing["eval/"] = config.eval.every == 0
    # Of a single generator there is no fleet to compare it with.
    missing["sentinel/"] = config.generator.count < 2 and config.replay.connect is None
    # Under r2 the only batch of a take has one all the same.
    missing["drift/"] = a.routes == "r3" and a.native_drift_every == 0
    return tuple(name for name, yes in missing.items() if yes)


def evaluation_scalars(evaluation: Mapping[str, Any]) -> Scalars:
    """The record of an evaluation that replay finished: eval/<name>, and eval/<set>/<name> of every set."""
    values = {f"eval/{k}": float(v) for k, v in evaluation.items() if isinstance(v, int | float)}
    for name, numbers in (evaluation.get("sets") or {}).items():
        values |= {f"eval/{name}/{k}": float(v) for k, v in numbers.items()}
    return values


def _failed(evaluation: Mapping[str, Any]) -> str:
    """By set: responses without an answer, which no mean counts."""
    words = []
    for name, s in (evaluation.get("sets") or {}).items():
        if failed := s.get("failed"):
            words.append(f"{failed:.0f} of {failed + s['count']:.0f} responses to {name}")
    return ", ".join(words) or "unknown"


class Recorder:
    """Joins an update's numbers with those of replay and hands them to the sink.

    evaluated: labels of evaluations that are recorded already.
    """

    def __init__(
        self,
        sink: Sink,
        client: ReplayClient,
        info: ModelInfo,
        evaluated: set[str],
        alarming: Alarming,
        sentinel: Sentinel | None = None,
    ) -> None:
        self._sink, self._client, self._info, self.alarming = sink, client, info, alarming
        self._sentinel = sentinel
        self.best: Best | None = None
        self._evaluated = evaluated
        self._fleet = FleetRates()
        self._fleet.begin(client.status())
        self._time, self._recording_s = time.monotonic(), 0.0

    def stepped(self, start: float, end: float) -> None:
        """A step by wall-clock seconds, for its overlap with generation."""
        self._fleet.overlap.step(start, end)

    def record(
        self,
        update: int,
        outcome: Outcome,
        step_s: float,
        wait_s: float,
        others: Mapping[str, float],
        config: Config,
        probes: Table | None = None,
    ) -> None:
        """One update with what else its loop knows. Asks replay for its state, at most run.start_timeout_s.

        config: the settings in force. probes: what generators in quarantine sampled, scored.
        """
        now = time.monotonic()
        span, self._time = now - self._time, now
        state = self._client.status()
        scalars: Scalars = update_scalars(outcome, self._info) | self._fleet.scalars(state, span)
        idle = learner_idle(
            span, step_s, wait_s, self._fleet.since("take_waits", state["take_waits"]) or {},
            publishing=others.get("throughput/sync_s", 0.0), checkpoint=others.get("run/checkpoint_s", 0.0),
            records=self._recording_s,
        )  # fmt: skip
        scalars |= {
            **{f"throughput/learner_idle/{reason}": share for reason, share in idle.items()},
            "optim/stepped": float(outcome.step.outcome == "stepped"),
            "throughput/step_s": step_s,
            "throughput/wait_s": wait_s,
            "throughput/update_s": span,
            "throughput/learner_busy_fraction": min(1.0, step_s / span) if span > 0 else 0.0,
            "throughput/learner_tokens_per_s": float(outcome.table["tokens"].sum()) / span if span > 0 else 0.0,
            "throughput/fused_scoring": float(outcome.fused),
            **work_scalars(outcome),
            **others,
        }
        if config.algorithm.zero_variance == "refill":
            refilled, kept = scalars.get("replay/dropped_now/zero_variance", 0.0), len(outcome.table.groups)
            scalars["policy/refilled_fraction"] = refilled / max(1.0, refilled + kept)
        orders, judged = self.judge(update, outcome.table, probes, state, config)
        scalars |= judged
        found = self._sentinel.alarms() if self._sentinel is not None else []
        news = self.alarming.check(update, scalars, config, found)
        scalars |= self.alarming.scalars()
        every = config.logging.histograms_every
        self._sink.write(update, scalars, histograms(outcome) if every and update % every == 0 else None)
        self._client.report(update, scalars, news.messages())
        for order in orders:
            self._client.verdict(*order)
        self.alarming.act(update, news, self.alarm_text)
        self._record_evaluations(state)
        self._recording_s = time.monotonic() - now

    def judge(
        self, update: int, table: Table, probes: Table | None, state: Mapping[str, Any], config: Config
    ) -> tuple[list[Order], dict[str, float]]:
        """What the sentinel tells replay, and its metrics, under the settings in force."""
        if self._sentinel is None or not self._sentinel.follow(config.sentinel):
            return [], {}
        orders = self._sentinel.observe(update, table, probes, state)
        return orders, self._sentinel.scalars(state)

    def resolved(self, update: int, config: str) -> None:
        """The resolved config as YAML, for the dashboard's texts."""
        self._sink.text(update, "run/config", f"```yaml\n{config.strip()}\n```")

    def tuned(self, update: int, text: str) -> None:
        """A live change of the settings that is in force from `update` on, in markdown."""
        self._sink.text(update, "run/tuned", text)

    def alarm_text(self, update: int, text: str) -> None:
        """An alarm that went on or off with the record of `update`, in markdown."""
        self._sink.text(update, "run/alarms", text)

    def _record_evaluations(self, state: Mapping[str, Any]) -> None:
        if self.best is not None:
            self.best.measuring = frozenset(Version(*version) for version in state["measuring"])
        for e in state["evaluations"]:
            if str(e["label"]) in self._evaluated:
                continue
            self._evaluated.add(str(e["label"]))
            values = evaluation_scalars(e)
            if self.best is not None:
                # First: what the records hold is not told again after a resume.
                self.best.measured(Version(int(e["epoch"]), int(e["version"])), values, e["status"] == "complete")
            self._sink.write(int(values["eval/version"]), values)
            log.info("evaluation %s", json.dumps(e, default=str))
            if e["status"] != "complete":
                log.warning("evaluation %s was %s; without an answer: %s", e["label"], e["status"], _failed(e))

    def wait_for_evaluations(self, timeout_s: float) -> None:
        """Waits for replay to finish the last evaluation, at most timeout_s."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = self._client.status()
            self._record_evaluations(state)
            if state["finished"]:
                return
            time.sleep(0.1)
        log.warning("the last evaluation did not finish within %g s", timeout_s)

    def close(self) -> None:
        """Flush and close the files."""
        self._sink.close()
