"""The fate of every group that replay acknowledged: how many of them were lost, and how the others were resolved.

An acknowledged group has two keepers: the process of replay that holds its payload, and the generator's process,
which sends it again. It may be lost when both ended, or the one ended while the other could not be reached. Otherwise
it is trained or reported, and its prompt is given out again only when the group was undone, evicted or too old.
A `Hold` takes the acknowledgement back: there was no room, and from then on only the generator has it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from chaos_lib.evidence import Evidence, Record, Settings
from chaos_lib.timeline import Fork, is_lost, is_undone

SLACK_S = 1.0
"""Two connections are read side by side: what lies closer together may have happened in either order."""


OUT_OF_REACH = ("stop", "partition", "partition_up", "partition_down", "bandwidth")
"""Faults during which a living process cannot be heard."""


class Ack(NamedTuple):
    """One acknowledgement: when, of whose result, by which process of replay."""

    t: float
    generator: str
    client: int
    replay: int
    versions: tuple[tuple[int, int], ...]


@dataclass
class Fates:
    """Acknowledged groups by fate. lost and unexplained name groups."""

    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    again: Counter[str] = field(default_factory=Counter)
    """Why prompts of acknowledged groups were given out again."""


@dataclass
class Story:
    """What happened to one group id, in order."""

    acks: list[Ack] = field(default_factory=list)
    leases: list[float] = field(default_factory=list)
    holds: list[tuple[float, str, int]] = field(default_factory=list)
    """When replay said that a generator's process must keep it, for want of room."""


def stories(tap: list[Record]) -> dict[str, Story]:
    """Every group id with its acknowledgements and leases."""
    found: dict[str, Story] = defaultdict(Story)
    sent: dict[tuple[str, int, str], tuple[tuple[int, int], ...]] = {}
    for e in tap:
        who = (e["link"], e["client"])
        if e["kind"] == "group":
            sent[(*who, e["id"])] = tuple((v[0], v[1]) for v in e["versions"])
        elif e["kind"] == "leases":
            for group_id, _ in e["given"]:
                found[group_id].leases.append(e["t"])
        elif e["kind"] == "hold":
            for group_id in e["ids"]:
                found[group_id].holds.append((e["t"], *who))
        elif e["kind"] == "ack" and e["link"] != "learner":
            for group_id in e["admitted"]:
                found[group_id].acks.append(Ack(e["t"], *who, e["replay"], sent.get((*who, group_id), ())))
    return dict(found)


def fates(evidence: Evidence, undone: list[Record], resolved: set[str], fork: dict[int, Fork]) -> Fates:
    """Judge every acknowledged group. resolved: ids that were trained or reported; undone: rolled back commits."""
    out = Fates()
    life, clock = _Life(evidence.faults), _Clock(evidence.tap)
    rolled_back = _rollbacks(evidence.tap, undone, fork)
    known = {group_id: story for group_id, story in stories(evidence.tap).items() if story.acks}
    out.acknowledged = len(known)
    evicted: list[tuple[float, float, str, str]] = []
    for group_id, story in known.items():
        for leased in story.leases:
            before = [a for a in story.acks if a.t < leased - SLACK_S]
            # Every lease after an acknowledgement needs a reason; a later acknowledgement begins anew.
            if not before:
                continue
            why = "rolled_back" * _use(rolled_back[group_id], 0.0, leased) or _both_gone(before, leased, life)
            if not why and _held(before[-1], leased, story, life):
                why = "held"
            if why:
                out.again[why] += 1
            else:
                age = _age(before[-1], leased, clock, evidence.settings, fork)
                evicted.append((leased, before[-1].t, group_id, age))
    counted = _evictions(evidence.status)
    for leased, acked, group_id, age in sorted(evicted):
        why = next((reason for reason in EVICTIONS[age] if _use(counted[reason], acked, leased)), "")
        out.again[why or "lost"] += 1
        if not why:
            out.lost.append(group_id)
    end = max((e["t"] for e in evidence.tap), default=0.0)
    for group_id in known.keys() - resolved - set(out.lost):
        if _vanished(known[group_id], end, life, evidence):
            out.lost.append(group_id)
    return out


Spans = list[tuple[float, float]]
"""When each of several things happened, not before and not after."""


def _use(spans: Spans, start: float, end: float) -> bool:
    """True when one of them may have happened between start and end; it excuses nothing else from then on."""
    fits = [s for s in spans if s[0] <= end + SLACK_S and s[1] >= start - SLACK_S]
    if fits:
        spans.remove(min(fits, key=lambda s: s[1]))
    return bool(fits)


def _rollbacks(tap: list[Record], undone: list[Record], fork: dict[int, Fork]) -> defaultdict[str, Spans]:
    """When commits of a group were undone: with the first version of a run epoch that cannot know them."""
    began: dict[int, float] = {}
    for e in tap:
        if e["kind"] == "published":
            began.setdefault(e["version"][0], e["t"])
    found: defaultdict[str, Spans] = defaultdict(list)
    for line in undone:
        t = min(began[epoch] for epoch, f in fork.items() if epoch > line["epoch"] and is_undone(line, f))
        found[line["group_id"]].append((t, t))
    return found


