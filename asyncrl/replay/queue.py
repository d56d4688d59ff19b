"""The queue: prompts out under the lag rule, groups in, takes out, commits. Pure.

No socket and no clock of its own: `now` is passed in, in seconds of any monotonic clock. The promise:
what a take gives out for update u holds no group of which every token is older than u - max_lag
(stale: mask), or no token older than that (stale: evict, wait). Routes are bytes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.arrays import Buffer
from asyncrl.replay.admission import num_batches, refusal
from asyncrl.replay.claims import Claim, Claims
from asyncrl.replay.clock import Clock
from asyncrl.replay.curriculum import Curriculum
from asyncrl.replay.exits import Exits
from asyncrl.replay.intake import Intake, Put
from asyncrl.replay.knobs import Knobs
from asyncrl.replay.ledger import Entry, Lease, Ledger, State, lease_id_of
from asyncrl.replay.limits import Limits, limits_of
from asyncrl.replay.patience import Patience
from asyncrl.replay.probes import Probes, is_probe, no_probes
from asyncrl.replay.quarantine import Quarantine, Rules, rules_of
from asyncrl.replay.recovery import Recovery
from asyncrl.replay.room import Room
from asyncrl.replay.saved import Committed, Grant, QueueState
from asyncrl.replay.takes import Candidate, Take, Takes, cut, select
from asyncrl.replay.tally import Tally
from asyncrl.types import ModelInfo, Prompt, Version
from asyncrl.wire import GroupHead

SWEEP_S = 1.0
"""A take that waits looks this often for groups too old for it, besides when a version or the clock moved."""


class ReplayQueue:
    """Prompts, leases, groups and takes of one run.

    While `unsaved` is true, nobody may hear of what was done last: `save` goes to the disk first.
    """

    def __init__(
        self, prompts: Sequence[Prompt], limits: Limits, model: ModelInfo | None = None, knobs: Knobs | None = None
    ) -> None:
        self.limits, self.model, self.knobs = limits, model, knobs or Knobs()
        self.untuned: dict[str, tuple[str, str]] = {}
        """Tuned and configured value of settings that were tuned before the config was changed, see `load`."""
        self.clock = Clock()
        self.tally = Tally()
        curriculum = Curriculum(len(prompts), limits.curriculum, self.tally)
        self.ledger = Ledger(prompts, limits.seed, limits.weights, curriculum)
        self.closed = False
        self.waiting, self.lacks = "nothing was asked for", "groups"
        self.recovery = Recovery()
        self.quarantine = Quarantine(Rules(), prompts, limits.seed, limits.lease_timeout_s)
        barred = self.quarantine.barred
        self._changed, self._saved_seq = False, 0
        self._takes = Takes()
        self._swept: tuple[object, float] = (None, 0.0)
        self._chosen: tuple[object, list[Candidate]] = (None, [])
        self._exits = Exits(limits, self.clock, self.ledger, self.tally)
        self.room = Room(limits, self.ledger, self.tally, self._exits)
        self._patience = Patience(limits, self.ledger, self.tally)
        self._intake = Intake(
            limits, self.clock, self.ledger, self.tally, self._exits, self.recovery, self.room, self._patience, model,
            barred,
        )  # fmt: skip
        self._claims = Claims(limits, self.ledger, self.tally, self.recovery, self._intake, barred)
        self._probes = Probes(self.quarantine, self.clock, self.tally, self._intake)

    # --- the disk -------------------------------------------------------------------------------

    @property
    def unsaved(self) -> bool:
        """True when a queue that is loaded from the last save would contradict this one."""
        changed = self._changed or self.quarantine.unsaved or self.knobs.seq > self._saved_seq
        return changed or self.ledger.cursor.given > self.ledger.cursor.saved

    def save(self) -> QueueState:
        """What must outlive this process. Payloads, queued results and leases stay with their generators."""
        self._changed, self._saved_seq = False, self.knobs.seq
        takes, retired = self._takes.save({e.take_id for e in self.ledger.of_state(State.TAKEN)})
        parts = self.clock.save(), self.ledger.save(), self.tally.save()
        return QueueState(*parts, takes, retired, self.closed, self.knobs.save(), self.quarantine.save())

    def load(self, state: QueueState) -> None:
        """Go on from there, in a queue that was just made."""
        self.clock.load(state.clock)
        self.tally.load(state.tally)
        self.ledger.load(state.ledger)
        self._takes.by_id = {t.take_id: t for t in state.takes}
        self._takes.retired, self.closed = state.retired_take, state.closed
        self.quarantine.load(state.quarantine)
        self.untuned = self.knobs.load(state.knobs)
        if self.knobs.base is not None:
            config = self.knobs.config(self.knobs.at(self.knobs.in_force))
            self.limits.follow(limits_of(config))
            self.quarantine.follow(rules_of(config))

    def claim(
        self,
        generator_id: str,
        held: Version,
        sampling: Sequence[str],
        kept: Sequence[str],
        now: float,
        heard: int = -1,
    ) -> Claim:
        """A generator says which leases it samples, and of which it keeps the result.

        What waits to be leased is leased to it again. heard: leases of its Leases up to that seq which it does not
        name got lost, and are taken back.
        """
        probes = self.quarantine.claim(generator_id, sampling, kept, heard)
        claim = self._claims.claim(generator_id, held, no_probes(sampling), no_probes(kept), now, heard)
        return claim._replace(useless=claim.useless + probes.useless, void=claim.void + probes.void)

    # --- versions -------------------------------------------------------------------------------

    def publish(self, version: Version, undone: Iterable[Committed] = ()) -> bool:
        """The learner published a version. False when it is not newer than the newest (no effect).

        A higher epoch is a resume: takes are dissolved, the clock goes to the version's update, groups or leases
        of versions that the resume threw away are evicted (lost_version), and the groups of the commits that it
        threw away are leased again (rolled_back).
        """
        epoch = self.clock.epoch
        if not self.clock.publish(version):
            return False
        self._changed = True
        if version.epoch != epoch:
            for take_id in list(self._takes.by_id):
                self.dissolve(take_id)
            self._takes.retired = -1
            self._patience.reset()
            self.ledger.curriculum.roll_back(version.update)
            for group_id in dict.fromkeys(c.group_id for c in undone):
                if self.ledger.reopen(group_id):
                    self.tally.count("rolled_back")
        self._exits.evict_old(self.clock.update)
        return True

    # --- leases ---------------------------------------------------------------------------------

    def lease(self, generator_id: str, held: Version, want: int, now: float, seq: int = 0) -> Grant:
        """Up to `want` prompts for a generator that holds a version, by the admission rule. seq: of their Leases."""
        leases: list[Lease] = []
        idle = ""
        if generator_id in self.quarantine.barred:
            wait = self.closed or self.recovery.active
            return self._probes.grant(generator_id, held, want, now, seq, wait)
        while len(leases) < want:
            idle = self.refusal(held)
            if idle:
                self.tally.idle[idle] += 1
                break
            entry = self.ledger.next_entry()
            entry.attempt += 1
            prompt = self.ledger.prompts[entry.index]
            lease_id = lease_id_of(entry.group_id, entry.attempt)
            expires = now + self.limits.lease_timeout_s
            lease = Lease(lease_id, entry.group_id, entry.attempt, prompt, generator_id, held, expires, seq)
            self.ledger.move(entry, State.LEASED)
            entry.lease = lease
            leases.append(lease)
        return Grant(leases, idle)

    def refusal(self, held: Version) -> str:
        """Why a generator that holds `held` gets no lease now, or ""."""
        if self.recovery.active:
            return "recovering"
        return "done" if self.closed else refusal(held, self.limits, self.clock, self.ledger)

    def withdraw(self, leases: Iterable[Lease]) -> None:
        """Take back leases that never reached their generator; they do not count as attempts."""
        self._probes.withdraw(leases := list(leases))
        self._claims.withdraw(leases)

    def fail(self, generator_id: str, lease_id: str, reason: str) -> bool:
        """A generator gives a lease back. False when it does not hold that lease (any more)."""
        if is_probe(lease_id):
            return self._probes.fail(generator_id, lease_id, reason)
        entry = self.ledger.entries.get(lease_id.rpartition("#")[0])
        lease = entry.lease if entry is not None else None
        if entry is None or lease is None or lease.lease_id != lease_id or lease.generator_id != generator_id:
            return False
        self.tally.count_foreign("failed", reason)
        self._exits.give_back(entry)
        return True

    def expire(self, now: float) -> None:
        """Give out again what is leased for too long. A late result is still welcome once."""
        self.recovery.tick(now)
        for entry in self.ledger.of_state(State.LEASED):
            if entry.lease is not None and entry.lease.expires <= now:
                self._exits.outlast(entry, "lease_expired")
        for entry in self.room.overdue(now, self.limits.lease_timeout_s):
            self.give_up(entry)

    def generator_lost(self, generator_id: str, reason: str = "dead_generator") -> None:
        """Give out again everything that a generator was sampling, and what it kept because there was no room."""
        self.recovery.lost(generator_id)
        self.quarantine.lost(generator_id)
        for entry in self.ledger.of_state(State.LEASED):
            if entry.lease is not None and entry.lease.generator_id == generator_id:
                self._exits.outlast(entry, reason)
        for entry in [e for e in self.ledger.entries.values() if e.sender == generator_id]:
            if entry.state is State.KEPT:
                self.give_up(entry)
            else:
                entry.orphan = bool(entry.payload)

    # --- groups in ------------------------------------------------------------------------------

    def put(self, group: GroupHead, payload: Sequence[Buffer], sender: str) -> Put:
        """A finished group with its frames. Once per group id; the first result wins, late or not."""
        if is_probe(group.group_id):
            return self._probes.put(group, payload, sender)
        return self._intake.put(group, payload, sender, self.closed)

    def bar(self, generator_id: str) -> None:
        """A generator is in quarantine: its leases and its finished groups, but those in a take, are leased again."""
        self._changed = True
        self._exits.bar(generator_id)

    # --- groups out -----------------------------------------------------------------------------

    def take(self, take_id: int, update: int, now: float = 0.0) -> Take | None:
        """Freeze (once) the groups of updates update, update + 1, ...; None while there are too few.

        Oldest first: lowest token version, then age. There are M batches, or as many as the newest
        version due by `update` and the end of the run allow. Under stale: wait it also waits, a bounded
        time, for groups that no later take could use. Raises ValueError for a take that contradicts an
        earlier one.
        """
        known = self._takes.find(take_id, update, self.clock.update)
        if known is not None:
            return known
        if self.clock.newest is None:
            self.waiting, self.lacks = "no version was published", "version"
            return None
        if self.recovery.active:
            self.waiting, self.lacks = f"{self.recovery.waiting} after the restart of replay", "recovering"
            return None
        self._adopt(update, self.clock.newest)
        count, size = num_batches(update, self.limits, self.clock, self.knobs.follows), self.limits.groups_per_update
        chosen = self._choose(update, count, now)
        if len(chosen) < count * size:
            queued = self.ledger.count(State.QUEUED)
            leased, kept = self.ledger.count(State.LEASED), self.ledger.count(State.KEPT)
            self.waiting, self.lacks = f"{queued} of {count * size} groups for update {update}", "groups"
            self.waiting += f", {leased} leased" + f", {kept} kept by generators until there is room" * (kept > 0)
            self.waiting += self._intake.flat_note
            return None
        why = self._patience.waits(take_id, update, count, now)
        if why:
            self.waiting, self.lacks = why, "stragglers"
            return None
        batches = cut(chosen, update, count, size, (self.limits.seed, self.clock.epoch, update))
        tokens = tuple(tuple(self._tokens(i) for i in ids) for ids in batches)
        bounds = tuple(update + m - self.limits.max_lag for m in range(count))
        take = Take(take_id, update, batches, bounds, tokens, *self.knobs.freeze())
        for candidate in chosen:
            entry = self.ledger.entries[candidate.group_id]
            self.ledger.move(entry, State.TAKEN)
            entry.take_id = take_id
        self._changed, self._intake.num_flat = True, 0
        self._takes.add(take)
        return take

    def _adopt(self, update: int, newest: Version) -> None:
        """Put live settings in force for the take at `update`, if it can be had under them."""
        config = self.knobs.adopt(update, newest.update)
        if config is not None:
            self.limits.follow(limits_of(config))
            self.quarantine.follow(rules_of(config))
            self._swept, self._chosen, self._changed = (None, 0.0), (None, []), True
            self._patience.forget()

    @property
    def next_update(self) -> int:
        """The first update of which the take is not frozen."""
        return max([self.clock.update, *(t.update + len(t.batches) for t in self._takes.by_id.values())])

    def _choose(self, update: int, count: int, now: float) -> list[Candidate]:
        """The groups of a take, fewer than it needs when there are too few.

        A waiting rank asks on every poll: walks the queue only when that can change the answer.
        """
        size, versions = self.limits.groups_per_update, (update, self.clock.update, self.clock.newest)
        if self.ledger.count(State.QUEUED) < count * size:
            if versions != self._swept[0] or now - self._swept[1] >= SWEEP_S:
                self._exits.evict_old(update)
                self._swept = versions, now
            return []
        if self._chosen[0] != (versions, count, self.ledger.moves):
            self._exits.evict_old(update)
            chosen, late = select(self._candidates(), update, count, size)
            for group_id in late:
                self._exits.evict(self.ledger.entries[group_id], "overtaken")
            self._chosen = (versions, count, self.ledger.moves), chosen
        return self._chosen[1]

    def shard(self, take_id: int, rank: int, world: int) -> list[tuple[int, Entry]]:
        """(batch, group) of one rank's part of a frozen take: what of it is not yet committed.

        Whole groups, balanced by tokens inside each batch; the same for every call, and together the
        ranks have each group once. Raises ValueError on a rank outside the world.
        """
        return self._takes.shard(take_id, rank, world, self.ledger.entries)

    def dissolve(self, take_id: int) -> None:
        """A take that no rank has is undone: its groups wait to be taken, those without a payload to be leased."""
        self._changed = True
        del self._takes.by_id[take_id]
        for entry in self.ledger.of_state(State.TAKEN):
            if entry.take_id == take_id and entry.payload:
                entry.take_id = -1
                self.ledger.move(entry, State.QUEUED)
                if entry.sender in self.quarantine.barred:
                    self._exits.evict(entry, "quarantined")
            elif entry.take_id == take_id:
                self.give_up(entry)

    def give_up(self, entry: Entry) -> None:
        """The payload of a group in a take is lost with its generator: the prompt is leased again."""
        self._changed = True
        self._exits.lose(entry)

    def commit(
        self, take_id: int, update: int, outcome: str, group_ids: Sequence[str], batch: int = 0
    ) -> list[Committed]:
        """Resolve groups of a batch. update is the learner's clock after it; trained advanced it by one.

        batch: how many batches the policy had used up before this one.

        Groups that are not in that take (committed before, dissolved by a resume) are counted and left
        alone. Raises ValueError on an unknown outcome, a take that was never made, or an update beyond it.
        """
        if outcome not in ("trained", "skipped"):
            raise ValueError(f"outcome {outcome!r} is neither trained nor skipped")
        self._takes.check_commit(take_id, update, self.clock.update)
        return self._commit(take_id, update, outcome, group_ids, batch)

    def _commit(self, take_id: int, update: int, outcome: str, group_ids: Sequence[str], batch: int) -> list[Committed]:
        used_at = update - 1 if outcome == "trained" else update
        done: list[Committed] = []
        for group_id in group_ids:
            entry = self.ledger.entries.get(group_id)
            if entry is None or entry.digest is None or entry.state is not State.TAKEN or entry.take_id != take_id:
                self.tally.count("commit_unknown")
                continue
            if outcome == "trained":
                self.tally.train(entry.digest, used_at, self._takes.max_lag(take_id, self.limits.max_lag))
            else:
                self.tally.count("skipped")
            done.append(Committed(used_at, self.clock.epoch, group_id, entry.digest.generator_id, outcome, batch))
            self._exits.resolve(entry)
        self._changed = True
        self.clock.advance(update)
        self._exits.evict_old(self.clock.update)
        return done

    def repeat(self, committed: Iterable[Committed]) -> None:
        """Commits that an earlier process wrote down after its last save."""
        for c in committed:
            entry = self.ledger.entries.get(c.group_id)
            if entry is not None:
                self._commit(entry.take_id, c.update + (c.outcome == "trained"), c.outcome, [c.group_id], c.batch)

    def close(self) -> None:
        """The run is over: every open group is resolved and every lease cancelled."""
        self.closed = self._changed = True
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

    def _tokens(self, group_id: str) -> int:
        d = self.ledger.entries[group_id].digest
        assert d is not None
        return d.tokens

    def _candidates(self) -> list[Candidate]:
        stale, max_lag = self.limits.stale, self.limits.max_lag
        queued = self.ledger.by_age(State.QUEUED)
        return [Candidate(e.group_id, d.last_update(stale, max_lag)) for e in queued if (d := e.digest) is not None]
