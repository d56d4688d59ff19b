"""Generators in quarantine: what they lose, their re-sync and probe; no group is lost or trained twice by it."""

from __future__ import annotations

import pytest

from asyncrl import wire
from asyncrl.config import validate
from asyncrl.replay.knobs import Knobs
from asyncrl.replay.ledger import State
from asyncrl.replay.limits import limits_of
from asyncrl.replay.probes import is_probe
from asyncrl.replay.quarantine import (
    FORGET_S,
    PROBE_S,
    RESYNC_S,
    STARVED_S,
    VERDICT_TAKES,
    Quarantine,
    Rules,
    rules_of,
)
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import Version, fewest_sound
from tests.replay.net import publish
from tests.replay.support import MODEL, answer, deliver, fill, make_prompts, make_queue
from tests.replay.test_simulation import CASES, GENERATORS, Simulation

HELD = Version(0, 0)
PAYLOAD = [b"group", b"head", b"x" * 100]


def quarantined(queue, name="g0", reason="drift", now=0.0):
    """A generator that is out, as replay does it."""
    assert queue.quarantine.judge(name, False, reason, "b0", 3, 1, queue.clock.update, now) == "out"
    queue.bar(name)
    return queue


def resynced(queue, name="g0", now=0.0):
    """It has re-synced, so that it is to be probed."""
    assert queue.quarantine.due(name, 0.0, False, now)
    assert not queue.quarantine.due(name, 1.0, False, now)
    return queue


def probed(queue, name="g0", now=0.0, take_id=0):
    """It has answered its probe, which went to the learner with a take."""
    grant = queue.lease(name, HELD, 99, now)
    assert grant.leases
    for lease in grant.leases:
        deliver(queue, answer(lease, generator=name), PAYLOAD, name)
    assert len(queue.quarantine.ride(take_id)) == len(grant.leases)
    return grant.leases


# --- out --------------------------------------------------------------------------------------------


def test_leases_and_finished_groups_are_given_out_again_to_others():
    queue = make_queue()
    ids = fill(queue, 3)
    running = queue.lease("g0", HELD, 2, 0.0).leases
    other = queue.lease("g1", HELD, 1, 0.0).leases
    quarantined(queue)
    assert queue.tally.counters["quarantined"] == 5
    assert sorted(queue.drain_cancelled()) == sorted(("g0", x.lease_id) for x in running)
    assert sorted(queue.drain_resolved()) == sorted(("g0", i) for i in ids)
    again = queue.lease("g1", HELD, 5, 0.0).leases
    assert {x.group_id for x in again} == {*ids, *(x.group_id for x in running)}
    assert queue.ledger.entries[other[0].group_id].lease == other[0]


def test_it_gets_no_lease_and_hears_why():
    queue = quarantined(make_queue())
    grant = queue.lease("g0", HELD, 4, 0.0)
    assert (grant.leases, grant.idle) == ([], "quarantined")
    assert queue.tally.idle["quarantined"] == 1
    assert queue.ledger.cursor.given == 0


def test_nothing_that_comes_late_from_it_is_used_also_after_it_is_in_again():
    queue = make_queue()
    (lease,) = queue.lease("g0", HELD, 1, 0.0).leases
    quarantined(queue)
    assert deliver(queue, answer(lease), PAYLOAD, "g0").status == "resolved"
    resynced(queue)
    probed(queue)
    assert queue.quarantine.judge("g0", True, "clean", "b0", 1, 1, 0, 0.0) == "in"
    assert deliver(queue, answer(lease), PAYLOAD, "g0").status == "resolved"
    assert queue.ledger.count(State.QUEUED) == 0
    assert queue.lease("g0", HELD, 1, 0.0).leases[0].group_id == lease.group_id


def expired(queue):
    queue.expire(1000.0)


def silent(queue):
    queue.generator_lost("g0")


