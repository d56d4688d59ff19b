"""The queue: prompts out under the lag rule, groups in, takes out, commits. Pure.

No socket and no clock of its own: `now` is passed in, in seconds of any monotonic clock. The promise:
what a take gives out for update u holds no group of which every token is older than u - max_lag
(stale: mask), or no token older than that (stale: evict). Routes are bytes here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from asyncrl.arrays import Buffer
from asyncrl.replay.admission import num_batches, refusal
from asyncrl.replay.clock import Clock
from asyncrl.replay.digest import GroupDigest, digest, problem
from asyncrl.replay.exits import Exits
from asyncrl.replay.ledger import Entry, Lease, Ledger, State
from asyncrl.replay.limits import Limits
from asyncrl.replay.takes import Candidate, Take, balance, cut, select
from asyncrl.replay.tally import Tally
from asyncrl.types import Group, ModelInfo, Prompt, Version

log = logging.getLogger(__name__)

_KEPT_TAKES = 64


class Grant(NamedTuple):
    """Answer to a lease request; idle says why there are fewer leases than asked for."""

    leases: list[Lease]
    idle: str


class Put(NamedTuple):
    """What became of a group. admitted, known: keep it until resolved. resolved, refused: forget it."""

    status: Literal["admitted", "known", "resolved", "refused"]
    reason: str = ""


class Committed(NamedTuple):
    """One group that a learner's batch used up, for the run's record."""

    update: int
    epoch: int
    group_id: str
    generator_id: str
    outcome: str


class ReplayQueue:
    """Prompts, leases, groups and takes of one run."""

    def __init__(self, prompts: Sequence[Prompt], limits: Limits, model: ModelInfo | None = None) -> None:
        self.limits, self.model = limits, model
        self.clock = Clock()
        self.tally = Tally()
        self.ledger = Ledger(prompts, limits.seed)
        self.closed = False
        self.waiting = "nothing was asked for"
        self._takes: dict[int, Take] = {}
        self._retired_take = -1
        self._exits = Exits(limits, self.clock, self.ledger, self.tally)

    # --- versions -------------------------------------------------------------------------------

    def publish(self, version: Version) -> bool:
        """The learner published a version. False when it is not newer than the newest (no effect).

        A higher epoch is a resume: takes are dissolved, the clock goes to the version's update, and
        groups or leases of versions that the resume threw away are evicted (lost_version).
        """
        epoch = self.clock.epoch
        if not self.clock.publish(version):
            return False
        if version.epoch != epoch:
            self._takes.clear()
            self._retired_take = -1
            for entry in self.ledger.of_state(State.TAKEN):
                entry.take_id = -1
                self.ledger.move(entry, State.QUEUED)
        self._exits.evict_old(self.clock.update)
        return True

    # --- leases ---------------------------------------------------------------------------------

    def lease(self, generator_id: str, held: Version, want: int, now: float) -> Grant:
        """Up to `want` prompts for a generator that holds a version, by the admission rule."""
        leases: list[Lease] = []
        idle = ""
        while len(leases) < want:
            idle = self.refusal(held)
            if idle:
                self.tally.idle[idle] += 1
                break
            entry = self.ledger.next_entry()
            entry.attempt += 1
            prompt = self.ledger.prompts[entry.index]
            lease_id = f"{entry.group_id}#{entry.attempt}"
            expires = now + self.limits.lease_timeout_s
            lease = Lease(lease_id, entry.group_id, entry.attempt, prompt, generator_id, held, expires)
            self.ledger.move(entry, State.LEASED)
            entry.lease = lease
            leases.append(lease)
        return Grant(leases, idle)

    def refusal(self, held: Version) -> str:
        """Why a generator that holds `held` gets no lease now, or ""."""
        return "done" if self.closed else refusal(held, self.limits, self.clock, self.ledger)

    def withdraw(self, leases: Iterable[Lease]) -> None:
        """Take back leases that never reached their generator; they do not count as attempts."""
        for lease in leases:
            entry = self.ledger.entries.get(lease.group_id)
            if entry is not None and entry.lease is lease:
                entry.attempt -= 1
                self.ledger.move(entry, State.PENDING)

    def fail(self, generator_id: str, lease_id: str, reason: str) -> bool:
        """A generator gives a lease back. False when it does not hold that lease (any more)."""
        entry = self.ledger.entries.get(lease_id.rpartition("#")[0])
        lease = entry.lease if entry is not None else None
        if entry is None or lease is None or lease.lease_id != lease_id or lease.generator_id != generator_id:
            return False
        self.tally.count_foreign("failed", reason)
        self._exits.give_back(entry)
        return True

    def expire(self, now: float) -> None:
        """Give out again what is leased for too long. A late result is still welcome once."""
        for entry in self.ledger.of_state(State.LEASED):
            if entry.lease is not None and entry.lease.expires <= now:
                self.tally.count("lease_expired")
                self._exits.give_back(entry)

    def generator_lost(self, generator_id: str, reason: str = "dead_generator") -> None:
        """Give out again everything that a generator was sampling."""
        for entry in self.ledger.of_state(State.LEASED):
            if entry.lease is not None and entry.lease.generator_id == generator_id:
                self.tally.count(reason)
                self._exits.give_back(entry)

    # --- groups in ------------------------------------------------------------------------------

    def put(self, group: Group, payload: Sequence[Buffer], sender: str) -> Put:
        """A finished group with its frames. Once per group id; the first result wins, late or not."""
        entry = self.ledger.entries.get(group.group_id)
        if entry is None:
            if self.ledger.is_resolved(group.group_id) or self.closed:
                return self._known("resolved")
            return self._refuse(None, group, sender, "unknown_group", "it was never leased here")
        if entry.state in (State.QUEUED, State.TAKEN):
            return self._known("known" if entry.sender == sender else "resolved")
        if group.attempt < entry.min_attempt:
            return self._known("resolved")
        found = self._problem(entry, group)
        if found is not None:
            return self._refuse(entry, group, sender, *found)
        d = digest(group)
        left = self._unusable(entry, d)
        if left is not None:
            return left
        if entry.lease is None or entry.lease.attempt != group.attempt:
            self.tally.count("late_result")
            self._exits.cancel(entry)
        self.ledger.store(entry, d, payload, sender)
        return Put("admitted")

    def _problem(self, entry: Entry, group: Group) -> tuple[str, str] | None:
        if not 1 <= group.attempt <= entry.attempt:
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
        lease = entry.lease if entry is not None else None
        if entry is not None and lease is not None and lease.attempt == group.attempt:
            self._exits.give_back(entry)
        return Put("refused", f"{reason}: {why}")

    def _unusable(self, entry: Entry, d: GroupDigest) -> Put | None:
        """What can train nothing leaves at once: too old, without a loss token, or without a lesson."""
        lost = any(self.clock.lost(v) for v in d.versions)
        if d.versions and (lost or self._last_update(d) < self.clock.update):
            reason = "lost_version" if lost else "stale"
            if entry.lease is not None and entry.lease.attempt == d.attempt:
                self._exits.age_out(entry, d, reason)
            else:
                self.tally.count(reason)
                self.tally.leave_out(d, self.clock.update)
            return Put("resolved", reason)
        flat = self.limits.zero_variance == "refill" and d.zero_variance
        if flat or not d.versions:
            self._exits.cancel(entry, but=d.attempt)
            self._exits.drop(entry, "zero_variance" if d.versions else "no_tokens")
            return Put("resolved", "zero_variance" if d.versions else "no_tokens")
        return None

    # --- groups out -----------------------------------------------------------------------------

    def take(self, take_id: int, update: int) -> Take | None:
        """Freeze (once) the groups of updates update, update + 1, ...; None while there are too few.

        Oldest first: lowest token version, then age. There are M batches, or as many as the newest
        version due by `update` and the end of the run allow. Raises ValueError for a take that
        contradicts an earlier one.
        """
        known = self._takes.get(take_id)
        if known is not None:
            if known.update != update:
                raise ValueError(f"take {take_id} was made for update {known.update}, not {update}")
            return known
        if take_id <= self._retired_take or update < self.clock.update:
            raise ValueError(f"take {take_id} for update {update} is over, the clock is at {self.clock.update}")
        if self.clock.newest is None:
            self.waiting = "no version was published"
            return None
        self._exits.evict_old(update)
        count, size = num_batches(update, self.limits, self.clock), self.limits.groups_per_update
        chosen, late = select(self._candidates(), update, count, size)
        for group_id in late:
            self._exits.evict(self.ledger.entries[group_id], "overtaken")
        if len(chosen) < count * size:
            leased = self.ledger.count(State.LEASED)
            self.waiting = f"{len(chosen)} of {count * size} groups for update {update}, {leased} leased"
            return None
        batches = cut(chosen, update, count, size, (self.limits.seed, self.clock.epoch, update))
        take = Take(take_id, update, batches, tuple(update + m - self.limits.max_lag for m in range(count)))
        for candidate in chosen:
            entry = self.ledger.entries[candidate.group_id]
            self.ledger.move(entry, State.TAKEN)
            entry.take_id = take_id
        self._remember(take)
        return take

    def shard(self, take_id: int, rank: int, world: int) -> list[tuple[int, Entry]]:
        """(batch, group) of one rank's part of a frozen take: what of it is not yet committed.

        Whole groups, balanced by tokens inside each batch; the same for every call, and together the
        ranks have each group once. Raises ValueError on a rank outside the world.
        """
        if not 0 <= rank < world <= 2**16:
            raise ValueError(f"rank {rank} of a world of {world}")
        out: list[tuple[int, Entry]] = []
        for m, ids in enumerate(self._takes[take_id].batches):
            found = [e for i in ids if (e := self.ledger.entries.get(i)) is not None and e.take_id == take_id]
            sizes = [(e.group_id, e.digest.tokens) for e in found if e.digest is not None]
            mine = set(balance(sizes, world)[rank])
            out += [(m, e) for e in found if e.group_id in mine]
        return out

    def commit(self, take_id: int, update: int, outcome: str, group_ids: Sequence[str]) -> list[Committed]:
        """Resolve groups of a batch. update is the learner's clock after it; trained advanced it by one.

        Groups that are not in that take (committed before, dissolved by a resume) are counted and left
        alone. Raises ValueError on an unknown outcome.
        """
        if outcome not in ("trained", "skipped"):
            raise ValueError(f"outcome {outcome!r} is neither trained nor skipped")
        used_at = update - 1 if outcome == "trained" else update
        done: list[Committed] = []
        for group_id in group_ids:
            entry = self.ledger.entries.get(group_id)
            if entry is None or entry.digest is None or entry.state is not State.TAKEN or entry.take_id != take_id:
                self.tally.count("commit_unknown")
                continue
            if outcome == "trained":
                self.tally.train(entry.digest, used_at, self.limits.max_lag)
            else:
                self.tally.count("skipped")
            done.append(Committed(used_at, self.clock.epoch, group_id, entry.digest.generator_id, outcome))
            self._exits.resolve(entry)
        self.clock.advance(update)
        self._exits.evict_old(self.clock.update)
        return done

    def close(self) -> None:
        """The run is over: every open group is resolved and every lease cancelled."""
        self.closed = True
        for entry in list(self.ledger.entries.values()):
            self.tally.count("run_over")
            self._exits.cancel(entry)
            self._exits.resolve(entry)

    def drain_resolved(self) -> list[tuple[str, str]]:
        """(sender, group id) of groups in the queue that were resolved since the last call."""
        out, self._exits.resolved = self._exits.resolved, []
        return out

    def drain_cancelled(self) -> list[tuple[str, str]]:
        """(generator, lease id) of leases that became useless since the last call."""
        out, self._exits.cancelled = self._exits.cancelled, []
        return out

    def _last_update(self, d: GroupDigest) -> int:
        return d.last_update(self.limits.stale, self.limits.max_lag)

    def _candidates(self) -> list[Candidate]:
        queued = [(e, e.digest) for e in self.ledger.of_state(State.QUEUED) if e.digest is not None]
        queued.sort(key=lambda pair: (pair[1].oldest, pair[0].arrived))
        return [Candidate(e.group_id, self._last_update(d)) for e, d in queued]

    def _remember(self, take: Take) -> None:
        self._takes[take.take_id] = take
        while len(self._takes) > _KEPT_TAKES:
            self._retired_take = next(iter(self._takes))
            del self._takes[self._retired_take]
