"""Which results enter the queue: judged once, when they arrive. The first result of a group wins."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from asyncrl.arrays import Buffer
from asyncrl.replay.clock import Clock
from asyncrl.replay.digest import GroupDigest, digest, problem
from asyncrl.replay.exits import Exits
from asyncrl.replay.ledger import Entry, Lease, Ledger, State
from asyncrl.replay.limits import Limits
from asyncrl.replay.recovery import Recovery
from asyncrl.replay.tally import Tally
from asyncrl.types import Group, ModelInfo

log = logging.getLogger(__name__)


class Put(NamedTuple):
    """What became of a group. admitted, known: keep it until resolved. resolved, refused: forget it."""

    status: Literal["admitted", "known", "resolved", "refused"]
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
    model: ModelInfo | None

    def last_attempt(self, entry: Entry) -> int:
        """The highest attempt that can exist; an earlier process may have leased oftener than it could save."""
        return entry.attempt + (self.limits.max_attempts if entry.restored else 0)

    def put(self, group: Group, payload: Sequence[Buffer], sender: str, closed: bool) -> Put:
        """A finished group with its frames. Once per group id; the first result wins, late or not."""
        self.recovery.came(group.group_id, sender)
        entry = self.ledger.entries.get(group.group_id)
        if entry is None:
            if self.ledger.is_resolved(group.group_id) or closed:
                return self._known("resolved")
            return self._refuse(None, group, sender, "unknown_group", "it was never leased here")
        if entry.state in (State.QUEUED, State.TAKEN):
            if entry.sender == sender and not entry.payload and digest(group) == entry.digest:
                self.ledger.refill(entry, payload)
                return Put("known")
            return self._known("known" if entry.sender == sender else "resolved")
        if group.attempt < entry.min_attempt:
            return self._known("resolved")
        found = self._problem(entry, group)
        if found is not None:
            return self._refuse(entry, group, sender, *found)
        d = digest(group)
        entry.attempt = max(entry.attempt, group.attempt)
        left = self._unusable(entry, d, sender)
        if left is not None:
            return left
        if not _is_result_of(entry.lease, group.attempt, sender):
            self.tally.count("late_result")
            self.exits.cancel(entry)
        self.ledger.store(entry, d, payload, sender)
        return Put("admitted")

    def _problem(self, entry: Entry, group: Group) -> tuple[str, str] | None:
        if not 1 <= group.attempt <= self.last_attempt(entry):
            return "unknown_attempt", f"attempt {group.attempt} of {entry.attempt}"
        prompt = self.ledger.prompts[entry.index]
        if group.prompt.prompt_id != prompt.prompt_id or not np.array_equal(group.prompt.token_ids, prompt.token_ids):
            return "wrong_prompt", f"prompt {group.prompt.prompt_id!r} is not the leased one"
        for t in group.trajectories:
            for s in t.segments:
                if self.clock.unknown(s.version):
                    return "future_version", f"sampled under {s.version}, the newest is {self.clock.newest}"
        return problem(group, self.limits.group_size, self.model)

    def _known(self, status: Literal["known", "resolved"]) -> Put:
        self.tally.count("duplicate")
        return Put(status)

    def _refuse(self, entry: Entry | None, group: Group, sender: str, reason: str, why: str) -> Put:
        self.tally.count(reason)
        log.warning("group %s of %s refused (%s): %s", group.group_id, sender, reason, why)
        if entry is not None and _is_result_of(entry.lease, group.attempt, sender):
            self.exits.give_back(entry)
        return Put("refused", f"{reason}: {why}")

    def _unusable(self, entry: Entry, d: GroupDigest, sender: str) -> Put | None:
        """What can train nothing leaves at once: too old, without a loss token, or without a lesson."""
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
        if flat or not d.versions:
            self.exits.cancel(entry, but=d.attempt)
            self.exits.drop(entry, "zero_variance" if d.versions else "no_tokens")
            return Put("resolved", "zero_variance" if d.versions else "no_tokens")
        return None


def _is_result_of(lease: Lease | None, attempt: int, sender: str) -> bool:
    """True when `sender` was to deliver this attempt; an earlier process may have given it to somebody else."""
    return lease is not None and lease.attempt == attempt and lease.generator_id == sender