@pytest.mark.parametrize("lose", [expired, silent])
@pytest.mark.parametrize("leased_again", [False, True])
def test_neither_does_what_it_samples_under_a_lease_that_it_has_lost(lose, leased_again):
    queue = make_queue()
    (lease,) = queue.lease("g0", HELD, 1, 0.0).leases
    lose(queue)
    other = queue.lease("g1", HELD, 1, 1000.0).leases if leased_again else []
    quarantined(queue)
    probed(resynced(queue), now=1000.0)
    assert queue.quarantine.judge("g0", True, "clean", "b0", 1, 1, 0, 0.0) == "in"
    assert deliver(queue, answer(lease), PAYLOAD, "g0").status == "resolved"
    assert queue.ledger.count(State.QUEUED) == 0
    for x in other:
        assert deliver(queue, answer(x, generator="g1"), PAYLOAD, "g1").status == "admitted"


def test_what_comes_back_from_a_take_that_nobody_has_is_evicted():
    queue = make_queue()
    ids = fill(queue, 4)
    assert queue.take(0, 0) is not None
    quarantined(queue)
    queue.dissolve(0)
    assert queue.ledger.count(State.QUEUED) == 0
    assert {x.group_id for x in queue.lease("g1", HELD, 4, 0.0).leases} == set(ids)


def test_evicted_groups_are_no_cost_of_staleness():
    queue = make_queue()
    fill(queue, 2)
    quarantined(queue)
    assert queue.tally.counters["quarantined"] == 2
    assert queue.tally.left_out.count == 0


def test_what_is_in_a_take_stays_there():
    queue = make_queue()
    ids = fill(queue, 4)
    assert queue.take(0, 0) is not None
    quarantined(queue)
    assert len(queue.commit(0, 1, "trained", ids)) == 4


def test_the_attempts_of_a_prompt_do_not_count():
    queue = make_queue(max_attempts=1)
    (lease,) = queue.lease("g0", HELD, 1, 0.0).leases
    quarantined(queue)
    assert queue.tally.counters["max_attempts"] == 0
    assert queue.lease("g1", HELD, 1, 0.0).leases[0].group_id == lease.group_id


@pytest.mark.parametrize("on_evict", ["requeue", "drop"])
def test_evicted_prompts_are_leased_again_whatever_becomes_of_stale_ones(on_evict):
    queue = make_queue(on_evict=on_evict)
    ids = fill(queue, 2)
    quarantined(queue)
    assert {x.group_id for x in queue.lease("g1", HELD, 2, 0.0).leases} == set(ids)


@pytest.mark.parametrize(("alive", "fewest"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 4)])
def test_half_of_the_living_stay_in(alive, fewest):
    assert fewest_sound(alive) == fewest
    free, out = alive, 0
    q = Quarantine(Rules(), make_prompts(1), 0, 60.0)
    for i in range(alive):
        if q.judge(f"g{i}", False, "drift", "b", free, fewest, 0, 0.0):
            free, out = free - 1, out + 1
    assert out == alive - fewest


def test_when_none_that_is_sound_lives_all_are_let_in_again_after_a_while():
    q = quarantined(make_queue()).quarantine
    assert q.relieve(1, 0, 100.0) == []
    assert q.relieve(2, 1, 100.0 + STARVED_S) == []
    assert q.relieve(1, 0, 200.0) == []
    assert q.relieve(1, 0, 199.0 + STARVED_S) == []
    assert q.relieve(1, 0, 200.0 + STARVED_S) == ["g0"]
    assert not q.barred


# --- re-sync ----------------------------------------------------------------------------------------


def test_a_resync_is_asked_for_until_the_generator_says_that_it_made_one():
    q = quarantined(make_queue()).quarantine
    assert q.due("g0", 5.0, False, 0.0)
    assert not q.due("g0", 5.0, False, RESYNC_S - 1)
    assert not q.due("g0", 5.0, True, RESYNC_S)  # it loads already
    assert q.due("g0", 5.0, False, RESYNC_S)
    assert q.cases["g0"].phase == "resync"
    assert not q.due("g0", 6.0, False, RESYNC_S + 1)
    assert (q.cases["g0"].phase, q.cases["g0"].resyncs) == ("probe", 1)


