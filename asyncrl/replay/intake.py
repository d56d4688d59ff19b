"""Which results enter the queue: judged once, when they arrive. The first result of a group wins."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncrl.arrays import Buffer
from asyncrl.replay.clock import Clock
from asyncrl.replay.digest import GroupDigest, digest, problem
from asyncrl.replay.exits import Exits
from asyncrl.replay.ledger import Entry, Lease, Ledger, State, num_bytes
from asyncrl.replay.limits import Limits
from asyncrl.replay.patience import Patience
from asyncrl.replay.recovery import Recovery
from asyncrl.replay.room import Room
from asyncrl.replay.tally import Tally
from asyncrl.types import ModelInfo, Version
from asyncrl.wire import GroupHead

log = logging.getLogger(__name__)

PENALTY = "truncation_penalty"
"""The part of a reward that algorithm.truncated=penalise adds."""

FLAT_TIMES = 8
"""So many takes' worth of groups of equal rewards in the time of one take are worth a line in the log."""

MAX_LOGGED = 20
"""Refusals of one kind that are logged; later ones are only counted."""


class Put(NamedTuple):
    """What became of a group. admitted, known: keep it until resolved. resolved, refused: forget it.

    no_room: keep it, and send it again when it is asked for.
    """

    status: Literal["admitted", "known", "no_room", "resolved", "refused"]
    reason: str = ""


