"""What replay answers to Tune, and what follows from a change: its log, evaluations, generators that missed it.

Knows no socket. The caller saves the queue before anybody hears of a change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl import tunable, wire
from asyncrl.errors import ConfigError
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.knobs import Change
from asyncrl.replay.peers import Generator
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.tune_log import TuneLog

TELL_S = 2.0
"""A generator that does not know the newest settings is told of them this often."""


class Tuning:
    """The live settings of one replay. run_dir: where they are logged, None for nowhere."""

    def __init__(
        self, queue: ReplayQueue, evaluations: Evaluations, run_dir: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._queue, self._evaluations, self._clock = queue, evaluations, clock
        self.knobs = queue.knobs
        self._log = TuneLog(run_dir)
        self._followed = 0
        self._told: dict[str, float] = {}

    def begin(self) -> None:
        """Nothing was changed before."""
        self._log.begin()

    def resume(self) -> None:
        """Go on after a restart, when the queue is loaded: what is not in the log yet is written to it."""
        if self._queue.untuned:
            self._log.dropped(self.knobs.seq, self._queue.untuned)
        self._log.changes(self.knobs.changes)
        self.follow()

    def serve(
        self, asker: bytes, request: wire.Tune, generators: Mapping[str, Generator], save: Callable[[], None]
    ) -> list[tuple[bytes, wire.TuneReply | wire.Settings]]:
        """Who is to be told what, by socket identity, when a change is done, saved and logged."""
        before = self.knobs.seq
        reply = self.answer(request)
        save()
        self._log.changes(self.knobs.changes)
        new = [(g.identity, wire.Settings(reply.tuned)) for g in generators.values() if self.knobs.seq > before]
        return [(asker, reply), *new]

    def answer(self, request: wire.Tune) -> wire.TuneReply:
        """Do what is asked for, once per key of a request. Without values and undo: say what is tuned."""
        if not request.values and not request.undo:
            return self._reply(request, True, self.listing())
        knobs, queue = self.knobs, self._queue
        by, update = request.by[:200] or "somebody", queue.clock.update
        try:
            if queue.closed:
                raise ConfigError("the run is over")
            if request.undo and request.values:
                raise ConfigError("either new values or --undo, not both")
            if request.undo < 0:
                raise ConfigError(f"--undo {request.undo}: give a number from 1 on")
            if request.undo:
                change = knobs.undo(request.undo, by, request.key, update, self._clock())
            else:
                change = knobs.change(request.values, by, request.key, update, self._clock())
        except ConfigError as exc:
            return self._reply(request, False, str(exc))
        return self._reply(request, True, self._said(change, request))

    def follow(self) -> None:
        """What follows when a take has put new settings in force."""
        knobs = self.knobs
        if knobs.in_force == self._followed:
            return
        self._followed = knobs.in_force
        self._log.took_effect(knobs.in_force, knobs.since)
        self._evaluations.tune(knobs.config(knobs.at(knobs.in_force)).eval.every)

    def lagging(self, name: str, gauges: Mapping[str, float], now: float) -> wire.Settings | None:
        """What a generator with these gauges is to be told, if anything; now and then."""
        coming = self.knobs.coming
        if gauges.get("tuned", 0.0) == coming.seq or now - self._told.get(name, -TELL_S) < TELL_S:
            return None
        self._told[name] = now
        return wire.Settings(coming)

    def listing(self) -> str:
        """What is tuned now and what can be, for people."""
        knobs = self.knobs
        if knobs.base is None:
            return "this replay serves no config that could be tuned"
        base, tuned, force = tunable.flat(knobs.base), knobs.coming.values, knobs.at(knobs.in_force).values
        changed = {*tuned, *force}
        lines = [
            f"{key} = {tuned.get(key, base[key])}   (config: {base[key]}"
            + ("" if tuned.get(key) == force.get(key) else "; from the next take on")
            + ")"
            for key in base
            if key in changed
        ]
        head = f"{knobs.seq} changes so far" + (f", {knobs.in_force} of them in force" * (knobs.seq > knobs.in_force))
        others = [f"  {key} = {value}" for key, value in base.items() if key not in changed]
        return "\n".join([head, *(lines or ["nothing is tuned"]), "can be tuned (as in the config now):", *others])

    def _said(self, change: Change | None, request: wire.Tune) -> str:
        if change is None:
            return "nothing to change: " + ", ".join(f"{k} is {v} already" for k, v in request.values.items())
        lines = [f"{key}: {old} -> {new}" for key, (old, new) in change.values.items()] or ["no value differs"]
        undone = f", takes back {', '.join(map(str, change.undoes))}" if change.undoes else ""
        at_once = all(tunable.applies(k).startswith("generators") for k in change.values)
        when = "generators apply it now" if at_once else self._when()
        return "\n".join([*lines, f"change {change.seq}{undone}: {when}"])

    def _when(self) -> str:
        """From which update on the newest settings hold, as far as that can be said now."""
        queue, knobs = self._queue, self.knobs
        update, total, newest = queue.next_update, queue.limits.total_updates, queue.clock.newest
        max_lag = knobs.config(knobs.coming).staleness.max_lag
        if total and update >= total:
            return f"too late: the last take, for update {total - 1}, is made"
        if newest is not None and newest.update + max_lag < update:
            return (
                f"from update {update + 1} on at the earliest; for update {update} there is no version yet that "
                f"max_lag={max_lag} would allow"
            )
        paused = all(t.values.get("weights.paused") == "true" for t in (knobs.coming, knobs.at(knobs.in_force)))
        pause = "; a learner that stands still in the pause makes it after weights.paused=false" * paused
        return f"from update {update} on, whose take is the next{pause}"

    def _reply(self, request: wire.Tune, ok: bool, text: str) -> wire.TuneReply:
        return wire.TuneReply(ok, text[:60_000], self.knobs.coming, request.key)