@pytest.mark.parametrize("made", [float("nan"), float("inf"), -3.0])
def test_a_generator_that_counts_nonsense_is_asked_no_oftener(made):
    q = quarantined(make_queue()).quarantine
    assert q.due("g0", made, False, 0.0)
    assert not q.due("g0", made, False, 1.0)
    assert q.cases["g0"].phase == "resync"
    assert q.due("g0", made, False, RESYNC_S)
    assert not q.due("g0", 1.0, False, RESYNC_S + 1)
    assert (q.cases["g0"].phase, q.cases["g0"].resyncs) == ("probe", 1)


def test_a_probe_that_is_not_clean_leads_to_another_resync_each_later_and_then_out():
    queue = quarantined(make_queue())
    queue.quarantine.rules = Rules(probe_groups=2, max_resyncs=2, backoff_s=10.0)
    q, now = queue.quarantine, 0.0
    for made, wait in ((0, 10.0), (1, None)):
        assert q.due("g0", float(made), False, now)
        assert not q.due("g0", made + 1.0, False, now)
        now += PROBE_S
        probed(queue, now=now, take_id=made)
        q.judge("g0", False, "still", "b0", 2, 1, 5, now)
        if wait is not None:
            assert q.cases["g0"].phase == "waiting"
            assert not q.due("g0", 1.0, False, now + wait - 0.1)
            now += wait
    assert q.state()["g0"] == {"phase": "set_aside", "reason": "still", "resyncs": 2, "update": 0}
    assert not q.due("g0", 2.0, False, now + 1000)
    assert queue.lease("g0", HELD, 4, now + 1000).leases == []


def test_without_resyncs_it_stays_out():
    queue = make_queue()
    queue.quarantine.rules = Rules(resync=False)
    quarantined(queue)
    assert queue.quarantine.cases["g0"].phase == "set_aside"
    assert not queue.quarantine.due("g0", 0.0, False, 0.0)


def test_resyncs_count_for_one_process_over_all_its_quarantines():
    queue = quarantined(make_queue())
    queue.quarantine.rules = Rules(probe_groups=1, max_resyncs=1)
    probed(resynced(queue))
    queue.quarantine.judge("g0", True, "clean", "b0", 2, 1, 5, 0.0)
    quarantined(queue)
    assert queue.quarantine.cases["g0"].phase == "set_aside"
    queue.quarantine.joined("g0", "b1")
    assert queue.quarantine.cases["g0"].phase == "probe"


# --- probe ------------------------------------------------------------------------------------------


def test_a_probe_moves_no_cursor_and_counts_for_nothing():
    queue = resynced(quarantined(make_queue()))
    queue.quarantine.rules = Rules(probe_groups=3)
    assert queue.lease("g0", Version(0, 0)._replace(update=-1), 9, 0.0).leases == []  # not the newest version
    leases = queue.lease("g0", HELD, 2, 0.0).leases + queue.lease("g0", HELD, 9, 0.0).leases
    assert len({x.group_id for x in leases}) == 3
    assert all(is_probe(x.group_id) and x.expires == 120.0 for x in leases)
    assert (queue.ledger.in_flight, queue.ledger.cursor.given) == (0, 0)
    for lease in leases:
        assert queue.quarantine.ride(0) == []
        assert deliver(queue, answer(lease), PAYLOAD, "g0").status == "resolved"
    assert queue.quarantine.ride(0) == [tuple(PAYLOAD)] * 3
    assert queue.quarantine.ride(0) == [tuple(PAYLOAD)] * 3  # asked again
    assert queue.quarantine.ride(1) == []
    assert len(queue.ledger.entries) == queue.ledger.num_bytes == 0


def test_others_cannot_answer_a_probe_and_nobody_answers_twice():
    queue = resynced(quarantined(make_queue()))
    queue.quarantine.rules = Rules(probe_groups=2)
    first, second = queue.lease("g0", HELD, 2, 0.0).leases
    deliver(queue, answer(first, generator="g1"), PAYLOAD, "g1")
    for _ in range(2):
        deliver(queue, answer(first), PAYLOAD, "g0")
    assert queue.quarantine.ride(0) == []
    deliver(queue, answer(second), PAYLOAD, "g0")
    assert len(queue.quarantine.ride(0)) == 2


