"""staleness.stale: wait, by hand: for whom a take waits, for how long, and what ends it (G = 2, groups of 0.5 s)."""

import math
from dataclasses import replace

import pytest

from asyncrl.replay.ledger import State
from asyncrl.replay.limits import Limits
from asyncrl.replay.patience import Patience
from asyncrl.types import Version
from tests.replay.support import answer, deliver, make_queue

V0, V1 = Version(0, 0), Version(0, 1)


def waiting_queue(**changes):
    """A queue that waits at most 4 x 0.5 s, with one lease of version 0 and two finished groups of version 1."""
    values = {"groups_per_update": 2, "max_lag": 1, "stale": "wait", "patience": 4.0, "lease_timeout_s": 60.0}
    queue = make_queue(**(values | changes))
    slow = queue.lease("g1", V0, 1, 0.0).leases[0]
    queue.publish(V1)
    ids = []
    for lease in queue.lease("g0", V1, 2, 0.0).leases:
        assert deliver(queue, answer(lease), [b"group", b""], "g0").status == "admitted"
        ids.append(lease.group_id)
    return queue, slow, ids


def test_a_group_that_arrives_in_time_is_in_the_take():
    queue, slow, ids = waiting_queue()
    assert queue.take(0, 1, 100.0) is None and queue.waiting.startswith("1 unfinished groups that no update")
    assert queue.take(0, 1, 101.9) is None
    assert deliver(queue, answer(slow), [b"group", b""], "g1").status == "admitted"
    assert queue.take(0, 1, 101.9).batches == ((slow.group_id, ids[0]),)
    assert queue.tally.waits == 1 and queue.tally.wait_s == pytest.approx(1.9)


def test_patience_ends_and_what_is_too_old_then_goes():
    queue, slow, ids = waiting_queue()
    assert queue.take(0, 1, 100.0) is None and queue.take(0, 1, 101.99) is None
    assert queue.take(0, 1, 102.0).batches == (tuple(ids),)
    assert queue.tally.wait_s == pytest.approx(2.0)
    queue.commit(0, 2, "trained", ids)
    assert queue.drain_cancelled() == [("g1", slow.lease_id)] and queue.tally.counters["doomed_lease"] == 1
    # As under evict, one old token is enough.
    assert deliver(queue, answer(slow), [b"group", b""], "g1").status == "resolved"


@pytest.mark.parametrize("end", ["expire", "dead", "failed"])
def test_a_lease_that_ends_ends_the_wait(end):
    queue, slow, ids = waiting_queue(patience=1000.0)
    assert queue.take(0, 1, 59.0) is None
    if end == "expire":
        queue.expire(60.0)
    elif end == "dead":
        queue.generator_lost("g1")
    else:
        queue.fail("g1", slow.lease_id, "EngineError")
    assert queue.take(0, 1, 60.0).batches == (tuple(ids),)


def test_patience_0_is_evict():
    queue, _, ids = waiting_queue(patience=0.0)
    assert queue.take(0, 1, 100.0).batches == (tuple(ids),)
    assert queue.tally.waits == 0 and queue.tally.wait_s == 0


@pytest.mark.parametrize("stale", ["mask", "evict"])
def test_the_other_policies_do_not_wait(stale):
    queue, _, ids = waiting_queue(stale=stale)
    assert queue.take(0, 1, 100.0).batches == (tuple(ids),)


def test_groups_that_a_later_take_can_use_are_not_waited_for():
    queue, _, ids = waiting_queue(max_lag=2)
    assert queue.take(0, 1, 100.0).batches == (tuple(ids),)


def test_a_group_that_would_not_be_chosen_is_not_waited_for():
    # Two queued groups of version 0 fill the take at update 1; a third of that version would come behind them.
    queue = make_queue(groups_per_update=2, max_lag=1, stale="wait", patience=4.0)
    leases = queue.lease("g0", V0, 3, 0.0).leases
    for lease in leases[:2]:
        deliver(queue, answer(lease), [b"group", b""], "g0")
    queue.publish(V1)
    assert queue.take(0, 1, 100.0) is not None and queue.tally.waits == 0


def test_more_due_leases_than_the_take_has_room_for_do_not_lengthen_the_wait():
    queue = make_queue(groups_per_update=2, max_lag=1, stale="wait", patience=1000.0)
    slow = queue.lease("g1", V0, 3, 0.0).leases
    queue.publish(V1)
    for lease in queue.lease("g0", V1, 1, 0.0).leases:
        deliver(queue, answer(lease), [b"group", b""], "g0")
    deliver(queue, answer(slow[0]), [b"group", b""], "g1")
    assert queue.take(0, 1, 10.0) is None
    deliver(queue, answer(slow[1]), [b"group", b""], "g1")
    assert queue.take(0, 1, 11.0).batches == ((slow[0].group_id, slow[1].group_id),)


