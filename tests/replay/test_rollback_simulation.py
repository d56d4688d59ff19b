"""Learner and replay are killed at random points of random runs; the model and committed.jsonl always agree."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from asyncrl.replay.desk import Desk
from asyncrl.replay.evals import EvalsState, Evaluations
from asyncrl.replay.journal import Journal, surviving
from asyncrl.replay.limits import Limits
from asyncrl.replay.publications import Publications
from asyncrl.replay.queue import QueueState, ReplayQueue
from asyncrl.types import Group, Version
from tests.replay.support import MODEL, answer, deliver, make_prompts


class Killed(Exception):
    """Replay died here."""


class Story:
    """A learner with checkpoints, one generator that never dies, and replay on a real journal; all else is killed.

    model: the group ids of every batch that made the learner's weights.
    """

    PROMPTS = 23

    def __init__(self, folder: Path, seed: int, num_batches: int, sync_every: int) -> None:
        self.random, self.folder = random.Random(seed), folder
        self.limits = Limits(
            groups_per_update=3, group_size=2, max_lag=6, updates_per_take=num_batches, sync_every=sync_every,
            max_attempts=10**6,
        )  # fmt: skip
        self.todo: deque[list[str]] = deque()
        self.model: list[list[str]] = []
        self.skips: list[bool] = []
        self.checkpoint: tuple[int, int] = (0, 0)
        self.epoch, self.take_id, self.resumes, self.kills = 0, 0, 0, 0
        self.outbox: dict[str, Group] = {}
        self.held = Version(0, 0)
        self.saved = b""
        self.boot()
        self.announce(Version(0, 0), 0)

    def boot(self) -> None:
        """A new process of replay, with what the disk has."""
        self.journal = Journal(self.folder)
        self.queue = ReplayQueue(make_prompts(self.PROMPTS), self.limits, MODEL)
        evals = Evaluations(make_prompts(2, "e"), self.queue.tally, every=2)
        self.versions = Publications(self.queue, evals, Desk(self.queue), self.journal)
        self.evals = evals
        if self.saved:
            queue, evaluations, mark = msgspec.msgpack.decode(self.saved, type=tuple[QueueState, EvalsState, int])
            self.queue.load(queue)
            self.evals.load(evaluations)
            self.versions.repeat(mark)
        for group in list(self.outbox.values()):
            self.put(group)

    def save(self) -> None:
        if self.queue.unsaved or not self.saved:
            state = (self.queue.save(), self.evals.save(), self.journal.num_bytes)
            self.saved = msgspec.msgpack.encode(state)

    def maybe_die(self, chance: float = 0.15) -> None:
        if self.random.random() < chance:
            raise Killed

    def reliably(self, request: Callable[[], object]) -> None:
        """Ask until an answer comes back; replay may die before, in the middle of and after what it does."""
        while True:
            try:
                self.maybe_die()
                request()
                self.maybe_die()
                self.save()
                self.maybe_die()
                return
            except Killed:
                self.kills += 1
                self.journal.close()
                self.boot()

    def announce(self, version: Version, batches: int) -> None:
        self.reliably(lambda: self.versions.announce(version, str(version), batches))
        assert self.queue.clock.newest == version

    def put(self, group: Group) -> None:
        if deliver(self.queue, group, [b"group", b""], "g0").status in ("resolved", "refused"):
            self.outbox.pop(group.group_id, None)

    def sample(self) -> None:
        if self.random.random() < 0.7 and self.queue.clock.newest > self.held:
            self.held = self.queue.clock.newest
        for lease in self.queue.lease("g0", self.held, self.random.randint(1, 4), 0.0).leases:
            update, epoch = self.held.update, self.held.epoch
            self.outbox[lease.group_id] = answer(lease, [(update, 2)], [(update, 2)], epoch=epoch)
            self.put(self.outbox[lease.group_id])
        self.save()
        for _, group_id in self.queue.drain_resolved():
            self.outbox.pop(group_id, None)

    def step(self) -> None:
        """One batch, if there is one: trained or skipped, committed, sometimes saved, published."""
        if not self.todo:
            take = self.queue.take(self.take_id, self.update)
            self.save()
            if take is None:
                return
            self.todo.extend(list(ids) for ids in take.batches)
            self.take_id += 1
        ids = self.todo.popleft()
        if self.random.random() < 0.1:
            return self.resume()  # killed before the commit
        skipped = self.random.random() < 0.1
        self.model.append(ids)
        self.skips.append(skipped)

        def commit() -> None:
            outcome = "skipped" if skipped else "trained"
            done = self.queue.commit(self.take_id - 1, self.update, outcome, ids, len(self.model) - 1)
            self.journal.write(done[: len(done) // 2])
            self.maybe_die(0.1)
            self.journal.write(done[len(done) // 2 :])

        self.reliably(commit)
        if not skipped and self.update % self.limits.sync_every == 0:
            self.announce(Version(self.epoch, self.update), len(self.model))
        if self.random.random() < 0.3:
            self.checkpoint = (self.update, len(self.model))

    @property
    def update(self) -> int:
        return self.skips.count(False)

    def resume(self) -> None:
        """The learner is killed and another one goes on, maybe several times in a row."""
        self.resumes += 1
        update, batches = self.checkpoint
        self.model, self.skips, self.take_id = self.model[:batches], self.skips[:batches], 0
        self.todo.clear()
        assert self.update == update
        self.epoch = max(self.epoch, self.queue.clock.epoch) + 1
        self.announce(Version(self.epoch, update), batches)

    def check(self) -> None:
        lines = (self.folder / "committed.jsonl").read_text().splitlines()
        kept = surviving(json.loads(x) for x in lines)
        by_batch: dict[int, set[str]] = {}
        for c in kept:
            by_batch.setdefault(c["batch"], set()).add(c["group_id"])
        assert by_batch == {i: set(ids) for i, ids in enumerate(self.model)}
        names = [i for ids in self.model for i in ids]
        assert len(set(names)) == len(names), "trained twice"
        assert all(self.queue.ledger.is_resolved(i) for i in names)
        # Nothing is lost either: every prompt that was given out is in the model or open.
        opened = set(self.queue.ledger.entries)
        for number in range(self.queue.ledger.cursor.given):
            epoch, prompts = number // self.PROMPTS, self.PROMPTS
            if number % prompts == prompts - 1:
                whole = {f"{epoch}/p{i}" for i in range(prompts)}
                assert whole <= opened | set(names), whole - opened - set(names)


@pytest.mark.parametrize(("num_batches", "sync_every"), [(1, 1), (1, 3), (3, 3), (4, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_killed_the_file_says_what_the_model_is_made_of(tmp_path, seed, num_batches, sync_every):
    story = Story(tmp_path, seed, num_batches, sync_every)
    for _ in range(150):
        event = story.random.random()
        if event < 0.5:
            story.sample()
        elif event < 0.96:
            story.step()
        else:
            story.resume()
        story.check()
    story.journal.close()
    assert story.resumes > 3 and story.kills > 10 and len(story.model) > 5
    assert story.queue.tally.counters["rolled_back"] > 3