def test_an_answer_that_breaks_the_rules_is_counted_and_the_probe_begins_anew():
    queue = resynced(quarantined(make_queue()))
    queue.quarantine.rules = Rules(probe_groups=1)
    (lease,) = queue.lease("g0", HELD, 1, 0.0).leases
    deliver(queue, answer(lease, [(0, 4)]), PAYLOAD, "g0")  # one response, not two
    assert queue.tally.counters["group_size"] == 1
    assert queue.lease("g0", HELD, 1, PROBE_S - 1).leases == []
    assert queue.lease("g0", HELD, 1, PROBE_S).leases[0].group_id != lease.group_id


def test_an_answer_larger_than_its_share_of_the_memory_is_refused():
    queue = resynced(quarantined(make_queue(capacity_bytes=4000)))
    queue.quarantine.rules = Rules(probe_groups=1)
    (lease,) = queue.lease("g0", HELD, 1, 0.0).leases
    deliver(queue, answer(lease), [b"x" * 1001], "g0")
    assert queue.tally.counters["too_large"] == 1
    assert queue.quarantine.ride(0) == [] and not queue.quarantine.cases["g0"].results
    (lease,) = queue.lease("g0", HELD, 1, PROBE_S).leases
    deliver(queue, answer(lease), [b"x" * 1000], "g0")
    assert queue.quarantine.ride(0)


def test_one_generator_is_probed_at_a_time():
    queue = make_queue(lease_timeout_s=60.0)
    for name in ("g0", "g1"):
        resynced(quarantined(queue, name), name)
    assert queue.lease("g0", HELD, 2, 0.0).leases
    assert queue.lease("g1", HELD, 9, 1.0).leases == []
    assert len(queue.lease("g0", HELD, 9, 1.0).leases) == 2
    # Until it is judged, or does not answer in time.
    assert len(queue.lease("g1", HELD, 9, 60.0).leases) == 4
    assert queue.lease("g0", HELD, 9, 66.0).leases == []
    queue.generator_lost("g1")
    probed(queue, "g0", 66.0, 3)
    assert queue.lease("g1", HELD, 9, 99.0).leases == []
    assert queue.quarantine.judge("g0", True, "clean", "b0", 2, 1, 0, 99.0) == "in"
    assert queue.lease("g1", HELD, 9, 99.0).leases


def lose_by_failure(queue, lease):
    assert queue.fail("g0", lease.lease_id, "EngineError: x")


def lose_the_generator(queue, _):
    queue.generator_lost("g0")


def lose_on_the_way(queue, lease):
    queue.withdraw([lease])


def never_heard(queue, _):
    queue.claim("g0", HELD, [], [], 0.0, 7)


@pytest.mark.parametrize("lose", [lose_by_failure, lose_the_generator, lose_on_the_way, never_heard])
def test_a_probe_whose_lease_is_lost_begins_anew(lose):
    queue = resynced(quarantined(make_queue()))
    (lease,) = queue.lease("g0", HELD, 1, 0.0, 7).leases
    lose(queue, lease)
    assert not queue.quarantine.samples("g0", lease.lease_id)
    assert len(queue.lease("g0", HELD, 9, PROBE_S).leases) == 4


def test_leases_that_expire_do_the_same():
    queue = resynced(quarantined(make_queue(lease_timeout_s=60.0)))
    first = queue.lease("g0", HELD, 9, 0.0).leases
    assert queue.lease("g0", HELD, 9, 59.0).leases == []
    assert {x.group_id for x in queue.lease("g0", HELD, 9, 60.0).leases} & {x.group_id for x in first} == set()


def test_a_hello_keeps_the_running_probe_and_ends_what_else_it_names():
    queue = make_queue()
    (old,) = queue.lease("g0", HELD, 1, 0.0).leases
    resynced(quarantined(queue))
    (lease,) = queue.lease("g0", HELD, 1, 0.0, 7).leases
    claim = queue.claim("g0", HELD, [lease.lease_id, "probe/77#1", old.lease_id], ["probe/78#1"], 0.0, 7)
    assert (sorted(claim.useless), claim.void, claim.wanted) == (
        sorted(["probe/77#1", old.lease_id]),
        ["probe/78#1"],
        [],
    )
    assert queue.quarantine.samples("g0", lease.lease_id)


