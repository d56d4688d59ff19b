"""Selection in time, shuffling, balanced shards, and takes of several batches."""

from collections import Counter

import pytest

from asyncrl.replay.ledger import State
from asyncrl.replay.takes import Candidate, balance, cut, select
from asyncrl.types import Version
from tests.replay.support import answer, deliver, fill, make_queue, train

V0 = Version(0, 0)


def candidates(*last_updates):
    return [Candidate(f"c{i}", last) for i, last in enumerate(last_updates)]


def test_select_takes_the_oldest_that_fit():
    # G = 2, M = 2 from update 10. Three may only train update 10: the third is late, the rest fill update 11.
    chosen, late = select(candidates(10, 10, 10, 11, 15), 10, 2, 2)
    assert [c.group_id for c in chosen] == ["c0", "c1", "c3", "c4"] and late == ["c2"]


def test_select_leaves_surplus_in_the_queue():
    chosen, late = select(candidates(10, 10, 10), 10, 1, 2)
    assert [c.group_id for c in chosen] == ["c0", "c1"] and late == []
    chosen, late = select(candidates(12, 12, 12, 12, 12), 10, 2, 2)
    assert len(chosen) == 4 and late == []


def test_cut_is_a_seeded_shuffle_that_respects_the_last_update():
    free = candidates(*[20] * 8)
    a = cut(free, 10, 2, 4, (0, 0, 10))
    assert a == cut(free, 10, 2, 4, (0, 0, 10)) and a != cut(free, 10, 2, 4, (1, 0, 10))
    assert sorted(a[0] + a[1]) == sorted(c.group_id for c in free)
    for seed in range(50):
        tight = candidates(10, 11, 10, 12, 12, 11)
        batches = cut(tight, 10, 3, 2, (seed,))
        last = dict(tight)
        assert all(last[i] >= 10 + m for m, ids in enumerate(batches) for i in ids)
        assert set(batches[0]) == {"c0", "c2"} and set(batches[2]) == {"c3", "c4"}


def test_shuffle_spreads_every_group_over_every_batch():
    where = Counter()
    for seed in range(400):
        for m, ids in enumerate(cut(candidates(*[20] * 4), 10, 4, 1, (seed,))):
            where[ids[0], m] += 1
    # 400 shuffles of 4 groups over 4 batches: 100 expected in each place, standard deviation 8.7.
    assert len(where) == 16 and all(60 < n < 140 for n in where.values())


def test_balance_puts_the_largest_first_where_there_is_least():
    sizes = [("a", 60), ("b", 50), ("c", 40), ("d", 30), ("e", 10)]
    # a -> 0 (60); b -> 1 (50); c -> 1 (90); d -> 0 (90); e -> 0, equal loads and as many groups: the lower rank.
    assert balance(sizes, 2) == [["a", "d", "e"], ["b", "c"]]
    assert balance(list(reversed(sizes)), 2) == balance(sizes, 2)
    assert balance([("a", 5)], 3) == [["a"], [], []]
    assert balance([], 2) == [[], []]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shards_are_whole_groups_each_once(world):
    queue = make_queue(max_lag=3, updates_per_take=2)
    ids = fill(queue, 8)
    take = queue.take(0, 0)
    assert take is not None and take.bounds == (-3, -2) and [len(b) for b in take.batches] == [4, 4]
    shards = [[(m, e.group_id) for m, e in queue.shard(0, r, world)] for r in range(world)]
    assert sorted(i for s in shards for _, i in s) == sorted(ids)
    assert all(i in take.batches[m] for s in shards for m, i in s)
    assert shards == [[(m, e.group_id) for m, e in queue.shard(0, r, world)] for r in range(world)]
    # Committed groups are not handed out again; the rest stays where it was.
    queue.commit(0, 1, "trained", take.batches[0])
    again = [[(m, e.group_id) for m, e in queue.shard(0, r, world)] for r in range(world)]
    assert again == [[(m, i) for m, i in s if m == 1] for s in shards]


