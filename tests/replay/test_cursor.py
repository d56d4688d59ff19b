"""The cursor over data epochs that have a part of the prompts, and over prompts that rest."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import msgspec
import numpy as np
import pytest

from asyncrl.errors import TaskError
from asyncrl.replay.curriculum import Bounds, Curriculum, CurriculumState
from asyncrl.replay.cursor import RESERVE, Cursor, CursorState
from asyncrl.replay.mixing import Mixing
from asyncrl.replay.tally import Tally
from tests.replay.support import make_prompts

WEIGHTS = {"s0": 1.0, "s1": 2.0, "s2": 4.0}


def test_without_weights_the_order_is_that_of_the_seed_alone():
    cursor, n = Cursor(make_prompts(23), 5), 23
    got = [cursor.next() for _ in range(3 * n)]
    expected = [(e, int(i)) for e in range(3) for i in np.random.default_rng([5, e]).permutation(n)]
    assert got == expected and cursor.given == 3 * n


def test_a_weighted_data_epoch_has_a_part_of_the_prompts_and_knows_no_other():
    # 10 prompts of each source: all ten of s2, five of s1, 2.5 of s0.
    cursor = Cursor(make_prompts(30), 0, WEIGHTS)
    got = [cursor.next() for _ in range(17 + 18)]
    assert Counter(e for e, _ in got) == {0: 17, 1: 18} and cursor.given == 35
    first = {i for e, i in got if e == 0}
    assert Counter(i % 3 for i in first) == {0: 2, 1: 5, 2: 10}
    for epoch, index in got[:17]:
        cursor.resolve(epoch, index)
    others = sorted(set(range(30)) - first)
    assert not any(cursor.is_resolved(f"0/p{i}") for i in others) and all(cursor.is_resolved(f"0/p{i}") for i in first)
    assert cursor.next()[0] == 2
    # Data epoch 0 is complete and forgotten: its number says that it is over; what it never had cannot be opened.
    assert list(cursor.save(0).resolved) == [1, 2]
    assert cursor.reopen(f"0/p{others[0]}") is None
    assert cursor.reopen(f"0/p{min(first)}") == (0, min(first))
    assert [i for i in first if not cursor.is_resolved(f"0/p{i}")] == [min(first)]


def test_a_data_epoch_of_a_few_of_many_prompts_takes_a_few_bits():
    prompts = make_prompts(3000)
    prompts = [p for i, p in enumerate(prompts) if i % 3 == 0 or i < 30]
    cursor = Cursor(prompts, 0, dict.fromkeys(WEIGHTS, 1.0))
    for _ in range(100):
        cursor.next()
    # 10 of each of the three sources.
    assert {e: len(b) for e, b in cursor.save(0).resolved.items()} == {0: 4, 1: 4, 2: 4, 3: 4}


def test_no_prompts_and_two_of_one_name_are_refused():
    with pytest.raises(TaskError, match="no training prompts"):
        Cursor([], 0)
    with pytest.raises(TaskError, match="two training prompts have the id 'p0'"):
        Cursor(make_prompts(2) + make_prompts(1), 0)


class Books:
    """A cursor that is killed and loaded again, and what was given out, resolved and opened again."""

    def __init__(self, seed: int, weights: dict[str, float] | None, bounds: Bounds | None) -> None:
        self.random, self.seed, self.weights, self.bounds = random.Random(seed), seed, weights, bounds
        self.prompts, self.tally = make_prompts(60), Tally()
        self.curriculum, self.cursor = self.new()
        self.mixing = Mixing(60, seed, [p.data_source for p in self.prompts], weights)
        # In the order in which they came to be so.
        self.open: dict[tuple[int, int], None] = {}
        self.resolved: dict[tuple[int, int], None] = {}
        self.kills = self.epoch = 0
        self.save()

    def new(self) -> tuple[Curriculum, Cursor]:
        curriculum = Curriculum(60, self.bounds, self.tally)
        return curriculum, Cursor(self.prompts, self.seed, self.weights, curriculum)

    def save(self) -> None:
        self.spare = self.random.choice([0, 10, RESERVE])
        state = self.cursor.save(self.spare), self.curriculum.save(), self.tally.counters["curriculum"]
        self.disk = msgspec.msgpack.encode(state)

    def give(self) -> None:
        group = self.cursor.next()
        if self.cursor.given > self.cursor.saved:
            self.save()
        assert group not in self.open and group not in self.resolved, "given out twice"
        self.open[group] = None
        if group[0] != self.epoch and self.random.random() < 0.5:
            # A data epoch has just begun.
            self.kill()
        self.epoch = group[0]

    def resolve(self) -> None:
        if self.open:
            epoch, index = group = self.pick(self.open)
            del self.open[group]
            self.resolved[group] = None
            self.cursor.resolve(epoch, index)
            self.save()

    def admit(self) -> None:
        """A result came: nothing has to be saved for that."""
        if self.open:
            epoch, index = self.pick(self.open)
            self.curriculum.note(index, self.random.choice([0.0, 0.5, 0.5, 1.0]), epoch)

    def reopen(self) -> None:
        if self.resolved and self.random.random() < 0.3:
            group = self.pick(self.resolved)
            assert self.cursor.reopen(self.cursor.group_id(*group)) == group
            del self.resolved[group]
            self.open[group] = None
            self.save()

    def kill(self) -> None:
        self.kills += 1
        state, curriculum, count = msgspec.msgpack.decode(self.disk, type=tuple[CursorState, CurriculumState, int])
        self.curriculum, self.cursor = self.new()
        self.curriculum.load(curriculum)
        self.cursor.load(state)
        self.tally.counters["curriculum"] = count
        # As the ledger: what was reserved is given out again, and none of it twice.
        while self.cursor.given < state.reserved:
            group = self.cursor.next()
            assert group not in self.resolved
            self.open[group] = None
        self.save()

    def pick(self, groups: dict[tuple[int, int], None]) -> tuple[int, int]:
        """One of the oldest or of the newest."""
        some = [*itertools.islice(groups, 20), *itertools.islice(reversed(groups), 20)]
        return self.random.choice(some)

    def check(self) -> None:
        for groups, done in ((self.open, False), (self.resolved, True)):
            if groups:
                assert self.cursor.is_resolved(self.cursor.group_id(*self.pick(groups))) == done

    def check_epochs(self) -> int:
        """Every data epoch that is over gave out its prompts once, but those that it let rest; how many did."""
        rested = 0
        last = self.cursor.save(0).epoch
        given_in: defaultdict[int, set[int]] = defaultdict(set)
        for epoch, index in [*self.open, *self.resolved]:
            given_in[epoch].add(index)
        for epoch in range(last):
            members, given = set(self.mixing.order(epoch).tolist()), given_in[epoch]
            assert given <= members and given
            rested += len(members - given)
        return rested


CASES = {
    "plain": (None, None),
    "weighted": (WEIGHTS, None),
    "curriculum": (None, Bounds(0.0, 1.0, 3)),
    "both": (WEIGHTS, Bounds(0.0, 1.0, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_ten_thousand_random_events(case):
    weights, bounds = CASES[case]
    books = Books(1, weights, bounds)
    events = [books.give] * 30 + [books.resolve] * 29 + [books.reopen] * 2 + [books.kill] + [books.admit] * 30
    for _ in range(10_000):
        books.random.choice(events)()
        books.check()
    assert books.kills > 100 and books.cursor.given > 2000
    rested, counted = books.check_epochs(), books.tally.counters["curriculum"]
    if bounds is None:
        assert rested == counted == 0
    else:
        # The data epoch under way has counted what rests in it already.
        assert 100 < rested <= counted <= rested + 60


@pytest.mark.parametrize("bounds", [None, Bounds(0.0, 1.0, 2)])
def test_what_rests_in_a_data_epoch_is_saved_before_any_of_it_is_given_out(bounds):
    # A later process would know other rates, and take what was given out here for resting.
    cursor = Cursor(make_prompts(8), 0, None, Curriculum(8, bounds, Tally()))
    for _ in range(3):
        assert cursor.next() is not None
    cursor.save(0)
    for _ in range(5):
        assert cursor.next()[0] == 0 and cursor.given <= cursor.saved
    assert cursor.next()[0] == 1 and (cursor.given > cursor.saved) == (bounds is not None)