def test_a_probe_without_a_verdict_is_made_anew():
    queue = resynced(quarantined(make_queue()))
    probed(queue, take_id=3)
    queue.quarantine.ride(3 + VERDICT_TAKES - 1)
    assert queue.quarantine.cases["g0"].phase == "judged"
    queue.quarantine.ride(3 + VERDICT_TAKES)
    assert queue.quarantine.cases["g0"].phase == "probe"
    probed(queue, take_id=9, now=PROBE_S)
    queue.quarantine.forget_takes()  # another learner
    assert queue.quarantine.cases["g0"].phase == "probe"


def test_a_new_process_of_a_generator_that_is_out_is_probed_at_once():
    queue = quarantined(make_queue())
    queue.quarantine.joined("g0", "b0")
    assert queue.quarantine.cases["g0"].phase == "resync"
    queue.quarantine.joined("g0", "b1")
    assert queue.quarantine.cases["g0"].phase == "probe"
    assert queue.lease("g0", HELD, 1, 0.0).leases


def test_who_is_gone_for_long_is_forgotten_with_the_resyncs_it_had():
    q = quarantined(make_queue()).quarantine
    q._past["g1"] = ("b0", 2)
    q.forget({"g0"}, 0.0)
    q.forget(set(), FORGET_S - 1)  # for the first time
    q.forget({"g0"}, FORGET_S)
    assert q.barred == {"g0"} and "g1" not in q._past
    q.forget(set(), 1000.0)
    q.forget(set(), 999.0 + FORGET_S)
    assert q.barred == {"g0"}
    q.unsaved = False
    q.forget(set(), 1000.0 + FORGET_S)
    assert not q.barred and not q.cases and q.unsaved


# --- live settings ----------------------------------------------------------------------------------


def rules(**sentinel):
    return rules_of(validate({"model": {"path": "m"}, "sentinel": sentinel}))


@pytest.mark.parametrize("off", [{"enabled": False}, {"action": "alarm"}])
def test_whoever_quarantines_nobody_lets_all_in_again(off):
    queue = quarantined(make_queue())
    saved = queue.save()
    queue.quarantine.follow(rules(**off))
    assert not queue.quarantine.barred and queue.unsaved
    assert not is_probe(queue.lease("g0", HELD, 1, 0.0).leases[0].group_id)
    assert queue.quarantine.judge("g0", False, "drift", "b0", 3, 1, 0, 0.0) == ""
    # Also a run that is gone on with.
    tree = {"model": {"path": "m"}, "algorithm": {"groups_per_update": 4, "group_size": 2}}
    for sentinel, left in (({}, {"g0"}), (off, set())):
        config = validate(tree | {"sentinel": sentinel})
        again = ReplayQueue(make_prompts(1000), limits_of(config), MODEL, Knobs(config))
        again.load(saved)
        assert again.quarantine.barred == left


def test_a_take_brings_the_rules_that_were_tuned():
    config = validate({"model": {"path": "m"}, "algorithm": {"groups_per_update": 4, "group_size": 2}})
    queue = ReplayQueue(make_prompts(1000), limits_of(config), MODEL, Knobs(config))
    queue.publish(HELD)
    fill(queue, 8)
    quarantined(queue, "g1")
    queue.knobs.change({"sentinel.max_resyncs": "7"}, "me", "", 0, 0.0)
    assert queue.take(0, 0) is not None
    assert queue.quarantine.rules.max_resyncs == 7 and queue.quarantine.barred == {"g1"}
    queue.knobs.change({"sentinel.enabled": "false"}, "me", "", 0, 0.0)
    assert queue.take(1, 1) is not None
    assert not queue.quarantine.barred


def test_other_rules_hold_for_those_that_are_out():
    queue = make_queue()
    queue.quarantine.rules = rules(action="quarantine", probe_groups=2)
    quarantined(queue)
    queue.quarantine.follow(rules(probe_groups=2))
    assert queue.quarantine.cases["g0"].phase == "resync"
    resynced(queue)
    assert len(queue.lease("g0", HELD, 9, 0.0).leases) == 2
    # A probe of another size begins anew: it could never be whole.
    queue.quarantine.follow(rules(probe_groups=1))
    assert len(queue.lease("g0", HELD, 9, PROBE_S).leases) == 1


