"""The cap on payload memory: who may come in, who has to leave, what is asked for (G = 2, groups of 100 bytes)."""

from dataclasses import replace

import numpy as np
import pytest

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.replay.ledger import State, num_bytes
from asyncrl.replay.room import ASK_S
from asyncrl.types import Group, Prompt, Segment, Trajectory, Version
from tests.replay.support import answer, deliver, make_queue, train

V0, V1 = Version(0, 0), Version(0, 1)


def payload(size=100):
    return [b"group", b"x" * (size - 5)]


def make_small(capacity=300, **changes):
    """Nothing is reserved for leases, so that their results find too little room."""
    return make_queue(groups_per_update=2, max_lag=8, capacity_bytes=capacity, **changes)


def lease(queue, count, version=V0, name="g0", now=0.0):
    grant = queue.lease(name, version, count, now)
    assert len(grant.leases) == count, grant.idle
    return grant.leases


def put(queue, one, size=100, name="g0"):
    return deliver(queue, answer(one, generator=name), payload(size), name).status


def held(queue):
    return {e.group_id for e in queue.ledger.of_state(State.QUEUED)}


def test_a_group_without_room_stays_with_its_generator_until_there_is_some():
    queue = make_small()
    a, b, c, d = lease(queue, 4)
    assert [put(queue, x) for x in (a, b, c, d)] == ["admitted"] * 3 + ["no_room"]
    assert queue.ledger.num_bytes == queue.tally.peak_bytes == 300 and queue.ledger.kept_bytes == 100
    assert queue.room.ask(0.0) == [] and put(queue, d) == "no_room"
    assert queue.ledger.in_flight == 4 and queue.tally.counters["no_room"] == 2
    assert train(queue, 0, 0) == [a.group_id, b.group_id]
    assert queue.room.ask(1.0) == [("g0", d.group_id)]
    # It is asked for once, and again when it did not come.
    assert queue.room.ask(1.0 + ASK_S / 2) == [] and queue.room.ask(1.0 + ASK_S) == [("g0", d.group_id)]
    assert put(queue, d) == "admitted" and put(queue, d) == "known"
    assert train(queue, 1, 1) == [c.group_id, d.group_id]
    assert queue.ledger.num_bytes == 0 and queue.tally.peak_bytes == 300


def test_an_older_group_takes_the_room_of_younger_ones():
    queue = make_small(capacity=400)
    old = lease(queue, 1, name="g1")[0]
    queue.publish(V1)
    young = lease(queue, 4, V1)
    assert [put(queue, x) for x in young] == ["admitted"] * 4
    assert put(queue, old, size=150, name="g1") == "admitted"
    # The two youngest had to go; nothing of them is lost.
    assert held(queue) == {old.group_id, young[0].group_id, young[1].group_id}
    assert queue.ledger.num_bytes == 350 and queue.tally.peak_bytes == 400
    assert train(queue, 0, 1) == [old.group_id, young[0].group_id]
    assert queue.room.ask(0.0) == [("g0", young[2].group_id), ("g0", young[3].group_id)]
    assert [put(queue, x) for x in young[2:]] == ["admitted"] * 2


def test_the_only_copy_of_a_group_stays_where_it_is():
    queue = make_small(capacity=400)
    old = lease(queue, 1, name="g1")[0]
    queue.publish(V1)
    young = lease(queue, 4, V1)
    assert [put(queue, x) for x in young] == ["admitted"] * 4
    queue.generator_lost("g0")
    assert put(queue, old, name="g1") == "no_room" and queue.room.ask(0.0) == []
    assert held(queue) == {x.group_id for x in young}
    # It was only believed dead, and says what it still has.
    queue.claim("g0", V1, [], [young[2].lease_id, young[3].lease_id], 0.0)
    assert put(queue, old, name="g1") == "admitted"
    assert held(queue) == {old.group_id, *(x.group_id for x in young[:3])}


