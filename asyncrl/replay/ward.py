"""What a quarantine does to queue, evaluations and peers: verdicts of the learner, re-syncs that are due. No socket."""

from __future__ import annotations

import logging

from asyncrl import wire
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.peers import Peers
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import fewest_sound

log = logging.getLogger(__name__)


class Ward:
    """Connects the quarantine with those whom it concerns."""

    def __init__(self, queue: ReplayQueue, evaluations: Evaluations, peers: Peers) -> None:
        self._queue, self._evaluations, self._peers = queue, evaluations, peers

    def is_out(self, name: str) -> bool:
        """True for a generator in quarantine."""
        return name in self._queue.quarantine.barred

    def judge(self, verdict: wire.Verdict, now: float) -> None:
        """A verdict of the learner. What a generator that is out had is given out again."""
        name, quarantine = verdict.generator_id, self._queue.quarantine
        generator = self._peers.generators.get(name)
        if generator is None or verdict.boot not in ("", generator.boot_id):
            return
        alive = {n for n, g in self._peers.generators.items() if g.alive}
        done = quarantine.judge(
            name, verdict.sound, verdict.reason, generator.boot_id, len(alive - quarantine.barred),
            fewest_sound(len(alive)), self._queue.clock.update, now,
        )  # fmt: skip
        if done == "out":
            self._queue.bar(name)
            self._evaluations.bar(name)

    def answers(self, name: str, result: wire.EvalResult) -> bool:
        """Whether evaluation answers of a generator count: not while it is out."""
        if self.is_out(name):
            self._queue.tally.count("quarantined")
            return False
        self._evaluations.put(result)
        return True

    def tick(self, source: str, now: float) -> list[tuple[str, wire.Resync]]:
        """Re-syncs that are due, by generator. Lets all in again when none that lives is sound."""
        quarantine, newest = self._queue.quarantine, self._queue.clock.newest
        alive = {n for n, g in self._peers.generators.items() if g.alive}
        quarantine.forget(alive, now)
        if not quarantine.cases or newest is None:
            return []
        quarantine.relieve(len(alive), len(alive - quarantine.barred), now)
        out = []
        for name in sorted(alive & quarantine.barred):
            gauges = self._peers.generators[name].gauges
            if quarantine.due(name, gauges.get("resyncs", 0.0), bool(gauges.get("loading")), now):
                out.append((name, wire.Resync(newest.epoch, newest.update, source)))
        return out