# --- the disk ---------------------------------------------------------------------------------------


def test_a_quarantine_outlives_replay():
    queue = quarantined(make_queue(), reason="far off")
    resynced(queue)
    (lease,) = queue.lease("g0", HELD, 1, 0.0).leases
    assert queue.unsaved
    again = make_queue()
    again.load(queue.save())
    assert again.quarantine.state()["g0"] == {"phase": "resync", "reason": "far off", "resyncs": 1, "update": 0}
    assert again.lease("g0", HELD, 1, 0.0).idle == "quarantined"
    # What was out of the old probe is void, and no new lease has a name of then.
    assert deliver(again, answer(lease), PAYLOAD, "g0").status == "resolved"
    assert again.claim("g0", HELD, [lease.lease_id], [], 0.0).useless == [lease.lease_id]
    resynced(again)
    assert again.lease("g0", HELD, 1, 0.0).leases[0].group_id != lease.group_id


def test_what_it_kept_for_a_replay_that_was_started_again_is_void_but_for_takes():
    queue = make_queue()
    ids = fill(queue, 4)
    assert queue.take(0, 0) is not None
    (queued,) = fill(queue, 1)
    quarantined(queue)
    again = make_queue()
    again.load(queue.save())
    claim = again.claim("g0", HELD, [], [f"{i}#1" for i in [*ids, queued]], 0.0)
    assert claim.void == [f"{queued}#1"]
    assert claim.wanted == ids


# --- over the wire ----------------------------------------------------------------------------------


def test_from_verdict_to_verdict_over_the_wire(make_net):
    net = make_net(groups_per_update=2)
    net.queue.quarantine.rules = Rules(probe_groups=1)
    learner, bad, good = net.learner(), net.peer("g0"), net.peer("g1")
    other = net.peer("g2")
    publish(learner, 0)
    for peer in (bad, good, other):
        assert isinstance(peer.recv()[0], wire.NewVersion)
    assert len(bad.lease(1).leases) == 1
    verdict = wire.Verdict("g0", False, "drift", seq=7)
    assert learner.ask(verdict) == wire.Ack([], [], 7)
    assert learner.ask(verdict) == wire.Ack([], [], 7)  # sent twice
    net.now += 1.0
    messages = [bad.recv()[0], bad.recv()[0]]
    assert {type(m) for m in messages} == {wire.Cancel, wire.Resync}
    assert wire.Resync(0, 0, "/w/0.0") in messages
    bad.send(wire.Heartbeat((0, 0), {"resyncs": 1.0}))
    net.settle()
    net.now += 1.0
    net.server.step(0.01)
    leases = bad.lease(4)
    assert (len(leases.leases), leases.idle) == (1, "quarantined")
    assert bad.ask(bad.group(leases.leases[0])) == wire.Ack([], [leases.leases[0].group_id])
    for lease in good.lease(2).leases:
        good.ask(good.group(lease))
    reply, buffers = _taken(learner)
    assert sorted(reply.batch) == [-1, 0, 0]
    assert sum(reply.frames) == len(buffers)
    assert learner.ask(wire.Status()).state["quarantine"]["g0"]["phase"] == "judged"
    assert learner.ask(wire.Verdict("g0", True, "clean", seq=8)) == wire.Ack([], [], 8)
    assert learner.ask(wire.Status()).state["quarantine"] == {}


def _taken(learner):
    learner.send(wire.Take(0, 0, 0, 1))
    return learner.recv()


def test_other_ranks_get_no_probe(make_net):
    net = make_net(groups_per_update=2)
    queue = net.queue
    queue.publish(HELD)
    ranks = [net.learner(rank) for rank in range(2)]
    fill(queue, 2)
    probed(resynced(quarantined(queue, "g9"), "g9"), "g9", take_id=0)
    for rank, learner in enumerate(ranks):
        learner.send(wire.Take(0, 0, rank, 2))
        assert (-1 in learner.recv()[0].batch) == (rank == 0)