def test_a_restored_take_becomes_whole_at_the_cost_of_what_nobody_else_has():
    queue = make_small(capacity=250)
    a, b = lease(queue, 2)
    put(queue, a), put(queue, b)
    queue.take(0, 0)
    other = make_small(capacity=250)
    other.clock.newest = None
    other.load(queue.save())
    other.claim("g0", V0, [], [a.lease_id, b.lease_id], 0.0)
    c, d = lease(other, 1, name="g1") + lease(other, 1, name="g2")
    assert put(other, c, name="g1") == "admitted" and put(other, d, name="g2") == "admitted"
    other.generator_lost("g1")
    assert put(other, a) == "known" and held(other) == {c.group_id}
    assert put(other, b) == "known" and held(other) == set()
    # Nobody has c any more: it waits to be leased again. d is kept by g2, and not asked for while there is no room.
    assert other.tally.counters["lost_payload"] == 1 and other.ledger.count(State.KEPT) == 1
    other.expire(0.0), other.room.ask(0.0)
    other.expire(other.limits.lease_timeout_s + 1)
    assert other.tally.counters["lost_payload"] == 1 and other.ledger.kept_bytes == 100
    other.commit(0, 1, "trained", [a.group_id, b.group_id])
    (again,) = lease(other, 1, name="g2", now=2000.0)
    assert (again.group_id, again.attempt) == (c.group_id, 2)
    assert other.room.ask(2000.0) == [("g2", d.group_id)]
    assert put(other, d, name="g2") == "admitted" and put(other, again, name="g2") == "admitted"
    assert set(train(other, 1, 1)) == {c.group_id, d.group_id} and other.ledger.num_bytes == 0


def test_a_group_whose_generator_died_is_like_any_other_once_it_is_sampled_again():
    queue = make_queue(groups_per_update=2, max_lag=1, capacity_bytes=300)
    leases = lease(queue, 2)
    for one in leases:
        put(queue, one)
    queue.generator_lost("g0")
    for update in (1, 2):
        queue.publish(Version(0, update))
    assert queue.tally.counters["stale"] == 2
    again = lease(queue, 3, Version(0, 2), name="g1")
    assert {x.group_id for x in again[:2]} == {x.group_id for x in leases}
    assert [put(queue, x, name="g1") for x in again[:0:-1]] == ["admitted"] * 2
    assert put(queue, again[0], 150, name="g1") == "no_room"
    train(queue, 0, 2)
    assert queue.room.ask(0.0) == [("g1", again[0].group_id)]


def test_room_that_is_meant_for_an_older_group_is_not_given_to_a_younger_one():
    queue = make_small(capacity=300)
    a, b, c, d, e = lease(queue, 5)
    for one, size in ((a, 140), (b, 140), (c, 100), (d, 20)):
        put(queue, one, size)
    # c waits for 100 bytes; the 20 that are left go to nobody who came later.
    assert held(queue) == {a.group_id, b.group_id} and queue.ledger.count(State.KEPT) == 2
    assert put(queue, e, 10) == "no_room"
    assert train(queue, 0, 0) == [a.group_id, b.group_id]
    assert [i for _, i in queue.room.ask(0.0)] == [c.group_id, d.group_id, e.group_id]
    assert put(queue, e, 10) == "admitted" and put(queue, c) == "admitted"


def test_many_young_groups_do_not_lock_out_a_cap_just_above_one_take():
    # 3 groups fit, a take has 2. Ten young groups wait; two old ones come last and are trained first.
    queue = make_small(capacity=300)
    old = lease(queue, 2, name="g1")
    queue.publish(V1)
    young = [lease(queue, 1, V1, f"g{i + 2}")[0] for i in range(10)]
    outbox = {x.group_id: (x, f"g{i + 2}") for i, x in enumerate(young)}
    assert [put(queue, x, name=name) for x, name in outbox.values()] == ["admitted"] * 3 + ["no_room"] * 7
    for one in old:
        assert put(queue, one, name="g1") == "admitted"
    order = train(queue, 0, 1)
    assert order == [x.group_id for x in old]
    for u in range(2, 7):
        for name, group_id in queue.room.ask(float(u)):
            one, sender = outbox[group_id]
            assert name == sender and put(queue, one, name=sender) == "admitted"
        order += train(queue, u - 1, u)
    assert order[2:] == [x.group_id for x in young] and queue.tally.peak_bytes <= 300
    assert not queue.tally.dropped


def test_a_group_above_a_takes_share_is_given_up_by_id():
    queue = make_small(capacity=300)
    a, b = lease(queue, 2)
    assert put(queue, a, size=150) == "admitted"
    assert put(queue, b, size=151) == "resolved"
    assert list(queue.tally.dropped) == [(b.group_id, "too_large")] and queue.ledger.in_flight == 1


def test_a_take_restored_from_disk_comes_before_what_is_queued():
    queue = make_small(capacity=250)
    a, b = lease(queue, 2)
    put(queue, a), put(queue, b)
    queue.take(0, 0)
    other = make_small(capacity=250)
    other.clock.newest = None
    other.load(queue.save())
    other.claim("g0", V0, [], [a.lease_id, b.lease_id], 0.0)
    c, d = lease(other, 2, name="g1")
    assert put(other, c, name="g1") == "admitted" and put(other, d, name="g1") == "admitted"
    assert put(other, a) == "known" and put(other, b) == "known"
    assert [len(e.payload) for _, e in other.shard(0, 0, 1)] == [2, 2] and other.ledger.num_bytes == 200
    assert other.ledger.count(State.KEPT) == 2 and other.tally.peak_bytes <= 250
    other.commit(0, 1, "trained", [a.group_id, b.group_id])
    assert {i for _, i in other.room.ask(0.0)} == {c.group_id, d.group_id}