def test_shards_are_balanced_by_tokens():
    queue = make_queue(max_lag=3)
    for tokens in (40, 10, 20, 30):
        fill(queue, 1, [(0, tokens)], [(0, tokens)])
    queue.take(0, 0)
    # Two prompts of 3 tokens each: 86, 26, 46, 66 input and output tokens; 86 + 26 against 66 + 46.
    loads = [sum(e.digest.tokens for _, e in queue.shard(0, r, 2)) for r in range(2)]
    assert loads == [112, 112]


def test_rank_outside_the_world_is_refused():
    queue = make_queue()
    fill(queue, 4)
    queue.take(0, 0)
    for rank, world in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="of a world of"):
            queue.shard(0, rank, world)


def test_each_batch_of_a_take_keeps_the_promise():
    # N = 1, M = 2, max_lag 2, G = 4: four groups of version 0 and four of version 1 at update 2.
    queue = make_queue(max_lag=2, updates_per_take=2)
    old = queue.lease("g0", Version(0, 0), 4, 0.0).leases
    queue.publish(Version(0, 1))
    young = queue.lease("g0", Version(0, 1), 4, 0.0).leases
    for lease in [*young, *old]:
        deliver(queue, answer(lease), [b"group", b""], "g0")
    queue.publish(Version(0, 2))
    take = queue.take(0, 2)
    assert take is not None and take.bounds == (0, 1)
    assert set(take.batches[0]) == {x.group_id for x in old} and set(take.batches[1]) == {x.group_id for x in young}


def test_groups_that_cannot_all_be_used_in_time_are_evicted_and_replaced():
    # G = 1, M = 2: of two groups that may only train update 2 one is overtaken; the take fills with a young one.
    queue = make_queue(groups_per_update=1, max_lag=2, updates_per_take=2)
    a, b = fill(queue, 2)
    queue.publish(Version(0, 2))
    assert queue.take(0, 2) is None and queue.tally.counters["overtaken"] == 1
    assert queue.drain_resolved() == [("g0", b)]
    fill(queue, 1, held=2)
    take = queue.take(0, 2)
    assert take is not None and take.batches == ((a,), (b,))


@pytest.mark.parametrize(
    ("n", "m", "max_lag", "sizes"),
    [
        (1, 1, 0, [1] * 8),
        (4, 4, 3, [4, 4]),
        (16, 16, 15, [16]),
        (4, 3, 3, [3, 1, 3, 1]),  # M does not divide N: the fourth update can only use what is published by then
        (4, 3, 8, [3, 3, 3]),
        (4, 1, 8, [1] * 8),
    ],
)
def test_regimes(n, m, max_lag, sizes):
    queue = make_queue(groups_per_update=1, max_lag=max_lag, sync_every=n, updates_per_take=m)
    u = held = 0
    for take_id, size in enumerate(sizes):
        assert queue.take(take_id, u) is None
        # As much as the rule allows, never more than is needed plus what max_lag permits.
        fill(queue, len(queue.lease("g0", Version(0, held), 0, 0.0).leases) or size, held=held)
        assert len(train(queue, take_id, u)) == size
        for _ in range(size):
            u += 1
            if u % n == 0:
                queue.publish(Version(0, u))
                held = u
    assert queue.tally.counters == {}


def test_on_policy_regime_has_lag_zero():
    queue = make_queue(groups_per_update=2, max_lag=0)
    for u in range(5):
        fill(queue, 2, held=u)
        assert queue.lease("g0", Version(0, u), 1, 0.0).idle == "ahead_full"
        train(queue, u, u)
        assert queue.lease("g0", Version(0, u), 1, 0.0).idle in ("ahead_full", "version_too_old")
        queue.publish(Version(0, u + 1))
    assert queue.tally.trained.lag == 0 and queue.tally.trained.count == 20


