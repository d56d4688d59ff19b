"""Leases, admission, takes and commits with numbers worked by hand (G = 4, group_size 2, max_lag 2)."""

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.replay.ledger import State
from asyncrl.types import Version
from tests.replay.support import answer, deliver, fill, make_queue, train

V0 = Version(0, 0)


def test_admission_counts_what_is_ahead():
    queue = make_queue()
    # u + a // 4 - v <= 2: a = 0..11 pass, a = 12 does not.
    assert len(queue.lease("g0", V0, 100, 0.0).leases) == 12
    assert queue.lease("g0", V0, 1, 0.0) == ([], "ahead_full")
    assert queue.tally.idle["ahead_full"] == 2


def test_old_version_is_told_so():
    queue = make_queue(max_lag=0)
    fill(queue, 4)
    train(queue, 0, 0)
    queue.publish(Version(0, 1))
    assert queue.lease("g0", V0, 1, 0.0).idle == "version_too_old"
    assert len(queue.lease("g0", Version(0, 1), 9, 0.0).leases) == 4


def test_no_lease_before_the_first_version_and_none_for_unknown_ones():
    queue = make_queue()
    assert queue.lease("g0", Version(0, 1), 1, 0.0).idle == "unknown_version"
    assert queue.lease("g0", Version(3, 0), 1, 0.0).idle == "unknown_version"
    queue.clock.newest = None
    assert queue.lease("g0", V0, 1, 0.0).idle == "no_version"


def test_discarded_group_gives_its_slot_back():
    # B36 (a): max_lag 0, one group discarded for good, a replacement at the same version, the step completes.
    queue = make_queue(max_lag=0, groups_per_update=8, max_attempts=1)
    leases = queue.lease("g0", V0, 100, 0.0).leases
    assert len(leases) == 8
    for lease in leases[1:]:
        deliver(queue, answer(lease), [b"group", b""], "g0")
    assert queue.take(0, 0) is None
    assert queue.fail("g0", leases[0].lease_id, "RouteError: lost rows")
    assert queue.tally.counters == {"failed_routeerror": 1, "max_attempts": 1}
    assert list(queue.tally.dropped) == [(leases[0].group_id, "max_attempts")]
    fill(queue, 1)
    assert len(train(queue, 0, 0)) == 8


def test_resumed_run_has_the_capacity_of_a_new_one():
    # B36 (b): version 40, batch 8, max_lag 1: 16, not 336.
    queue = make_queue(max_lag=1, groups_per_update=8)
    queue.publish(Version(1, 40))
    assert queue.clock.update == 40
    assert len(queue.lease("g0", Version(1, 40), 1000, 0.0).leases) == 16


def test_slow_group_does_not_hold_up_the_rest():
    # B36 (d): one lease runs for ten minutes; three updates are trained meanwhile.
    queue = make_queue(lease_timeout_s=3600.0, sync_every=1)
    slow = queue.lease("g1", V0, 1, 0.0).leases[0]
    for u in range(3):
        fill(queue, 4, held=u, now=200.0 * u)
        train(queue, u, u)
        queue.publish(Version(0, u + 1))
    # Sampled under 0, used at 3 at the earliest: too old by one.
    assert deliver(queue, answer(slow), [b"group", b""], "g1").status == "resolved"
    assert queue.tally.counters["stale"] == 1 and queue.ledger.count(State.PENDING) == 1


def test_lag_of_exactly_max_lag_is_used_and_one_more_is_not():
    queue = make_queue(max_lag=2, sync_every=2)
    ids = fill(queue, 12)
    assert train(queue, 0, 0) == ids[:4] and train(queue, 1, 1) == ids[4:8]
    assert queue.take(2, 2).bounds == (0,)
    assert train(queue, 2, 2) == ids[8:]
    queue = make_queue(max_lag=2, sync_every=3)
    ids = fill(queue, 4)
    queue.clock.advance(3)
    assert queue.take(0, 3) is None
    assert queue.tally.counters["stale"] == 4 and queue.ledger.count(State.QUEUED) == 0
    assert sorted(i for _, i in queue.drain_resolved()) == sorted(ids)


