"""Prompts that are hardly ever or nearly always solved rest, and nothing else does."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.replay.curriculum import Bounds, Curriculum
from asyncrl.replay.ledger import State
from asyncrl.replay.tally import Tally
from asyncrl.types import Version
from tests.replay.support import answer, deliver, make_queue, train
from tests.replay.test_snapshot import again

ALL = np.arange(8)


USUAL = Bounds(0.0, 1.0, 4)


def made(bounds: Bounds | None = USUAL, **rates: float) -> Curriculum:
    curriculum = Curriculum(8, bounds, Tally())
    for name, rate in rates.items():
        curriculum.note(int(name[1:]), rate, 0)
    return curriculum


def resting(curriculum: Curriculum, turn: int) -> list[int]:
    return np.flatnonzero(curriculum.resting(ALL, np.full(8, turn))).tolist()


def test_off_and_unknown_prompts_never_rest():
    assert resting(made(None, p0=0.0, p1=1.0), 1) == resting(made(), 1) == []


def test_a_resting_prompt_is_given_out_in_one_of_four_of_its_data_epochs():
    curriculum = made(p0=0.0, p1=1.0, p2=0.5, p5=1.0)
    # By their number, so that each data epoch has its part of them.
    assert [resting(curriculum, turn) for turn in range(1, 5)] == [[0, 1, 5], [0, 1, 5], [0], [1, 5]]
    for prompt in (0, 1, 5):
        assert sum(prompt in resting(curriculum, turn) for turn in range(100, 108)) == 6


@pytest.mark.parametrize(
    ("rate", "rests"), [(0.2, True), (0.21, False), (0.79, False), (0.8, True), (-3, True), (9, True)]
)
def test_at_a_bound_counts_as_beyond_it(rate, rests):
    curriculum = made(Bounds(0.2, 0.8, 2))
    curriculum.note(3, rate, 0)
    assert resting(curriculum, 0) == ([3] if rests else [])


def test_the_newest_group_decides():
    curriculum = made(p3=1.0)
    curriculum.note(3, 0.5, 7)
    assert resting(curriculum, 0) == []


def test_a_data_epoch_is_never_empty(caplog):
    tally = Tally()
    curriculum = Curriculum(4, Bounds(0.0, 1.0, 1024), tally)
    for i in range(4):
        curriculum.note(i, 1.0, 0)
    with caplog.at_level(logging.WARNING):
        assert not curriculum.resting(np.arange(4), np.full(4, 100)).any()
        assert "all 4 prompts of a data epoch would rest" in caplog.text and tally.counters["curriculum"] == 0
        for _ in range(9):  # small data that is solved: not a line for each of its many data epochs
            curriculum.resting(np.arange(4), np.full(4, 100))
    assert len(caplog.messages) == 4
    curriculum.note(2, 0.5, 1)
    assert curriculum.resting(np.arange(4), np.full(4, 100)).tolist() == [True, True, False, True]
    assert tally.counters["curriculum"] == 3


def test_what_a_learner_that_went_back_had_measured_is_unknown_again():
    curriculum = made()
    for prompt, update in enumerate([3, 4, 5, 6]):
        curriculum.note(prompt, 1.0, update)
    curriculum.roll_back(4)
    assert resting(curriculum, 9) == [0, 1]


def test_a_curriculum_comes_back_as_it_was_saved_and_another_size_is_left_unknown():
    curriculum = made(p1=0.25, p6=1.0)
    state = curriculum.save()
    assert len(state.rates) == len(state.updates) == 4 * 8
    new = made()
    new.load(state)
    assert new.save() == state and resting(new, 1) == resting(curriculum, 1) == [6]
    made(None).load(state)
    other = Curriculum(9, Bounds(0, 1, 2), Tally())
    other.load(state)
    assert np.isnan(other.rates).all()


def play(queue, count: int, solved: int, held: int = 0) -> list[str]:
    """Lease and answer; prompts below `solved` are always right, the others half of the time."""
    names = []
    for lease in queue.lease("g0", Version(queue.clock.epoch, held), count, 0.0).leases:
        rewards = (1.0, 1.0) if int(lease.prompt.prompt_id[1:]) < solved else (1.0, 0.0)
        deliver(queue, answer(lease, rewards=rewards, epoch=queue.clock.epoch), [b"group", b"x"], "g0")
        names.append(lease.group_id)
    return names


@pytest.mark.parametrize("zero_variance", ["keep", "refill"])
def test_the_queue_lets_solved_prompts_rest_over_data_epochs_and_restarts(zero_variance):
    # Two of 8 prompts are always solved, also where that makes their groups useless: each in every second data epoch.
    queue = make_queue(num_prompts=8, max_lag=99, curriculum=Bounds(0.0, 1.0, 2), zero_variance=zero_variance)
    seen: list[str] = []
    while len(seen) < 40:
        seen += play(queue, 1, solved=2)
        if queue.ledger.count(State.QUEUED) == 4:
            train(queue, queue.clock.update, queue.clock.update)
            queue = again(queue)
    epochs = [{i.partition("/")[2] for i in seen if i.startswith(f"{e}/")} for e in range(5)]
    assert [len(e) for e in epochs] == [8, 7, 7, 7, 7] and len(set(seen)) == 40
    assert [sorted({"p0", "p1"} & e) for e in epochs[1:]] == [["p1"], ["p0"], ["p1"], ["p0"]]
    assert queue.tally.counters["curriculum"] == 5
    # What rests is as good as resolved, and nobody waits for it.
    assert queue.ledger.is_resolved("1/p0") and "1/p0" not in queue.ledger.entries


def test_a_resume_of_the_learner_forgets_later_rates_and_trains_what_was_undone_again():
    queue = make_queue(num_prompts=8, max_lag=99, curriculum=Bounds(0.0, 1.0, 2))
    play(queue, 4, solved=8)
    train(queue, 0, 0)
    queue.publish(Version(0, 1))
    later = play(queue, 4, solved=8, held=1)
    assert np.isfinite(queue.ledger.curriculum.rates).all()
    take = queue.take(1, 1)
    undone = queue.commit(1, 2, "trained", take.batches[0])
    queue.publish(Version(0, 2))
    queue.publish(Version(1, 0), undone)
    assert all(not queue.ledger.is_resolved(i) for i in later)
    rates = queue.ledger.curriculum.rates
    assert np.isnan(rates[[int(i.partition("p")[2]) for i in later]]).all() and np.isfinite(rates).sum() == 4
    # Late results of versions that are gone say nothing about the policy of now.
    assert play(queue, 4, solved=8) and np.isfinite(queue.ledger.curriculum.rates).all()


def test_a_penalty_for_length_makes_no_prompt_unsolved():
    queue = make_queue(curriculum=Bounds(0.0, 1.0, 2))
    (lease,) = queue.lease("g0", Version(0, 0), 1, 0.0).leases
    group = answer(lease, rewards=(1.0, 0.5))
    cut = replace(group.trajectories[1], parts={"truncation_penalty": -0.5, "format": 0.2})
    group = replace(group, trajectories=(group.trajectories[0], cut))
    assert deliver(queue, group, [b"group", b"x"], "g0").status == "admitted"
    assert queue.ledger.curriculum.rates[int(lease.prompt.prompt_id[1:])] == 1.0