def test_take_is_short_at_the_end_of_the_run_and_after_a_skip():
    queue = make_queue(groups_per_update=1, max_lag=3, sync_every=4, updates_per_take=4, total_updates=6)
    fill(queue, 4)
    take = queue.take(0, 0)
    assert take is not None
    queue.commit(0, 1, "trained", take.batches[0])
    queue.commit(0, 1, "skipped", take.batches[1])
    queue.commit(0, 2, "trained", take.batches[2])
    queue.commit(0, 3, "trained", take.batches[3])
    # Update 3 can still use version 0, update 4 cannot: a take of one batch, instead of a wait without end.
    fill(queue, 1)
    assert len(train(queue, 1, 3)) == 1
    queue.publish(Version(0, 4))
    fill(queue, 2, held=4)
    assert len(train(queue, 2, 4)) == 2


def test_take_waits_for_the_publication_that_is_due():
    # N = M = 4, max_lag 4: at update 4 version 0 could still train one batch, but version 4 is due: four batches.
    queue = make_queue(groups_per_update=1, max_lag=4, sync_every=4, updates_per_take=4)
    fill(queue, 5)
    train(queue, 0, 0)
    assert queue.take(1, 4) is None and queue.waiting.startswith("1 of 4 groups")
    queue.publish(Version(0, 4))
    fill(queue, 3, held=4)
    assert len(train(queue, 1, 4)) == 4


def test_a_commit_moves_the_clock_no_further_than_its_take():
    queue = make_queue(groups_per_update=1, max_lag=3, sync_every=4, updates_per_take=2)
    with pytest.raises(ValueError, match="commit of take 0, which was never made"):
        queue.commit(0, 1, "trained", [])
    fill(queue, 2)
    take = queue.take(0, 0)
    with pytest.raises(ValueError, match="commit of take 0 at update 3; after it the clock is at most 2"):
        queue.commit(0, 3, "trained", take.batches[0])
    assert queue.clock.update == 0 and queue.ledger.count(State.TAKEN) == 2
    assert queue.commit(0, 1, "trained", take.batches[0]) and queue.commit(0, 2, "trained", take.batches[1])
    # A replay that was started again forgets the take. Its learner may say once more what it was not answered.
    other = make_queue(groups_per_update=1, max_lag=3, sync_every=4, updates_per_take=2)
    other.load(queue.save())
    assert other.commit(0, 2, "trained", take.batches[1]) == [] and other.clock.update == 2
    for take_id, update in ((0, 3), (1, 3), (-1, 2)):
        with pytest.raises(ValueError, match="commit of take"):
            other.commit(take_id, update, "trained", [])
    assert other.clock.update == 2


def test_a_rank_that_waits_does_not_make_replay_walk_the_queue_on_every_poll():
    queue = make_queue(max_lag=8)
    walks = []
    of_state, by_age = queue.ledger.of_state, queue.ledger.by_age
    queue.ledger.of_state = lambda state: (walks.append(state), of_state(state))[1]
    queue.ledger.by_age = lambda *states: (walks.append(states), by_age(*states))[1]
    fill(queue, 3)
    assert queue.take(0, 0, 0.0) is None and walks
    walks.clear()
    assert all(queue.take(0, 0, now / 1000) is None for now in range(999)) and not walks
    # Now and then it does: what came meanwhile may be too old for this take.
    assert queue.take(0, 0, 1.0) is None and walks
    fill(queue, 1)
    assert queue.take(0, 0, 1.0) is not None


def test_a_take_that_is_ahead_of_the_clock_waits_for_nothing_that_is_too_old_for_it():
    queue = make_queue(groups_per_update=2, max_lag=1)
    fill(queue, 2)
    queue.take(0, 0)
    late = queue.lease("g0", V0, 1, 0.0).leases[0]
    assert queue.take(1, 2, 0.0) is None
    assert deliver(queue, answer(late), [b"group", b""], "g0").status == "admitted"
    assert queue.take(1, 2, 0.5) is None and queue.ledger.count(State.QUEUED) == 1
    assert queue.take(1, 2, 1.0) is None and queue.tally.counters["stale"] == 1