def test_oldest_version_first_then_age():
    queue = make_queue(max_lag=8, groups_per_update=2)
    queue.publish(Version(0, 1))
    a, b, c = (queue.lease("g0", Version(0, 1), 3, 0.0)).leases
    d = queue.lease("g1", V0, 1, 0.0).leases[0]
    for lease in (c, b, a, d):
        deliver(queue, answer(lease), [b"group", b""], lease.generator_id)
    assert train(queue, 0, 1) == [d.group_id, c.group_id]
    assert train(queue, 1, 2) == [b.group_id, a.group_id]


@pytest.mark.parametrize(("stale", "used"), [("mask", True), ("evict", False)])
def test_mask_keeps_a_group_with_one_young_token_and_evict_drops_it(stale, used):
    queue = make_queue(stale=stale, max_lag=2, groups_per_update=1)
    queue.clock.publish(Version(0, 1))
    queue.clock.update = 0
    lease = queue.lease("g0", V0, 1, 0.0).leases[0]
    assert deliver(queue, answer(lease, [(0, 3), (1, 1)], [(0, 4)]), [b"group", b""], "g0").status == "admitted"
    # At update 3 the bound is 1: tokens of version 0 are too old, the one token of version 1 is not.
    queue.clock.advance(3)
    take = queue.take(0, 3)
    assert (take is not None) is used
    if take is not None:
        assert take.bounds == (1,)
        queue.commit(0, 4, "trained", [lease.group_id])
        # The response without a young token is left out, and counted with its length, reward and lag.
        assert queue.tally.trained.as_dict() == {"count": 1, "length": 4, "reward": 1.0, "lag": 2}
        assert queue.tally.left_out.as_dict() == {"count": 1, "length": 4, "reward": 0.0, "lag": 3}
        assert queue.tally.counters["stale_response"] == 1
    else:
        assert queue.tally.counters["stale"] == 1
        assert queue.tally.left_out.as_dict() == {"count": 2, "length": 8, "reward": 1.0, "lag": 6}


def test_a_commit_is_counted_by_the_limits_of_its_take():
    queue = make_queue(stale="mask", max_lag=2, groups_per_update=1)
    (group_id,) = fill(queue, 1)
    queue.clock.advance(2)
    assert queue.take(0, 2).bounds == (0,)
    queue.limits.max_lag = 0
    queue.commit(0, 3, "trained", [group_id])
    assert queue.tally.counters["stale_response"] == 0
    assert queue.tally.trained.as_dict() == {"count": 2, "length": 8, "reward": 1.0, "lag": 4}


def test_mask_ignores_tokens_the_policy_did_not_sample():
    queue = make_queue(stale="mask", max_lag=0, groups_per_update=1)
    lease = queue.lease("g0", V0, 1, 0.0).leases[0]
    group = answer(lease)
    for t in group.trajectories:
        t.loss_mask[:] = False
    assert deliver(queue, group, [b"group", b""], "g0") == ("resolved", "no_tokens")
    assert queue.ledger.in_flight == 0


def test_what_a_commit_makes_too_old_leaves_at_once():
    queue = make_queue(max_lag=0)
    a = fill(queue, 4)
    assert queue.take(0, 0) is not None
    queue.commit(0, 0, "skipped", a[:1])
    (extra,) = fill(queue, 1)
    queue.drain_resolved()
    queue.commit(0, 1, "trained", a[1:])
    # The replacement of the skipped group was sampled under version 0 and cannot train update 1.
    assert ("g0", extra) in queue.drain_resolved() and queue.tally.counters["stale"] == 1
    assert queue.ledger.in_flight == 0


def test_on_evict_drop_gives_the_prompt_up():
    queue = make_queue(on_evict="drop", max_lag=0, groups_per_update=1)
    (group_id,) = fill(queue, 1)
    queue.clock.advance(1)
    assert queue.take(0, 1) is None
    assert list(queue.tally.dropped) == [(group_id, "stale")] and queue.ledger.is_resolved(group_id)