def _evictions(status: list[Record]) -> dict[str, Spans]:
    """When replay counted evicted groups, by reason: between two of its answers."""
    spans: dict[str, Spans] = {reason: [] for reasons in EVICTIONS.values() for reason in reasons}
    before: Counter[str] = Counter()
    last = 0.0
    for s in status:
        for reason, found in spans.items():
            now = int(s["counters"].get(reason, 0))
            found += [(last, s["t"])] * (now - before[reason])
            # A replay that was started again may know less.
            before[reason] = now
        last = s["t"]
    return spans


def _age(ack: Ack, leased: float, clock: _Clock, settings: Settings, fork: dict[int, Fork]) -> str:
    """lost_version, stale or young, by the versions in the group's frames and the clock at that lease."""
    epoch, update = clock.at(leased)
    if any(is_lost(v, epoch, fork) for v in ack.versions):
        return "lost_version"
    young = max if settings.stale == "mask" else min
    # Without versions (its frames were not seen) nothing is known of its age.
    return "stale" if ack.versions and young(v[1] for v in ack.versions) + settings.max_lag < update else "young"


EVICTIONS = {"lost_version": ("lost_version",), "stale": ("stale", "overtaken"), "young": ("overtaken",)}
"""Counters that can explain why a group of that age was given out again. What was overtaken may be too old by the
time of the lease; what is young enough to be used can only have been overtaken."""


def _both_gone(acks: list[Ack], leased: float, life: _Life) -> str:
    """How it came that nobody had the group: its processes of replay and its generator's ended, or else ""."""
    last = acks[-1]
    died = [life.died("replay", a.replay) for a in acks if (a.generator, a.client) == (last.generator, last.client)]
    if max(died) > leased:
        return ""
    if life.died(last.generator, last.client) <= leased:
        return "both_ended"
    return "one_out_of_reach" * any(life.troubled(role, max(died), leased) for role in (last.generator, "replay"))


def _held(ack: Ack, leased: float, story: Story, life: _Life) -> bool:
    """True when the generator was told to keep the group, and then ended with it or was out of reach."""
    told = [t for t, name, client in story.holds if (name, client) == ack[1:3] and ack.t <= t < leased]
    return bool(told) and (
        life.died(ack.generator, ack.client) <= leased or life.troubled(ack.generator, told[0], leased)
    )


def _vanished(story: Story, end: float, life: _Life, evidence: Evidence) -> bool:
    """True for a group that nobody resolved although the run trained on long after it was seen last."""
    last = max([a.t for a in story.acks] + story.leases)
    later = sum(len(e["ids"]) for e in evidence.tap if e["kind"] == "commit" and e["t"] > max(last, life.last_fault))
    bound = 2 * (evidence.settings.max_lag + 2) * evidence.settings.groups_per_update
    return later > bound and end - last > 60


class _Life:
    """When processes ended, and when roles and links were in trouble."""

    def __init__(self, faults: list[Record]) -> None:
        self._died: dict[tuple[str, int], float] = {}
        self._trouble: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.last_fault = max((e["t"] for e in faults if e["event"] == "fault"), default=0.0)
        for e in faults:
            if e["event"] == "exit":
                self._note(e["role"], e["incarnation"], e["t"])
            elif e["event"] == "fault":
                if e["kind"] == "kill" and e["target"] != "rank":
                    self._note(e["name"], e["incarnation"], e["t"])
                # A killed role has ended, which is another thing; after a reset the peers find each other at once.
                if e["kind"] in OUT_OF_REACH:
                    self._trouble[e["name"]].append((e["t"], e["t"] + e["seconds"] + 5.0))

    def _note(self, role: str, incarnation: int, t: float) -> None:
        self._died[role, incarnation] = min(t, self.died(role, incarnation))

    def died(self, role: str, incarnation: int) -> float:
        """When a process was killed, or its end was noticed; infinity while it lives."""
        return self._died.get((role, incarnation), float("inf"))

    def troubled(self, role: str, start: float, end: float) -> bool:
        """True when this role was frozen or its link cut or narrow within that time."""
        return any(a < end and b > start for a, b in self._trouble[role])


class _Clock:
    """Run epoch and update of the newest commit or publication, by time."""

    def __init__(self, tap: list[Record]) -> None:
        self._at: list[tuple[float, int, int]] = []
        epoch = 0
        for e in tap:
            if e["kind"] == "published":
                epoch = max(epoch, e["version"][0])
                self._at.append((e["t"], epoch, e["version"][1]))
            elif e["kind"] == "commit":
                self._at.append((e["t"], epoch, e["update"]))

    def at(self, t: float) -> tuple[int, int]:
        """Epoch and update at a time, a second later at most."""
        known = [(epoch, update) for when, epoch, update in self._at if when <= t + SLACK_S]
        return known[-1] if known else (0, 0)