def test_only_rank_0_of_this_run_epoch_judges(make_net):
    net = make_net()
    first, second = net.learner(), net.learner(1)
    net.peer("g0")
    publish(first, 0)
    assert "rank 0 does" in second.ask(wire.Verdict("g0", False, "x")).reason
    assert "epoch" in first.ask(wire.Verdict("g0", False, "x", epoch=3)).reason
    assert net.queue.quarantine.cases == {}


def test_a_verdict_on_an_earlier_process_is_void(make_net):
    net = make_net()
    learner = net.learner()
    for name in ("g0", "g1", "g2"):
        net.peer(name)
    publish(learner, 0)
    assert isinstance(learner.ask(wire.Verdict("g0", False, "x", boot="of before")), wire.Ack)
    assert net.queue.quarantine.cases == {}
    assert isinstance(learner.ask(wire.Verdict("g0", False, "x", boot="b0")), wire.Ack)
    assert set(net.queue.quarantine.cases) == {"g0"}


def test_a_generator_that_never_comes_back_leaves_the_quarantine(make_net):
    net = make_net()
    learner = net.learner()
    for name in ("g0", "g1", "g2"):
        net.peer(name)
    publish(learner, 0)
    learner.ask(wire.Verdict("g0", False, "x"))
    for later in (1.0, 100.0, 1.0, FORGET_S):
        assert set(net.queue.quarantine.cases) == {"g0"}
        net.now += later
        net.server.step(0.01)
    assert net.queue.quarantine.cases == {}


# --- all of it at once ------------------------------------------------------------------------------


class Barring(Simulation):
    """Besides all that: generators go out, are probed in some way, and come in again."""

    def ask(self, name, want):
        if name not in self.queue.quarantine.barred:
            return super().ask(name, want)
        grant = self.queue.lease(name, self.held[name], want, self.now)
        assert all(is_probe(x.group_id) for x in grant.leases)
        self.running[name] += grant.leases
        return 0

    def send(self, name, lease):
        if is_probe(lease.group_id):
            group = answer(lease, *[[(0, 2)]] * self.queue.limits.fewest_responses, generator=name)
            assert deliver(self.queue, group, self.payload(group), name).status == "resolved"
        else:
            super().send(name, lease)

    def put(self, name, group):
        before = self.queue.ledger.entries.get(group.group_id)
        kept = before is not None and before.state in (State.KEPT, State.TAKEN)
        super().put(name, group)
        after = self.queue.ledger.entries.get(group.group_id)
        if name in self.queue.quarantine.barred and not kept and after is not None:
            assert after.state not in (State.KEPT, State.QUEUED) or after.sender != name

    def bar(self):
        q, name = self.queue.quarantine, self.random.choice(GENERATORS)
        if name not in q.barred:
            if q.judge(name, False, "drift", "b", len(GENERATORS) - len(q.barred), 2, self.u, self.now) == "out":
                self.queue.bar(name)
                held = {e.group_id for e in self.queue.ledger.entries.values() if e.sender == name and e.digest}
                assert all(self.queue.ledger.entries[i].state is State.TAKEN for i in held)
            return
        q.due(name, float(q.cases[name].asked_at is not None), False, self.now)
        q.ride(self.take_id)
        self.events[q.judge(name, self.random.random() < 0.6, "probe", "b", 2, 2, self.u, self.now)] += 1
        if self.random.random() < 0.1:
            q.joined(name, str(self.now))

    def check_no_dead_end(self):
        for name in list(self.queue.quarantine.barred):
            self.queue.quarantine._release(name)
        super().check_no_dead_end()


@pytest.mark.parametrize("case", [0, 3, 6])
def test_random_events_with_quarantines(case):
    s = Barring(seed=50 + case, **CASES[case])
    s.queue.quarantine.rules = Rules(probe_groups=2, max_resyncs=1000, backoff_s=1.0)
    events = [s.lease] * 20 + [s.finish] * 30 + [s.learn] * 14 + [s.load] * 6 + [s.bar] * 4
    events += [s.late, s.repeat, s.fail, s.crash, s.expire, s.resume] + [s.supply] * 2
    for i in range(4000):
        s.random.choice(events)()
        s.check()
        if i % 400 == 0:
            s.check_no_dead_end()
            s.check()
    s.check_fates()
    assert s.events["in"] > 3
    assert s.queue.tally.counters["quarantined"] >= 10
