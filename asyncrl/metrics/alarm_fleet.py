"""Whether an update was bad, for every alarm on how the run goes: age of the data, waiting, generators, rewards."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.metrics.alarm_history import SPAN_S, History, Point, growths
from asyncrl.metrics.alarm_rules import Facts, Judgement
from asyncrl.sections import alarms as sections

IDLE: dict[str, str] = {
    "version_too_old": "their weights are too old for what they would sample: lower staleness.sync_every or raise "
    "staleness.max_lag, and see whether loads fail (generator/failed_loads)",
    "ahead_full": "enough groups are ahead of the learner: the learner is the slower side; use fewer generators, give "
    "the learner more ranks, or raise staleness.max_lag",
    "capacity": "replay.capacity_bytes is full: raise it",
    "no_version": "the learner has published nothing they could load: see its log",
    "unknown_version": "they hold versions that the learner never published: see whether two runs share a folder or an "
    "address",
    "loading": "they load weights: raise staleness.sync_every, or see why loads take long (generator/<id>/load_s)",
    "recovering": "replay was started again and waits for its generators: see its log if this goes on",
}
"""Why generators idle (throughput/generator_idle/<reason>), and what to do."""


def lag_at_cap(h: History, s: sections.LagAlarm, facts: Facts) -> Judgement | None:
    """The data is as old as it may be, and that costs."""
    lag = h.get("staleness/lag_p90")
    if lag is None:
        return None
    ess, left = h.get("mismatch/ess"), max(_left_out(h), h.get("staleness/masked_token_fraction") or 0.0)
    costs = []
    if ess is not None and ess < s.ess:
        costs.append(f"the effective sample is {ess:.0%} of the tokens")
    if left > s.left_out:
        costs.append(f"{left:.0%} of the data is left out for its age")
    at_cap = facts.max_lag > 0 and lag >= facts.max_lag
    return Judgement(
        at_cap and bool(costs),
        f"the oldest tenth of the responses is {lag:.0f} updates old, the limit of staleness.max_lag={facts.max_lag}, "
        f"and {' and '.join(costs)}",
    )


def masked_tokens(h: History, s: sections.MaskedAlarm, _: Facts) -> Judgement | None:
    """The staleness limit leaves much out."""
    share, longest = h.get("staleness/masked_token_fraction"), h.get("staleness/masked_decile_9")
    if share is None:
        return None
    dropped = _left_out(h)
    in_long = longest is not None and longest > s.long_above and longest >= 2 * share
    text = f"{share:.0%} of the tokens are masked for their age (limit {s.above:.0%})"
    if dropped > s.above:
        text += f"; {dropped:.0%} of the responses are dropped for their age"
    if in_long:
        text += f"; of the longest tenth of the responses it is {longest:.0%}: long answers hardly train"
    return Judgement(share > s.above or dropped > s.above or in_long, text)


def _left_out(h: History) -> float:
    """Share of the responses since the record before that were dropped for their age."""
    left = h.growth("staleness/left_out/count") or 0.0
    trained = h.growth("staleness/trained/count") or 0.0
    return left / (left + trained) if left else 0.0


def learner_starving(h: History, s: sections.StarvingAlarm, _: Facts) -> Judgement | None:
    """The learner waits for data."""
    found = h.busy("throughput/learner_busy_fraction", s.seconds)
    if found is None:
        return None
    busy, span = found
    sampling = h.busy("throughput/generator_busy_fraction", s.seconds)
    text = f"over the last {span:.0f} s the learner worked {busy:.0%} of the time and waited for data otherwise"
    if sampling is None:
        return Judgement(busy < s.below, text)
    text += f"; the generators were sampling {sampling[0]:.0%} of the time"
    cause = _idle_reason(h, s.seconds)
    remedy = f"the generators stand still as well: {IDLE[cause]}" if sampling[0] < 0.5 and cause else ""
    return Judgement(busy < s.below, text, remedy)


def generators_starving(h: History, s: sections.StarvingAlarm, _: Facts) -> Judgement | None:
    """The generators stand still."""
    found = h.busy("throughput/generator_busy_fraction", s.seconds)
    if found is None or not h.get("generator/alive"):
        return None
    busy, span = found
    cause = _idle_reason(h, s.seconds)
    why = f"; most of the rest went to {cause}" if cause else ""
    text = f"over the last {span:.0f} s the generators were sampling {busy:.0%} of the time{why}"
    return Judgement(busy < s.below, text, IDLE.get(cause, ""))


def _idle_reason(h: History, seconds: float) -> str:
    """What took most of the generators' idle time in the newest records; "" when nothing stands out by name."""
    shares = dict.fromkeys(IDLE, 0.0)
    for point in h.over(seconds):
        took = point.values.get("throughput/update_s", 0.0)
        for reason in IDLE:
            shares[reason] += took * point.values.get(f"throughput/generator_idle/{reason}", 0.0)
    reason = max(shares, key=shares.__getitem__)
    return reason if shares[reason] > 0 else ""