def test_what_a_lost_generator_kept_is_leased_again():
    queue = make_small(capacity=200)
    *first, c = lease(queue, 3)
    assert [put(queue, x) for x in (*first, c)] == ["admitted", "admitted", "no_room"]
    queue.generator_lost("g0")
    assert queue.ledger.kept_bytes == 0 and queue.tally.counters["lost_payload"] == 1
    assert held(queue) == {x.group_id for x in first}
    assert queue.ledger.count(State.PENDING) == 1
    # It was only believed dead: its result is welcome once there is room.
    train(queue, 0, 0)
    assert put(queue, c) == "admitted" and queue.tally.counters["late_result"] == 1


def test_a_kept_group_that_never_comes_is_leased_again():
    queue = make_small(capacity=200, lease_timeout_s=60.0)
    leases = lease(queue, 3)
    for one in leases:
        put(queue, one)
    train(queue, 0, 0)
    assert queue.room.ask(10.0) == [("g0", leases[2].group_id)]
    queue.expire(69.0)
    assert queue.ledger.count(State.KEPT) == 1
    queue.expire(70.0)
    assert queue.ledger.count(State.PENDING) == 1 and queue.tally.counters["lost_payload"] == 1


@pytest.mark.parametrize("stale", ["mask", "evict", "wait"])
def test_a_kept_group_ages_like_a_queued_one(stale):
    queue = make_queue(groups_per_update=2, max_lag=1, capacity_bytes=200, stale=stale)
    leases = lease(queue, 3)
    for one in leases:
        put(queue, one)
    queue.clock.advance(2)
    queue.take(0, 2)
    assert queue.tally.counters["stale"] == 3 and queue.ledger.kept_bytes == queue.ledger.num_bytes == 0
    assert ("g0", leases[2].group_id) in queue.drain_resolved()


def test_the_end_of_the_run_resolves_what_generators_keep():
    queue = make_small(capacity=200)
    leases = lease(queue, 3)
    for one in leases:
        put(queue, one)
    queue.close()
    assert sorted(i for _, i in queue.drain_resolved()) == sorted(x.group_id for x in leases)
    assert queue.ledger.kept_bytes == 0 and queue.room.ask(0.0) == []


def test_a_producer_ten_times_faster_than_the_learner_waits_and_loses_nothing():
    # B40: the queue is bounded in groups and in bytes, and the producer waits.
    queue = make_queue(groups_per_update=2, max_lag=50, capacity_bytes=1000)
    outbox, out, refused, trained = {}, [], 0, []
    for u in range(30):
        for _ in range(20):
            grant = queue.lease("g0", Version(0, u), 1, 0.0)
            out += grant.leases
            refused += grant.idle == "capacity"
        for one in out:
            outbox[one.group_id] = one
            put(queue, one)
        out = []
        for _, group_id in queue.room.ask(float(u)):
            put(queue, outbox[group_id])
        trained += train(queue, u, u)
        queue.publish(Version(0, u + 1))
        assert queue.ledger.num_bytes <= 1000 and queue.ledger.in_flight <= 20
    assert len(set(trained)) == len(trained) == 60 and refused > 400
    assert not queue.tally.dropped and queue.tally.peak_bytes <= 1000


def test_routes_take_two_bytes_per_id_at_most():
    # B40: 32k tokens, 60 layers, 8 experts per token; what is held is the frame as it came.
    routes = np.zeros((100, 60, 8), np.uint16)
    tokens = np.zeros(100, np.int32)
    prompt = Prompt("p", np.zeros(1, np.int32), "", "", "")
    segment = (Segment(V0, 0, 100),)
    ones = np.ones(100, bool)
    one = Trajectory("t", tokens, -ones.astype(np.float32), ones, segment, 0.0, "stop", None, routes)
    frames = wire.encode_group(Group("0/p", prompt, "g0", 1, 1.0, (one,)))
    assert routes.nbytes <= num_bytes(frames) <= routes.nbytes + 100 * 9 + 500
    wide = replace(one, routes=routes.astype(np.int64))
    with pytest.raises(WireError, match="int64"):
        wire.encode_group(Group("0/p", prompt, "g0", 1, 1.0, (wide,)))