def test_evicted_prompt_is_leased_again_but_not_for_ever():
    queue = make_queue(max_lag=0, groups_per_update=1, max_attempts=3)
    seen = []
    for u in range(4):
        (lease,) = queue.lease("g0", Version(0, u), 1, 0.0).leases
        seen.append((lease.group_id, lease.attempt))
        deliver(queue, answer(lease), [b"group", b""], "g0")
        queue.publish(Version(0, u + 1))
    assert [a for _, a in seen] == [1, 2, 3, 1] and len({i for i, _ in seen}) == 2
    assert queue.tally.counters["stale"] == 4 and queue.tally.counters["max_attempts"] == 1


def test_doomed_leases_are_cancelled_under_evict_only():
    for stale, cancelled in (("evict", 1), ("mask", 0)):
        queue = make_queue(stale=stale, max_lag=0, groups_per_update=1)
        lease = queue.lease("g0", V0, 1, 0.0).leases[0]
        queue.publish(Version(0, 1))
        assert queue.drain_cancelled() == [("g0", lease.lease_id)] * cancelled
        assert queue.tally.counters["doomed_lease"] == cancelled
        assert queue.ledger.in_flight == 1 - cancelled


def test_expired_lease_is_given_out_again_and_a_late_result_counts_once():
    queue = make_queue(lease_timeout_s=10.0)
    (first,) = queue.lease("g0", V0, 1, 0.0).leases
    queue.expire(9.9)
    assert queue.ledger.in_flight == 1
    queue.expire(10.0)
    assert queue.ledger.in_flight == 0 and queue.tally.counters["lease_expired"] == 1
    (second,) = queue.lease("g1", V0, 1, 10.0).leases
    assert (second.group_id, second.attempt) == (first.group_id, 2)
    # The first one comes late but first: it wins, and the other generator may stop.
    assert deliver(queue, answer(first), [b"group", b"1"], "g0").status == "admitted"
    assert queue.drain_cancelled() == [("g1", second.lease_id)]
    assert deliver(queue, answer(second), [b"group", b"2"], "g1").status == "resolved"
    assert deliver(queue, answer(first), [b"group", b"1"], "g0").status == "known"
    assert queue.ledger.in_flight == 1 and queue.tally.counters["late_result"] == 1
    assert queue.tally.counters["duplicate"] == 2


def test_resend_of_an_evicted_group_does_not_come_back():
    queue = make_queue(max_lag=0, groups_per_update=1)
    (lease,) = queue.lease("g0", V0, 1, 0.0).leases
    group = answer(lease)
    deliver(queue, group, [b"group", b""], "g0")
    # A take for update 1 while the clock is still at 0 evicts it; the resend would still be young for 0.
    assert queue.take(0, 1) is None and queue.clock.update == 0
    assert deliver(queue, group, [b"group", b""], "g0").status == "resolved"
    assert queue.ledger.count(State.PENDING) == 1


def test_dead_generator_loses_its_leases_only():
    queue = make_queue(max_attempts=2)
    queue.lease("g0", V0, 2, 0.0)
    queue.lease("g1", V0, 3, 0.0)
    queue.generator_lost("g1")
    assert (queue.ledger.count(State.LEASED), queue.ledger.count(State.PENDING)) == (2, 3)
    again = queue.lease("g0", V0, 3, 0.0).leases
    assert {x.attempt for x in again} == {2}
    queue.generator_lost("g0")
    assert queue.tally.counters["max_attempts"] == 3 and queue.ledger.count(State.PENDING) == 2


def test_failed_lease_of_another_generator_is_ignored():
    queue = make_queue()
    (lease,) = queue.lease("g0", V0, 1, 0.0).leases
    assert not queue.fail("g1", lease.lease_id, "x") and not queue.fail("g0", "0/p1#9", "x")
    assert queue.ledger.in_flight == 1


