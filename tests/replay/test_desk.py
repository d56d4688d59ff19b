"""Parked takes: how long rank 0 waited, by what was missing."""

import pytest

from asyncrl import wire
from asyncrl.replay.desk import Desk
from asyncrl.replay.limits import Limits
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import Version
from tests.replay.support import MODEL, fill, make_prompts, make_queue, train


def ask(desk: Desk, take_id: int, update: int, now: float, rank: int = 0, world: int = 1) -> None:
    desk.park(f"r{rank}".encode(), wire.Take(take_id, update, rank, world, 0), now)


def test_two_waits_between_two_looks_add_up():
    queue = make_queue()
    desk = Desk(queue)
    ask(desk, 0, 0, 10.0)
    assert desk.answers(10.0, "") == [] and desk.answers(10.4, "") == []
    fill(queue, 4)
    assert len(desk.answers(11.0, "")) == 1  # waited for 1 s
    train(queue, 0, 0)
    assert desk.answers(15.0, "") == []  # nobody waits meanwhile
    queue.publish(Version(0, 1))
    ask(desk, 1, 1, 20.0)
    assert desk.answers(20.0, "") == []
    fill(queue, 4, held=1)
    assert len(desk.answers(22.0, "")) == 1  # and for 2 s
    assert dict(desk.waited) == pytest.approx({"groups": 3.0})


def test_time_is_counted_for_what_was_missing_when_it_passed():
    queue = ReplayQueue(make_prompts(100), Limits(groups_per_update=4, group_size=2, max_lag=2), MODEL)
    desk = Desk(queue)
    ask(desk, 0, 0, 0.0)
    assert desk.answers(0.0, "") == []
    queue.publish(Version(0, 0))
    assert desk.answers(3.0, "") == []
    fill(queue, 4)
    assert len(desk.answers(3.5, "")) == 1
    assert {k: v for k, v in desk.waited.items() if v} == pytest.approx({"version": 3.0, "groups": 0.5})


def test_only_rank_0_counts_so_that_ranks_do_not_multiply_the_time():
    desk = Desk(make_queue())
    for rank in range(2):
        ask(desk, 0, 0, 0.0, rank, 2)
    desk.answers(0.0, "")
    desk.answers(2.0, "")
    assert dict(desk.waited) == pytest.approx({"groups": 2.0})
