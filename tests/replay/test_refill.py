"""Dynamic sampling (zero_variance=refill): groups of equal rewards leave, others come, and nothing waits in silence."""

from __future__ import annotations

import logging

from asyncrl.types import Version
from tests.replay.support import answer, deliver, make_queue, train

FLAT = (1.0, 1.0)
UNEVEN = (1.0, 0.0)


def sample(queue, count: int, rewards, held: int = 0) -> list[str]:
    leases = queue.lease("g0", Version(0, held), count, 0.0).leases
    for lease in leases:
        deliver(queue, answer(lease, rewards=rewards), [b"group", b"x"], "g0")
    return [x.group_id for x in leases]


def test_a_take_is_filled_from_other_prompts_within_the_lag_rule():
    # 4 groups per update, max_lag 2: never more than 12 groups are out, however many were dropped.
    queue = make_queue(zero_variance="refill")
    dropped = []
    for _ in range(20):
        leases = queue.lease("g0", Version(0, 0), 50, 0.0).leases
        assert len(leases) == 12 and queue.ledger.in_flight == 12
        for lease in leases:
            put = deliver(queue, answer(lease, rewards=FLAT), [b"group", b"x"], "g0")
            assert put == ("resolved", "zero_variance")
        dropped += [x.group_id for x in leases]
        assert queue.ledger.in_flight == 0 and queue.take(0, 0) is None
    good = sample(queue, 4, UNEVEN)
    assert train(queue, 0, 0) == good and not set(good) & set(dropped)
    assert len(set(dropped)) == 240 == queue.tally.counters["zero_variance"]
    # Each lease had the version that was newest then: what fills the take is as young as anything else.
    assert all(queue.ledger.is_resolved(i) for i in dropped)


def test_prompts_that_are_all_too_easy_end_no_wait_in_silence(caplog):
    queue = make_queue(zero_variance="refill", num_prompts=50)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 200):
            sample(queue, 1, FLAT)
            assert queue.take(0, 0) is None
            assert f"{number} dropped for equal rewards (algorithm.zero_variance=refill)" in queue.waiting
    said = [
        r.getMessage() for r in caplog.records if "of equal rewards were dropped since the last take" in r.getMessage()
    ]
    # After 8 takes' worth, and at each doubling of that.
    assert [int(m.split()[0]) for m in said] == [32, 64, 128]
    # It went on to the next data epochs: a lease is there for whoever asks.
    assert queue.lease("g0", Version(0, 0), 1, 0.0).leases[0].group_id.startswith("3/")
    sample(queue, 3, UNEVEN)


def test_the_count_begins_anew_with_every_take():
    queue = make_queue(zero_variance="refill")
    sample(queue, 3, FLAT)
    sample(queue, 4, UNEVEN)
    train(queue, 0, 0)
    queue.publish(Version(0, 1))
    sample(queue, 1, UNEVEN, held=1)
    assert queue.take(1, 1) is None and "equal rewards" not in queue.waiting