def test_undelivered_leases_cost_no_attempt():
    queue = make_queue(max_attempts=1)
    grant = queue.lease("g0", V0, 3, 0.0)
    queue.withdraw(grant.leases)
    assert queue.ledger.in_flight == 0
    again = queue.lease("g0", V0, 3, 0.0)
    assert [(x.group_id, x.attempt) for x in again.leases] == [(x.group_id, 1) for x in grant.leases]


def test_zero_variance_refill_leases_another_prompt():
    # B27: [0.1 + 0.2, 0.3] is equal within the tolerance; [0, 0.95] is not.
    queue = make_queue(zero_variance="refill")
    a, b, c = queue.lease("g0", V0, 3, 0.0).leases
    assert deliver(queue, answer(a, rewards=(0.1 + 0.2, 0.3)), [b"group", b""], "g0") == ("resolved", "zero_variance")
    assert deliver(queue, answer(b, rewards=(1.0, 1.0 + 1e-7)), [b"group", b""], "g0").reason == "zero_variance"
    assert deliver(queue, answer(c, rewards=(0.0, 0.95)), [b"group", b""], "g0").status == "admitted"
    assert queue.ledger.in_flight == 1 and queue.tally.counters["zero_variance"] == 2
    queue = make_queue(zero_variance="keep")
    (a,) = queue.lease("g0", V0, 1, 0.0).leases
    assert deliver(queue, answer(a, rewards=(1.0, 1.0)), [b"group", b""], "g0").status == "admitted"


def test_versions_newer_than_published_are_refused():
    # B30: learner at 9, a sample stamped 12.
    queue = make_queue(max_lag=20)
    queue.publish(Version(0, 9))
    (lease,) = queue.lease("g0", Version(0, 9), 1, 0.0).leases
    put = deliver(queue, answer(lease, [(9, 2), (12, 2)], [(9, 4)]), [b"group", b""], "g0")
    assert put.status == "refused" and "0.12" in put.reason and "0.9" in put.reason
    assert queue.tally.counters["future_version"] == 1
    assert queue.ledger.count(State.PENDING) == 1


def test_ten_tokens_over_an_update_have_two_versions():
    # B30: 7 x 4 + 8 x 6 tokens; the lag at update 9 is 2.
    queue = make_queue(max_lag=8, groups_per_update=1)
    queue.publish(Version(0, 7))
    (lease,) = queue.lease("g0", Version(0, 7), 1, 0.0).leases
    queue.publish(Version(0, 8))
    deliver(queue, answer(lease, [(7, 4), (8, 6)], [(8, 10)]), [b"group", b""], "g0")
    queue.clock.advance(9)
    take = queue.take(0, 9)
    assert take is not None
    queue.commit(0, 10, "trained", take.batches[0])
    assert queue.tally.trained.as_dict() == {"count": 2, "length": 20, "reward": 1.0, "lag": 2 + 1}


