"""Generators that the learner's sentinel found faulty: no leases, a re-sync, a probe, and back or out. Pure.

out -> resync -> probe -> judged -> in again, or out once more after a back-off; after max_resyncs it is set aside. A
generator that comes back as a new process is probed at once. Probes are leases of their own: they are no groups of the
ledger, move no cursor, count for no update, and are made anew whenever one of them is lost. `now` is passed in.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from asyncrl.arrays import Buffer
from asyncrl.config import Config
from asyncrl.replay.ledger import Lease, lease_id_of
from asyncrl.types import Prompt, Version
from asyncrl.wire import GroupHead

log = logging.getLogger(__name__)

PROBE = "probe/"
"""Group ids of probes begin so; no data epoch does."""
PROBE_S = 5.0
"""Probes of one generator do not follow faster than this: whoever fails them at once must not fill the log."""
RESYNC_S = 15.0
"""A re-sync that was asked for and did not come is asked for again after this long."""
STARVED_S = 20.0
"""So long may every living generator be out before they are let in again: a faulty fleet is better than none."""
FORGET_S = 600.0
"""A generator that is out and gone for so long is forgotten; its alarm ends with that."""
VERDICT_TAKES = 3
"""A probe on which the learner says nothing in so many takes is made anew: it had nothing to compare it with."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the config says. probe_groups: of one probe; resync: whether generators are re-synced and probed;
    enabled: whether any is quarantined at all."""

    resync: bool = True
    probe_groups: int = 4
    max_resyncs: int = 3
    backoff_s: float = 10.0
    enabled: bool = True


def rules_of(config: Config) -> Rules:
    """The rules of a run."""
    s = config.sentinel
    half_window = -(-s.window // (2 * config.algorithm.group_size))
    enabled = s.enabled and s.action != "alarm"
    return Rules(s.action == "resync", s.probe_groups or half_window, s.max_resyncs, s.backoff_s, enabled)


class ProbeClaim(NamedTuple):
    """Leases of probes to stop sampling, and those whose results to forget."""

    useless: list[str]
    void: list[str]


class CaseState(NamedTuple):
    """A case on disk: what was under way begins again."""

    name: str
    boot: str
    reason: str
    resyncs: int
    set_aside: bool
    update: int


class QuarantineState(NamedTuple):
    """The quarantine on disk."""

    cases: list[CaseState]
    past: list[tuple[str, str, int]]
    num_probes: int


@dataclass(slots=True)
class Case:
    """One generator. phase: waiting (until `after`), resync, probe, judged (with the learner) or set_aside.

    asked: the generator's re-syncs when one was asked for; asked_at: when that was last, None before. leased, results:
    of the running probe, by group. take_id: with which the probe went to the learner. probed_at: when the last probe
    began.
    """

    boot: str
    reason: str
    update: int
    phase: str = "resync"
    resyncs: int = 0
    after: float = 0.0
    asked: float = 0.0
    asked_at: float | None = None
    leased: dict[str, Lease] = field(default_factory=dict)
    results: dict[str, tuple[Buffer, ...]] = field(default_factory=dict)
    take_id: int = -1
    probed_at: float = -math.inf

    def go(self, phase: str, after: float = 0.0) -> None:
        """The next phase, with nothing of the one before."""
        self.phase, self.after, self.asked_at, self.take_id = phase, after, None, -1
        self.leased, self.results = {}, {}


class Quarantine:
    """Cases by generator. `barred` are the names of all that are out, the same set object for good."""

    def __init__(self, rules: Rules, prompts: Sequence[Prompt], seed: int, lease_timeout_s: float) -> None:
        self.rules = rules
        self.barred: set[str] = set()
        self.cases: dict[str, Case] = {}
        self.unsaved = False
        self._prompts, self._seed, self._lease_timeout_s = prompts, seed, lease_timeout_s
        self._past: dict[str, tuple[str, int]] = {}
        self._num_probes = 0
        self._starved_at: float | None = None
        self._gone: dict[str, float] = {}

    def follow(self, rules: Rules) -> None:
        """New rules. Where they quarantine nobody, all are let in again; a probe of another size begins anew."""
        old, self.rules = self.rules, rules
        for name, case in list(self.cases.items()):
            if not rules.enabled:
                log.warning("generator %s is let in again: the settings quarantine nobody now", name)
                self._release(name)
            elif case.phase == "set_aside" and rules.resync and case.resyncs < rules.max_resyncs:
                case.go("resync")
                self.unsaved = True
            elif case.phase == "probe" and rules.probe_groups != old.probe_groups:
                case.go("probe")

    # --- the disk and the state -----------------------------------------------------------------

    def save(self) -> QuarantineState:
        """What must outlive this process."""
        self.unsaved = False
        cases = [
            CaseState(n, c.boot, c.reason, c.resyncs, c.phase == "set_aside", c.update) for n, c in self.cases.items()
        ]
        return QuarantineState(cases, [(n, *p) for n, p in self._past.items()], self._num_probes)

    def load(self, state: QuarantineState) -> None:
        """Go on from there. The number of probes leaps ahead: some may have been leased since."""
        self._num_probes = state.num_probes + 2**16
        self._past = {name: (boot, resyncs) for name, boot, resyncs in state.past}
        for c in state.cases:
            phase = "set_aside" if c.set_aside else "resync"
            self.cases[c.name] = Case(c.boot, c.reason, c.update, phase, c.resyncs)
            self.barred.add(c.name)

    def state(self) -> dict[str, Any]:
        """JSON-like form for StatusReply."""
        return {
            n: {"phase": c.phase, "reason": c.reason, "resyncs": c.resyncs, "update": c.update}
            for n, c in self.cases.items()
        }

    # --- verdicts -------------------------------------------------------------------------------

    def judge(
        self, name: str, sound: bool, reason: str, boot: str, num_free: int, fewest: int, update: int, now: float
    ) -> str:
        """A verdict of the learner. Returns what became of it: "out", "in" or "" for nothing.

        num_free: living generators that are not out; at least `fewest` of them stay.
        """
        case = self.cases.get(name)
        if case is None and not sound and self.rules.enabled and num_free - 1 >= fewest:
            resyncs = self._past[name][1] if name in self._past and self._past[name][0] == boot else 0
            self.cases[name] = case = Case(boot, reason, update, resyncs=resyncs)
            self.barred.add(name)
            if not self.rules.resync or resyncs >= self.rules.max_resyncs:
                case.phase = "set_aside"
            self.unsaved = True
            log.warning("generator %s is in quarantine (%s): %.500s", name, case.phase, reason)
            return "out"
        if case is None or case.phase != "judged":
            return ""
        self.unsaved = True
        if sound:
            log.info("generator %s is let in again after %d re-syncs: %.500s", name, case.resyncs, reason)
            self._release(name)
            return "in"
        case.reason = reason
        if case.resyncs >= self.rules.max_resyncs or not self.rules.resync:
            case.go("set_aside")
            log.warning("generator %s stays out: %.500s; %d re-syncs did not help", name, reason, case.resyncs)
        else:
            case.go("waiting", now + self.rules.backoff_s * 2 ** max(0, case.resyncs - 1))
        return ""

    def _release(self, name: str) -> None:
        case = self.cases.pop(name)
        self._past[name] = (case.boot, case.resyncs)
        self.barred.discard(name)
        self.unsaved = True

    def joined(self, name: str, boot: str) -> None:
        """A generator said Hello. A new process loads its weights anew, and is probed without a re-sync."""
        case = self.cases.get(name)
        if case is not None and case.boot != boot:
            case.boot, case.resyncs, self.unsaved = boot, 0, True
            case.go("probe")

    def relieve(self, num_alive: int, num_free: int, now: float) -> list[str]:
        """Let all in again when none of the living is left for too long. Their names."""
        if num_free or not num_alive or not self.cases:
            self._starved_at = None
            return []
        self._starved_at = now if self._starved_at is None else self._starved_at
        if now - self._starved_at < STARVED_S:
            return []
        self._starved_at, names = None, list(self.cases)
        log.warning("no sound generator is left: %s are let in again", ", ".join(names))
        for name in names:
            self._release(name)
        return names

    def forget(self, alive: Collection[str], now: float) -> None:
        """Drop what is known of generators that are gone for too long."""
        names = self.cases.keys() | self._past.keys()
        self._gone = {n: self._gone.get(n, now) for n in names if n not in alive}
        for name in [n for n, since in self._gone.items() if now - since >= FORGET_S]:
            self.cases.pop(name, None)
            self._past.pop(name, None)
            self.barred.discard(name)
            self.unsaved = True

    # --- re-syncs -------------------------------------------------------------------------------

    def due(self, name: str, resyncs: float, busy: bool, now: float) -> bool:
        """True when a generator is to be told to re-sync now. resyncs: how many it made; busy: it loads weights."""
        case = self.cases.get(name)
        if case is None:
            return False
        if case.phase == "waiting" and now >= case.after:
            case.go("resync")
        if case.phase != "resync":
            return False
        resyncs = resyncs if math.isfinite(resyncs) else 0.0
        if case.asked_at is not None and resyncs > case.asked:
            case.resyncs, self.unsaved = case.resyncs + 1, True
            case.go("probe")
            return False
        if case.asked_at is not None and (busy or now - case.asked_at < RESYNC_S):
            return False
        case.asked, case.asked_at = resyncs if case.asked_at is None else case.asked, now
        return True

    # --- probes ---------------------------------------------------------------------------------

    def refusal(self) -> str:
        """Why a generator that is out gets no lease."""
        return "quarantined"

    def lease(
        self, name: str, held: Version, newest: Version | None, want: int, now: float, seq: int = 0
    ) -> list[Lease]:
        """Leases of a probe for a generator that holds the newest version."""
        case = self.cases.get(name)
        if case is None or case.phase != "probe" or held != newest:
            return []
        for one in self.cases.values():
            if one.phase == "probe" and any(x.expires <= now for i, x in one.leased.items() if i not in one.results):
                one.go("probe")
        if not case.leased:
            # One at a time: what they sampled lies here besides the queue.
            if now - case.probed_at < PROBE_S or any(one.leased for one in self.cases.values()):
                return []
            case.probed_at = now
        out: list[Lease] = []
        while len(case.leased) < self.rules.probe_groups and len(out) < want:
            self._num_probes += 1
            index = int(np.random.default_rng([self._seed, self._num_probes]).integers(len(self._prompts)))
            prompt, group_id = self._prompts[index], f"{PROBE}{self._num_probes}"
            lease = Lease(lease_id_of(group_id, 1), group_id, 1, prompt, name, held, now + self._lease_timeout_s, seq)
            case.leased[group_id] = lease
            out.append(lease)
        return out

    def samples(self, name: str, lease_id: str) -> bool:
        """True while the result of this lease of a probe is awaited."""
        case, group_id = self.cases.get(name), lease_id.rpartition("#")[0]
        return case is not None and group_id in case.leased and group_id not in case.results

    def claim(self, name: str, sampling: Sequence[str], kept: Sequence[str], heard: int) -> ProbeClaim:
        """A generator says which leases it samples and keeps: those of probes that are of no use.

        The others need no word: it sends again what is not confirmed. heard: of leases of its Leases up to that seq
        those that it does not name got lost, and the probe begins anew.
        """
        named, case = {*sampling, *kept}, self.cases.get(name)
        for lease in list(case.leased.values()) if case is not None else ():
            if lease.seq <= heard and lease.lease_id not in named and self.samples(name, lease.lease_id):
                self.lost(name)
        useless, void = (
            [i for i in ids if i.startswith(PROBE) and not self.samples(name, i)] for ids in (sampling, kept)
        )
        return ProbeClaim(useless, void)

    def lost(self, name: str) -> None:
        """A lease of a probe failed, or its generator is gone: the probe begins anew."""
        case = self.cases.get(name)
        if case is not None and case.phase == "probe":
            case.go("probe")

    def expects(self, name: str, group: GroupHead) -> bool:
        """True when this is an answer to a lease of a running probe."""
        case = self.cases.get(name)
        lease = case.leased.get(group.group_id) if case is not None else None
        return (
            lease is not None
            and self.samples(name, lease.lease_id)
            and group.generator_id == name
            and group.prompt.prompt_id == lease.prompt.prompt_id
            and group.prompt.token_ids == lease.prompt.token_ids.tolist()
        )

    def put(self, name: str, group: GroupHead, payload: Sequence[Buffer]) -> None:
        """An answer that is expected and sound in form. With the last one the probe is complete."""
        case = self.cases[name]
        case.results[group.group_id] = tuple(payload)

    def ride(self, take_id: int) -> list[tuple[Buffer, ...]]:
        """The payloads of complete probes, which go to the learner with this take; the same for every call."""
        out: list[tuple[Buffer, ...]] = []
        for case in self.cases.values():
            if case.phase == "probe" and 0 < len(case.results) == len(case.leased) == self.rules.probe_groups:
                case.phase, case.take_id = "judged", take_id
            elif case.phase == "judged" and not case.take_id <= take_id < case.take_id + VERDICT_TAKES:
                case.go("probe")
            if case.phase == "judged" and case.take_id == take_id:
                out += case.results.values()
        return out

    def forget_takes(self) -> None:
        """Another learner: what the one before had to judge is made anew."""
        for case in self.cases.values():
            if case.phase == "judged":
                case.go("probe")