def test_a_take_of_two_batches_waits_for_what_the_next_take_could_not_use():
    # A take at update 0 trains 0 and 1; version 0 may be used up to 1, so the lease is due. Version 1 is not.
    queue = make_queue(groups_per_update=1, updates_per_take=2, max_lag=1, stale="wait", patience=4.0)
    a, b = queue.lease("g0", V0, 2, 0.0).leases
    deliver(queue, answer(a), [b"group", b""], "g0")
    assert queue.take(0, 0, 0.0) is None and queue.waiting.startswith("1 of 2 groups")
    deliver(queue, answer(b), [b"group", b""], "g0")
    assert queue.take(0, 0, 0.0) is not None


def test_the_wait_is_counted_from_when_the_take_could_be_made_and_once_per_take():
    queue, _, ids = waiting_queue()
    late = queue.ledger.entries[ids[1]]
    queue.ledger.move(late, State.PENDING)
    assert queue.take(0, 1, 100.0) is None and queue.waiting.startswith("1 of 2 groups")
    (again,) = queue.lease("g0", V1, 1, 100.0).leases
    deliver(queue, answer(again), [b"group", b""], "g0")
    assert queue.take(0, 1, 500.0) is None and queue.take(0, 1, 501.0) is None
    assert queue.take(0, 1, 502.0) is not None
    assert queue.tally.waits == 1 and queue.tally.wait_s == pytest.approx(2.0)


def test_a_closed_queue_and_a_recovering_one_wait_for_nobody():
    queue, _, _ = waiting_queue()
    queue.recovery.begin(["g1"], 50.0)
    assert queue.take(0, 1, 10.0) is None and "after the restart" in queue.waiting and queue.tally.waits == 0
    queue.expire(50.0)
    assert queue.take(0, 1, 50.0) is None and queue.tally.waits == 1
    queue.close()
    assert queue.take(1, 1, 1000.0) is None and queue.waiting.startswith("0 of 2 groups")


def test_the_bound_is_the_median_of_the_last_groups_and_never_longer_than_a_lease():
    queue = make_queue()
    limits = Limits(4, 2, 2, stale="wait", patience=3.0, lease_timeout_s=50.0)
    patience = Patience(limits, queue.ledger, queue.tally)
    assert patience.bound_s == 50.0
    for seconds in (1.0, 5.0, 2.0, math.nan, -1.0, math.inf):
        patience.note(seconds)
    assert patience.bound_s == 6.0
    for _ in range(300):
        patience.note(30.0)
    assert patience.bound_s == 50.0
    for _ in range(256):
        patience.note(4.0)
    assert patience.bound_s == 12.0
    assert Patience(replace(limits, patience=0.0), queue.ledger, queue.tally).bound_s == 0.0


def test_under_wait_a_lease_that_came_too_late_is_cancelled_and_admission_is_the_same():
    for stale in ("evict", "wait"):
        queue = make_queue(stale=stale, max_lag=0, groups_per_update=1)
        lease = queue.lease("g0", V0, 1, 0.0).leases[0]
        assert queue.lease("g0", V0, 1, 0.0).idle == "ahead_full"
        queue.publish(V1)
        assert queue.drain_cancelled() == [("g0", lease.lease_id)]


def test_the_first_take_after_a_resume_waits_although_its_number_is_that_of_an_earlier_one():
    queue, _, ids = waiting_queue()
    assert queue.take(0, 1, 100.0) is None and queue.take(0, 1, 102.0) is not None and queue.tally.waits == 1
    queue.commit(0, 2, "trained", ids)
    assert queue.publish(Version(1, 1))
    queue.lease("g1", Version(1, 1), 1, 150.0)
    queue.publish(Version(1, 2))
    for lease in queue.lease("g0", Version(1, 2), 2, 150.0).leases:
        deliver(queue, answer(lease, [(2, 4)], [(2, 4)], epoch=1), [b"group", b""], "g0")
    assert queue.take(0, 2, 200.0) is None, "its own wait begins now"
    assert queue.tally.waits == 2 and queue.take(0, 2, 201.99) is None
    assert queue.take(0, 2, 202.0) is not None


def test_a_take_that_waits_for_old_groups_is_worked_out_again_only_when_something_moved():
    queue, slow, ids = waiting_queue()
    assert queue.take(0, 1, 100.0) is None
    walks = []
    of_state, by_age = queue.ledger.of_state, queue.ledger.by_age
    queue.ledger.of_state = lambda state: (walks.append(state), of_state(state))[1]
    queue.ledger.by_age = lambda *states: (walks.append(states), by_age(*states))[1]
    assert all(queue.take(0, 1, 100.0 + now / 1000) is None for now in range(1900)) and not walks
    assert deliver(queue, answer(slow), [b"group", b""], "g1").status == "admitted"
    assert queue.take(0, 1, 101.9).batches == ((slow.group_id, ids[0]),)