def test_resume_evicts_what_its_fork_threw_away():
    # B31: generators at 57, the learner resumes from 50 as epoch 1.
    queue = make_queue(max_lag=8, groups_per_update=1)
    for u in (48, 50, 57):
        queue.publish(Version(0, u))
    old, kept = (queue.lease("g0", Version(0, v), 1, 0.0).leases[0] for v in (57, 50))
    lost, running = queue.lease("g0", Version(0, 57), 2, 0.0).leases
    deliver(queue, answer(kept), [b"group", b""], "g0")
    deliver(queue, answer(lost), [b"group", b""], "g0")
    assert queue.take(7, 57) is not None
    assert queue.publish(Version(1, 50)) and not queue.publish(Version(0, 58))
    assert queue.clock.update == 50 and queue.clock.epoch == 1
    assert queue.tally.counters["lost_version"] == 3
    assert {i for _, i in queue.drain_cancelled()} == {old.lease_id, running.lease_id}
    assert deliver(queue, answer(old), [b"group", b""], "g0").status == "resolved"
    assert queue.lease("g0", Version(0, 57), 1, 0.0).idle == "version_too_old"
    # Take 7 was dissolved; what was sampled under 50 is an ancestor and trains at once.
    assert train(queue, 0, 50) == [kept.group_id]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda g: {"trajectories": g.trajectories[:1]}, "group_size"),
        (lambda g: {"trajectories": (g.trajectories[0],) * 2}, "duplicate_trajectory"),
        (lambda g: {"prompt": replace(g.prompt, prompt_id="p9")}, "wrong_prompt"),
        (lambda g: {"prompt": replace(g.prompt, token_ids=g.prompt.token_ids + 1)}, "wrong_prompt"),
        (lambda g: {"attempt": 2}, "unknown_attempt"),
        (lambda g: {"generator_id": "g1"}, "wrong_sender"),
        (lambda g: {"group_id": "0/nobody"}, "unknown_group"),
        (lambda g: {"group_id": "x"}, "unknown_group"),
    ],
)
def test_impossible_groups_are_refused_and_counted(change, reason):
    queue = make_queue()
    (lease,) = queue.lease("g0", V0, 1, 0.0).leases
    group = answer(lease)
    put = deliver(queue, replace(group, **change(group)), [b"group", b""], "g0")
    assert put.status == "refused" and put.reason.startswith(reason) and queue.tally.counters[reason] == 1
    assert queue.ledger.count(State.QUEUED) == 0


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("logprobs", np.array([-1, -np.inf, -1, -1], np.float32), "bad_logprob"),
        ("logprobs", np.array([-1, 0.3, -1, -1], np.float32), "bad_logprob"),
        ("logprobs", np.array([np.nan, 2e-6, np.nan, -1], np.float32), "bad_logprob"),
        ("token_ids", np.array([0, 1, 2, 32], np.int32), "bad_token"),
        ("token_ids", np.array([0, -1, 2, 3], np.int32), "bad_token"),
        ("route_counts", np.zeros((1, 3, 8), np.uint16), "bad_routes"),
        ("route_counts", np.zeros((1, 2, 9), np.uint16), "bad_routes"),
        ("routes", np.zeros((6, 2, 3), np.uint8), "bad_routes"),
        ("routes", np.zeros((6, 2, 2), np.uint16), "bad_routes"),
        ("routes", np.full((6, 2, 2), 8, np.uint8), "bad_routes"),
    ],
)
def test_impossible_responses_are_refused_and_leased_again(field, value, reason):
    # A prompt of 3 and 4 response tokens have 6 route rows; the wire refuses any other number (tests/test_wire.py).
    queue = make_queue()
    (lease,) = queue.lease("g0", V0, 1, 0.0).leases
    group = answer(lease)
    bad = replace(group.trajectories[0], **{field: value})
    put = deliver(queue, replace(group, trajectories=(bad, group.trajectories[1])), [b"group", b""], "g0")
    assert put.status == "refused" and bad.trajectory_id in put.reason and queue.tally.counters[reason] == 1
    assert queue.lease("g0", V0, 1, 0.0).leases[0].attempt == 2


def test_missing_logprobs_and_six_route_rows_are_fine():
    queue = make_queue()
    (lease,) = queue.lease("g0", V0, 1, 0.0).leases
    group = answer(lease)
    logprobs = np.array([-1, np.nan, 1e-6, 0.0], np.float32)
    good = replace(group.trajectories[0], logprobs=logprobs, routes=np.zeros((6, 2, 2), np.uint8))
    put = deliver(queue, replace(group, trajectories=(good, group.trajectories[1])), [b"group", b""], "g0")
    assert put.status == "admitted"


def test_capacity_stops_leases_but_never_a_take():
    # Groups of 109 bytes; 5 fit, and that much is reserved for every lease.
    queue = make_queue(capacity_bytes=5 * 109, group_bytes=109, max_lag=8)
    fill(queue, 2)
    assert queue.ledger.num_bytes == 2 * 109
    assert len(queue.lease("g0", V0, 100, 0.0).leases) == 3
    assert queue.lease("g0", V0, 1, 0.0).idle == "capacity"
    # An estimate above a take's share of the capacity cannot stop a take: no such group would be let in.
    queue = make_queue(capacity_bytes=4 * 109, group_bytes=1000)
    fill(queue, 4)
    assert queue.lease("g0", V0, 1, 0.0).idle == "capacity"
    train(queue, 0, 0)
    assert queue.ledger.num_bytes == 0 and queue.tally.peak_bytes == 4 * 109