@dataclass(slots=True)
class Intake:
    """The way in, by the rules of `limits`."""

    limits: Limits
    clock: Clock
    ledger: Ledger
    tally: Tally
    exits: Exits
    recovery: Recovery
    room: Room
    patience: Patience
    model: ModelInfo | None
    barred: set[str]
    """Generators in quarantine: nothing new of theirs comes in."""
    num_flat: int = 0
    """Groups of equal rewards that were dropped since the last take (zero_variance=refill)."""

    @property
    def flat_note(self) -> str:
        """What `num_flat` adds to the words for a take that waits."""
        n = self.num_flat
        return f", {n} dropped for equal rewards (algorithm.zero_variance=refill)" if n else ""

    def last_attempt(self, entry: Entry) -> int:
        """The highest attempt that can exist; an earlier process may have leased oftener than it could save."""
        return entry.attempt + (self.limits.max_attempts if entry.restored else 0)

    def put(self, group: GroupHead, payload: Sequence[Buffer], sender: str, closed: bool) -> Put:
        """A finished group with its frames. Once per group id; the first result wins, late or not."""
        self.recovery.came(group.group_id, sender)
        entry = self.ledger.entries.get(group.group_id)
        if entry is None:
            if self.ledger.is_resolved(group.group_id) or closed:
                return self._known("resolved")
            return self._refuse(None, group, sender, "unknown_group", "it was never leased here")
        if entry.state in (State.QUEUED, State.TAKEN):
            if entry.sender == sender and not entry.payload and digest(group) == entry.digest:
                return self._refill(entry, payload)
            # Another result of the same generator is as void as that of another one.
            ours = entry.sender == sender and entry.digest is not None and entry.digest.attempt == group.attempt
            return self._known("known" if ours else "resolved")
        if entry.state is State.KEPT:
            same = entry.sender == sender and digest(group) == entry.digest
            return self._admit(entry, payload) if same else self._known("resolved")
        if group.attempt < entry.min_attempt:
            return self._known("resolved")
        if sender in self.barred:
            self.tally.count("quarantined")
            return Put("resolved", "quarantined")
        found = self._problem(entry, group, sender)
        if found is not None:
            return self._refuse(entry, group, sender, *found)
        d, size = digest(group), num_bytes(payload)
        entry.attempt = max(entry.attempt, group.attempt)
        self.patience.note(group.seconds)
        self._note_rate(entry, d, group)
        left = self._unusable(entry, d, sender, size)
        if left is not None:
            return left
        if not _is_result_of(entry.lease, group.attempt, sender):
            self.tally.count("late_result")
            self.exits.cancel(entry)
        if len(group.trajectories) < self.limits.group_size:
            self.tally.count("short_groups")
            if self.limits.on_timeout == "partial":
                self.tally.count("partial")
        self.ledger.finish(entry, d, size, sender)
        return self._admit(entry, payload)

    def _note_rate(self, entry: Entry, d: GroupDigest, group: GroupHead) -> None:
        """How often a prompt was solved, also where that is what makes the group useless."""
        if not any(self.clock.lost(v) for v in d.versions):
            update = d.versions[-1].update if d.versions else self.clock.update
            # Too long is not unsolved.
            rewards = [t.reward - t.parts.get(PENALTY, 0.0) for t in group.trajectories]
            self.ledger.curriculum.note(entry.index, sum(rewards) / len(rewards), update)

    def _admit(self, entry: Entry, payload: Sequence[Buffer]) -> Put:
        """Into the queue, if there is room for its payload."""
        if not self.room.make(entry):
            return self._no_room(entry)
        self.ledger.store(entry, payload)
        self.tally.peak_bytes = max(self.tally.peak_bytes, self.ledger.num_bytes)
        return Put("admitted")

    def _refill(self, entry: Entry, payload: Sequence[Buffer]) -> Put:
        """The payload of a group in a take of an earlier process: before all that is only queued."""
        entry.size = num_bytes(payload)
        if not self.room.make(entry):
            return self._no_room(entry)
        self.ledger.refill(entry, payload)
        self.tally.peak_bytes = max(self.tally.peak_bytes, self.ledger.num_bytes)
        return Put("known")

    def _no_room(self, entry: Entry) -> Put:
        self.tally.count("no_room")
        entry.asked_at = entry.told_at = None
        return Put("no_room")

    def refused(self, group: GroupHead, sender: str) -> bool:
        """Whether an answer to a probe, whose prompt is the leased one, is not what the learner relies on."""
        found = self._misfit(group)
        if found is not None:
            self._refuse(None, group, sender, *found)
        return found is not None

    def _problem(self, entry: Entry, group: GroupHead, sender: str) -> tuple[str, str] | None:
        # The learner judges generators by that name (its drift sentinel).
        if group.generator_id != sender:
            return "wrong_sender", f"it says that {group.generator_id!r:.100} made it"
        if not 1 <= group.attempt <= self.last_attempt(entry):
            return "unknown_attempt", f"attempt {group.attempt} of {entry.attempt}"
        prompt = self.ledger.prompts[entry.index]
        if group.prompt.prompt_id != prompt.prompt_id or group.prompt.token_ids != prompt.token_ids.tolist():
            return "wrong_prompt", f"prompt {group.prompt.prompt_id!r} is not the leased one"
        return self._misfit(group)

    def _misfit(self, group: GroupHead) -> tuple[str, str] | None:
        for v in {segment[:2] for t in group.trajectories for segment in t.segments}:
            if self.clock.unknown(Version(*v)):
                return "future_version", f"sampled under {Version(*v)}, the newest is {self.clock.newest}"
        return problem(group, self.limits.fewest_responses, self.limits.group_size, self.model)

    def _known(self, status: Literal["known", "resolved"]) -> Put:
        self.tally.count("duplicate")
        return Put(status)

    def _refuse(self, entry: Entry | None, group: GroupHead, sender: str, reason: str, why: str) -> Put:
        self.tally.count(reason)
        # A broken peer repeats itself, and its words are its own.
        if self.tally.counters[reason] <= MAX_LOGGED:
            log.warning("group %.100s of %.100s refused (%s): %.500s", group.group_id, sender, reason, why)
        if entry is not None and _is_result_of(entry.lease, group.attempt, sender):
            self.exits.give_back(entry)
        return Put("refused", f"{reason}: {why}")

    def _unusable(self, entry: Entry, d: GroupDigest, sender: str, size: int) -> Put | None:
        """What can train nothing leaves at once: too old, without a loss token, without a lesson, too large."""
        lost = any(self.clock.lost(v) for v in d.versions)
        if d.versions and (lost or d.last_update(self.limits.stale, self.limits.max_lag) < self.clock.update):
            reason = "lost_version" if lost else "stale"
            if _is_result_of(entry.lease, d.attempt, sender):
                self.exits.age_out(entry, d, reason)
            else:
                self.tally.count(reason)
                self.tally.leave_out(d, self.clock.update)
            return Put("resolved", reason)
        flat = self.limits.zero_variance == "refill" and d.zero_variance
        if not d.versions:
            return self._give_up(entry, d, "no_tokens")
        if flat:
            self._count_flat()
            return self._give_up(entry, d, "zero_variance")
        if size > self.limits.share_bytes:
            log.warning(
                "a group of %d bytes does not fit: replay.capacity_bytes has %d for each group of a take; raise it",
                size,
                self.limits.share_bytes,
            )
            return self._give_up(entry, d, "too_large")
        return None

    def _count_flat(self) -> None:
        """One more; says so when a take costs FLAT_TIMES as many groups as it has, and at each doubling of that."""
        self.num_flat += 1
        times, left = divmod(self.num_flat, FLAT_TIMES * self.limits.take_groups)
        if not left and times & (times - 1) == 0:
            log.warning(
                "%d groups of equal rewards were dropped since the last take (algorithm.zero_variance=refill), which "
                "needs %d others: prompts are too easy or too hard; choose others, a larger algorithm.group_size, or "
                "algorithm.zero_variance=keep", self.num_flat, self.limits.take_groups,
            )  # fmt: skip

    def _give_up(self, entry: Entry, d: GroupDigest, reason: str) -> Put:
        self.exits.cancel(entry, but=d.attempt)
        self.exits.drop(entry, reason)
        return Put("resolved", reason)


def _is_result_of(lease: Lease | None, attempt: int, sender: str) -> bool:
    """True when `sender` was to deliver this attempt; an earlier process may have given it to somebody else."""
    return lease is not None and lease.attempt == attempt and lease.generator_id == sender