def dead_generator(h: History, s: sections.GeneratorAlarm, facts: Facts) -> Judgement | None:
    """A generator that lived is silent, or fewer came than were asked for."""
    alive = h.get("generator/alive")
    if alive is None:
        return None
    now = h.generators()
    dead = sorted(name for name, lives in now.items() if not lives)
    gone = [n for n in dead if h.lived(n)]
    if gone:
        names = ", ".join(gone[:5]) + f" and {len(gone) - 5} more" * (len(gone) > 5)
        return Judgement(True, f"no heartbeat from {names}; {alive:.0f} generators are alive")
    lived_s = sum(p.values.get("throughput/update_s", 0.0) for p in h.points)
    missing = lived_s >= s.seconds and alive < facts.num_generators
    return Judgement(missing, f"{alive:.0f} of generator.count={facts.num_generators} generators are alive")


def _missing(h: History, s: sections.RewardErrorAlarm, facts: Facts) -> Judgement | None:
    """A bad update that lacks responses where scoring fails; None for any other.

    What it lacks is exact; why it does (on_timeout=partial is another cause) generators count, over several updates.
    """
    here = h.get("policy/responses")
    if not here or facts.num_responses - here <= s.above * facts.num_responses:
        return None
    recent = list(h.points)[-(len(list(h.over(SPAN_S))) + 1) :]
    lacking = sum(facts.num_responses - p.values.get("policy/responses", 0.0) for p in recent[1:])
    left_out = _left_without(recent)
    if not left_out or left_out < lacking / 2:
        return None
    return Judgement(
        True,
        f"{facts.num_responses - here:.0f} of the {facts.num_responses} responses of this update are missing; "
        f"{left_out:.0f} responses have no reward over the last {len(recent) - 1} updates, which lack {lacking:.0f}",
    )


def _left_without(points: Sequence[Point]) -> float:
    """Responses without a reward from the first to the last of these records."""
    return sum(sum(growths(points, f"verifier/{what}").values()) for what in ("errors", "timeouts"))


def reward_errors(h: History, s: sections.RewardErrorAlarm, facts: Facts) -> Judgement | None:
    """Groups that went back without a reward, and responses that were left out for it, against what was trained."""
    if (missing := _missing(h, s, facts)) is not None:
        return missing
    span = h.span()
    if span is None:
        return None
    responses = sum(p.values.get("policy/responses", 0.0) for p in span[1:])
    if not responses:
        return None
    failed, trained = sum(growths(span, "generator/", "/reward_errors").values()), responses / facts.group_size
    left_out = _left_without(span)
    text = f"{failed:.0f} groups could not be scored while {trained:.0f} were trained"
    if left_out:
        text += f"; {left_out:.0f} responses have no reward, against {responses:.0f} that trained"
    if len(span) > 2:
        text += f", over {len(span) - 1} updates"
    bad = failed > s.above * (failed + trained) or left_out > s.above * (left_out + responses)
    return Judgement(bad, text)