def test_the_end_of_the_run_needs_no_more_than_one_batch_to_spare():
    queue = make_queue(total_updates=2, max_lag=8)
    assert len(queue.lease("g0", V0, 100, 0.0).leases) == 12
    assert queue.lease("g0", V0, 1, 0.0).idle == "end_of_run"


def test_prompts_repeat_only_after_all_were_used():
    queue = make_queue(num_prompts=6, max_lag=100)
    ids = [x.group_id for x in queue.lease("g0", V0, 12, 0.0).leases]
    assert sorted(ids[:6]) == [f"0/p{i}" for i in range(6)] and sorted(ids[6:]) == [f"1/p{i}" for i in range(6)]
    assert [i[2:] for i in ids[:6]] != [i[2:] for i in ids[6:]]
    other = make_queue(num_prompts=6, max_lag=100, seed=1)
    assert [x.group_id for x in other.lease("g0", V0, 12, 0.0).leases] != ids


def test_a_skipped_batch_is_committed_and_the_clock_stays():
    queue = make_queue()
    ids = fill(queue, 8)
    take = queue.take(0, 0)
    assert take is not None
    done = queue.commit(0, 0, "skipped", take.batches[0])
    assert [c.group_id for c in done] == ids[:4] and {c.outcome for c in done} == {"skipped"}
    assert queue.clock.update == 0 and queue.tally.counters["skipped"] == 4 and queue.tally.left_out.count == 0
    assert train(queue, 1, 0) == ids[4:] and queue.clock.update == 1


def test_commit_resolves_once():
    queue = make_queue()
    ids = fill(queue, 4)
    queue.take(0, 0)
    done = queue.commit(0, 1, "trained", ids)
    assert [(c.update, c.epoch, c.generator_id) for c in done] == [(0, 0, "g0")] * 4
    assert queue.commit(0, 1, "trained", ids) == [] and queue.tally.counters["commit_unknown"] == 4
    assert queue.drain_resolved() == [("g0", i) for i in ids] and queue.drain_resolved() == []
    assert queue.clock.update == 1 and queue.tally.trained.count == 8
    # Groups of another take are left alone.
    ids = fill(queue, 4)
    queue.take(1, 1)
    assert queue.commit(0, 1, "trained", ids) == [] and queue.ledger.count(State.TAKEN) == 4
    with pytest.raises(ValueError, match="neither trained nor skipped"):
        queue.commit(0, 1, "maybe", ids)


def test_take_is_idempotent_and_consistent():
    queue = make_queue()
    fill(queue, 8)
    first = queue.take(5, 0)
    assert queue.take(5, 0) is first
    with pytest.raises(ValueError, match="made for update 0, not 1"):
        queue.take(5, 1)
    queue.clock.advance(3)
    with pytest.raises(ValueError, match="clock is at 3"):
        queue.take(6, 2)


def test_pop_four_pop_four_leaves_two():
    # B39: nothing vanishes between two takes.
    queue = make_queue()
    ids = fill(queue, 10)
    assert train(queue, 0, 0) + train(queue, 1, 1) == ids[:8]
    assert queue.ledger.count(State.QUEUED) == 2
    assert queue.take(2, 2) is None and queue.waiting == "2 of 4 groups for update 2, 0 leased"


def test_close_resolves_everything():
    queue = make_queue()
    ids = fill(queue, 5)
    running = queue.lease("g1", V0, 2, 0.0).leases
    queue.take(0, 0)
    queue.close()
    assert queue.ledger.in_flight == 0 and queue.ledger.num_bytes == 0
    assert sorted(i for _, i in queue.drain_resolved()) == sorted(ids)
    assert queue.drain_cancelled() == [("g1", x.lease_id) for x in running]
    assert queue.lease("g1", V0, 1, 0.0) == ([], "done")
    assert deliver(queue, answer(running[0]), [b"group", b""], "g1").status == "resolved"
