"""What rank 0 writes down: one record per update, and one per evaluation that replay finished."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from asyncrl.learner.client import ReplayClient
from asyncrl.learner.fleet import FleetRates
from asyncrl.learner.records import Scalars, histograms, update_scalars, work_scalars
from asyncrl.learner.update import Outcome
from asyncrl.metrics.sink import Sink
from asyncrl.types import ModelInfo

log = logging.getLogger(__name__)


class Recorder:
    """Joins an update's numbers with those of replay and hands them to the sink.

    evaluated: labels of evaluations that are recorded already. histograms_every: updates between histograms, 0: never.
    """

    def __init__(
        self, sink: Sink, client: ReplayClient, info: ModelInfo, evaluated: set[str], histograms_every: int
    ) -> None:
        self._sink, self._client, self._info = sink, client, info
        self._evaluated, self._histograms_every = evaluated, histograms_every
        self._fleet = FleetRates()
        self._time = time.monotonic()

    def stepped(self, start: float, end: float) -> None:
        """A step by wall-clock seconds, for its overlap with generation."""
        self._fleet.overlap.step(start, end)

    def record(self, update: int, outcome: Outcome, step_s: float, wait_s: float, others: Mapping[str, float]) -> None:
        """One update with what else its loop knows. Asks replay for its state, at most run.start_timeout_s."""
        now = time.monotonic()
        span, self._time = now - self._time, now
        state = self._client.status()
        scalars: Scalars = update_scalars(outcome, self._info) | self._fleet.scalars(state, span)
        scalars |= {
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
        every = self._histograms_every
        self._sink.write(update, scalars, histograms(outcome) if every and update % every == 0 else None)
        self._record_evaluations(state["evaluations"])

    def _record_evaluations(self, evaluations: list[dict[str, Any]]) -> None:
        for e in evaluations:
            if str(e["label"]) in self._evaluated:
                continue
            self._evaluated.add(str(e["label"]))
            values = {f"eval/{k}": float(v) for k, v in e.items() if isinstance(v, int | float)}
            self._sink.write(int(values["eval/version"]), values)
            log.info("evaluation %s", json.dumps(e, default=str))

    def wait_for_evaluations(self, timeout_s: float) -> None:
        """Waits for replay to finish the last evaluation, at most timeout_s."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = self._client.status()
            self._record_evaluations(state["evaluations"])
            if state["finished"]:
                return
            time.sleep(0.1)
        log.warning("the last evaluation did not finish within %g s", timeout_s)

    def close(self) -> None:
        """Flush and close the files."""
        self._sink.close()
