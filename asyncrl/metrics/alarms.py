"""Alarms: which are on, since when, why, and what to do. Pure: records in, alarms out.

A rule calls every update bad or good. `updates` bad ones among the last `window` turn an alarm on; `clear_after` good
ones in a row turn it off, so that it cannot flap. What an alarm then does is asyncrl.learner.alarming's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from asyncrl.metrics import alarm_fleet as fleet
from asyncrl.metrics import alarm_rules as rules
from asyncrl.metrics.alarm_history import History
from asyncrl.metrics.alarm_rules import Facts, Judgement
from asyncrl.sections.alarms import AlarmRule, AlarmsSection

Judge = Callable[[History, Any, Facts], Judgement | None]

RULES: dict[str, tuple[Judge, str]] = {
    "f_2": (
        rules.f_2,
        "the data is too far from the policy: lower staleness.max_lag or learner.lr, set "
        "algorithm.correction.kind=tis or algorithm.ratio=behaviour; go back to a checkpoint from before",
    ),
    "kl_rising": (
        rules.kl_rising,
        "see whether staleness/lag_mean or optim/grad_norm rose first: lower staleness.max_lag for the one, learner.lr "
        "for the other; without a correction set algorithm.correction.kind=tis",
    ),
    "ess_falling": (
        rules.ess_falling,
        "lower staleness.max_lag or learner.lr; lower algorithm.correction.cap so that single tokens weigh less",
    ),
    "drift_rising": (
        rules.drift_rising,
        "the routers move, age is not the cause: lower learner.lr; see generator/<id>/drift for a single bad "
        "generator and drift/layer_<l> for a single layer",
    ),
    "lag_at_cap": (
        fleet.lag_at_cap,
        "publish more often (lower staleness.sync_every), use fewer generators or fewer groups in flight so that less "
        "waits in the queue; raise staleness.max_lag only while mismatch/* stays low",
    ),
    "learner_starving": (
        fleet.learner_starving,
        "sampling is the slower side: add generators, raise generator.groups_in_flight, or give the learner less to do",
    ),
    "generators_starving": (
        fleet.generators_starving,
        "see throughput/generator_idle/<reason> and the generators' logs",
    ),
    "truncation": (
        rules.truncation,
        "raise sampling.max_new_tokens, or reward shorter answers; a policy that began to ramble needs a lower "
        "learner.lr",
    ),
    "zero_variance": (
        rules.zero_variance,
        "the task is too easy (reward near its best: take harder prompts or stop) or too hard (near its worst: easier "
        "prompts, a larger algorithm.group_size)",
    ),
    "dead_experts": (
        rules.dead_experts,
        "the routers collapsed: lower learner.lr and go back to a checkpoint from before; an update of few tokens "
        "leaves experts out by chance, then raise algorithm.groups_per_update or alarms.dead_experts.above",
    ),
    "reward_length_collapse": (
        rules.reward_length_collapse,
        "the policy fell apart: go back to a checkpoint from before with a lower learner.lr or staleness.max_lag, and "
        "read what it answers now",
    ),
    "dead_generator": (fleet.dead_generator, "see the logs of the generators and of their hosts; start them again"),
    "masked_tokens": (
        fleet.masked_tokens,
        "raise staleness.max_lag, lower staleness.sync_every, or use more generators with fewer groups in flight; "
        "where long answers are left out the policy learns to answer briefly",
    ),
    "unweighted_tokens": (
        rules.unweighted_tokens,
        "widen the bounds of algorithm.correction (low and high of mask, bound of trm), lower staleness.max_lag, or "
        "use a correction that weighs and drops nothing, such as tis",
    ),
    "skipped_updates": (
        rules.skipped_updates,
        "the learner's log names the rows or weights; docs/learner.md says where to look for each reason",
    ),
    "reward_errors": (
        fleet.reward_errors,
        "the generators' logs have the errors of the verifier; raise generator.reward_timeout_s when it is slow",
    ),
    "not_finite": (
        rules.not_finite,
        "lower learner.lr or use model.dtype=float32; the learner's log names what was not finite",
    ),
}
"""Every alarm: when an update is bad, and what to do about it."""


class Alarm(NamedTuple):
    """An alarm that is on. since: its first bad update; text: the cause with its numbers; remedy: what to do."""

    name: str
    since: int
    text: str
    remedy: str


class Changes(NamedTuple):
    """What one record changed. active: all that are on now."""

    active: list[Alarm]
    on: list[Alarm]
    off: list[Alarm]


class _Track:
    """The last updates of one alarm as its rule judged them."""

    def __init__(self) -> None:
        self.judged: deque[tuple[int, bool]] = deque(maxlen=1)
        self.num_good = 0
        self.alarm: Alarm | None = None

    @property
    def suspect(self) -> int | None:
        """The first bad update of an alarm that is on, or that may go on."""
        if self.alarm is not None:
            return self.alarm.since
        return next((update for update, bad in self.judged if bad), None)

    def note(self, name: str, update: int, found: Judgement, rule: AlarmRule, clear_after: int) -> None:
        """Judge one more update."""
        if self.judged.maxlen != rule.window:
            self.judged = deque(self.judged, maxlen=rule.window)
        self.judged.append((update, found.bad))
        self.num_good = 0 if found.bad else self.num_good + 1
        since = next((u for u, bad in self.judged if bad), update)
        if self.alarm is not None:
            since = self.alarm.since
            if self.num_good >= clear_after:
                self.alarm = None
                self.judged.clear()
                return
        if found.bad and (self.alarm is not None or sum(bad for _, bad in self.judged) >= rule.updates):
            text = f"{found.text}; so in {sum(bad for _, bad in self.judged)} of the last {len(self.judged)} updates"
            self.alarm = Alarm(name, since, text, found.remedy or RULES[name][1])


class Alarms:
    """The alarms of one run. Thresholds are read anew with every record: they may be live settings."""

    def __init__(self) -> None:
        self._history = History()
        self._tracks: dict[str, _Track] = {}

    def check(self, record: Mapping[str, float], update: int, section: AlarmsSection, facts: Facts) -> Changes:
        """Judge one record. What is disabled meanwhile goes off at once."""
        self._history.add(update, record)
        before = self.active
        watched = {name: rule for name, rule in section.rules().items() if rule.enabled and section.enabled}
        self._tracks = {name: self._tracks.get(name) or _Track() for name in watched}
        for name, rule in watched.items():
            found = RULES[name][0](self._history, rule, facts)
            if found is not None:
                self._tracks[name].note(name, update, found, rule, section.clear_after)
        active = self.active
        was, now = {a.name for a in before}, {a.name for a in active}
        return Changes(active, [a for a in active if a.name not in was], [a for a in before if a.name not in now])

    def replay(self, records: Iterable[Mapping[str, float]], section: AlarmsSection, facts: Facts) -> list[Alarm]:
        """Judge what an earlier learner recorded, `update` and `time` included. Returns what is on then."""
        for record in records:
            values = {k: v for k, v in record.items() if k not in ("update", "time")}
            self.check(values, int(record["update"]), section, facts)
        return self.active

    @property
    def active(self) -> list[Alarm]:
        """All that are on."""
        return [track.alarm for track in self._tracks.values() if track.alarm is not None]

    def suspect(self, names: Iterable[str]) -> int | None:
        """The first bad update of those of these alarms that are on or may go on; None without one."""
        found = [self._tracks[n].suspect for n in names if n in self._tracks]
        return min((u for u in found if u is not None), default=None)

    def scalars(self) -> dict[str, float]:
        """alarm/<name>: 1 for those that are on, 0 for the other enabled ones."""
        return {f"alarm/{name}": float(track.alarm is not None) for name, track in self._tracks.items()}
