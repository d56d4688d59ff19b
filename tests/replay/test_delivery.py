"""Messages that get lost between replay and a generator: a Hello heals what they leave behind."""

from __future__ import annotations

from random import Random

import pytest

from asyncrl import wire
from asyncrl.generator.outbox import Outbox
from asyncrl.replay.claims import Claim
from asyncrl.replay.ledger import State
from asyncrl.replay.notices import Notices
from asyncrl.types import Version
from tests.replay.net import publish
from tests.replay.support import answer, deliver, fill, make_queue, train

V0 = Version(0, 0)


class Sender:
    """A generator's outbox against a queue: what it sends is put, what replay answers reaches it if it is `heard`."""

    def __init__(self, queue, name="g0"):
        self.queue, self.name, self.box, self.notices, self.running = queue, name, Outbox(), Notices(), []

    def tell(self, heard=True):
        self.notices.resolved(pair for pair in self.queue.drain_resolved() if pair[0] == self.name)
        for _, ack, _ in self.notices.drain():
            if heard:
                self.box.admitted(ack.admitted)
                self.box.resolved(ack.resolved)
                self.box.void(ack.void)
        cancelled = {i for n, i in self.queue.drain_cancelled() if n == self.name}
        if heard:
            self.running = [x for x in self.running if x.lease_id not in cancelled]

    def lease(self, want=1, held=V0):
        for lease in self.queue.lease(self.name, held, want, 0.0).leases:
            self.box.wanted([lease.group_id])
            if lease.lease_id not in self.box:
                self.running.append(lease)

    def finish(self, heard=True):
        for lease in self.running:
            self.box.add(
                lease.group_id, lease.lease_id, [answer(lease, generator=self.name, epoch=lease.version.epoch)], 0.0
            )
        self.running = []
        self.resend(1000.0, heard)

    def resend(self, now, heard=True):
        for (group,) in self.box.due(now):
            put = deliver(self.queue, group, [b"group", b"x" * 100], self.name)
            if heard:
                head = wire.read_group(wire.encode_group(group))
                self.notices.result(self.name, head, put.status, group.group_id in self.queue.ledger.entries)
        self.tell()

    def hello(self):
        claim = self.queue.claim(self.name, V0, [x.lease_id for x in self.running], self.box.lease_ids, 0.0)
        self.running = [x for x in self.running if x.lease_id not in claim.useless]
        self.box.void(claim.void)
        self.box.wanted(claim.wanted)
        return claim


def states(queue):
    return [(e.state, e.attempt, bool(e.payload)) for e in queue.ledger.entries.values()]


@pytest.mark.parametrize("says_hello", [True, False])
def test_an_eviction_of_which_the_word_was_lost_poisons_no_prompt(says_hello):
    queue = make_queue(max_attempts=2, groups_per_update=1)
    sender = Sender(queue)
    sender.lease()
    sender.finish()
    assert sender.box.unconfirmed == [] and len(sender.box) == 1
    (entry,) = queue.ledger.of_state(State.QUEUED)
    queue._exits.evict(entry, "overtaken")
    sender.tell(heard=False)
    if says_hello:
        assert sender.hello() == Claim([], [f"{entry.group_id}#1"], []) and len(sender.box) == 0
    sender.lease()
    assert [x.attempt for x in sender.running] == [2]
    sender.finish()
    assert states(queue) == [(State.QUEUED, 2, True)] and sender.box.lease_ids == [f"{entry.group_id}#2"]
    assert train(queue, 0, 0) == [entry.group_id]
    sender.tell()
    assert len(sender.box) == 0 and not queue.tally.dropped


def test_a_commit_of_which_the_word_was_lost_and_that_is_rolled_back_is_made_good_by_the_kept_result():
    queue = make_queue(max_lag=2, groups_per_update=1)
    sender = Sender(queue)
    sender.lease()
    sender.finish()
    take = queue.take(0, 0)
    done = queue.commit(0, 1, "trained", take.batches[0])
    sender.tell(heard=False)
    assert len(sender.box) == 1 and not queue.ledger.entries
    assert queue.publish(Version(1, 0), done)
    # It is leased from its first attempt on, under the name of the result that is kept: nothing is sampled twice.
    sender.lease(held=Version(1, 0))
    assert sender.running == []
    sender.resend(1000.0)
    assert states(queue) == [(State.QUEUED, 1, True)] and sender.box.unconfirmed == [] and len(sender.box) == 1


def test_of_two_results_of_one_generator_the_first_wins_and_the_other_is_forgotten():
    queue = make_queue(groups_per_update=1)
    sender = Sender(queue)
    sender.lease()
    (first,) = sender.running
    sender.box.add(first.group_id, first.lease_id, [answer(first)], 0.0)
    sender.running = []
    queue.expire(1000.0)
    queue.lease("nobody", V0, 0, 0.0)
    (second,) = queue.lease("g0", V0, 1, 0.0).leases
    assert (second.group_id, second.attempt) == (first.group_id, 2)
    # Both are finished before a word about either is heard.
    sender.box.wanted([second.group_id])
    sender.box.add(second.group_id, second.lease_id, [answer(second)], 0.0)
    sender.resend(1000.0)
    (entry,) = queue.ledger.of_state(State.QUEUED)
    assert entry.digest.attempt == 1 and sender.box.lease_ids == [first.lease_id]
    assert queue.claim("g0", V0, [], [first.lease_id, second.lease_id], 0.0) == Claim([], [second.lease_id], [])


def test_what_a_hello_is_told_in_every_state_of_a_group():
    queue = make_queue(groups_per_update=1, max_lag=20)

    def claim(sampling, kept, name="g0"):
        return queue.claim(name, V0, sampling, kept, 0.0)

    # Unknown or resolved; words that are no lease.
    for odd in ("0/p999#1", "0/other", "#", "0/p1#x"):
        assert claim([odd], []) == Claim([odd], [], []) and claim([], [odd]) == Claim([], [odd], [])
    # Leased: sampled or, if it is kept, lost on the way here.
    (lease,) = queue.lease("g0", V0, 1, 0.0).leases
    assert claim([lease.lease_id], []) == Claim([], [], [])
    assert claim([], [lease.lease_id]) == Claim([], [], [lease.group_id])
    # An attempt that was never made.
    assert claim([], [f"{lease.group_id}#2"]) == Claim([], [f"{lease.group_id}#2"], [])
    # Leased to another one: both results are welcome, once.
    queue.expire(1000.0)
    (other,) = queue.lease("g1", V0, 1, 0.0).leases
    assert other.group_id == lease.group_id
    assert claim([lease.lease_id], []) == Claim([], [], [])
    assert claim([], [lease.lease_id]) == Claim([], [], [lease.group_id])
    # Queued: only the result that is here is of use.
    assert deliver(queue, answer(lease), [b"group", b"x"], "g0").status == "admitted"
    queue.drain_cancelled()
    assert claim([], [lease.lease_id]) == Claim([], [], [])
    assert claim([other.lease_id], [], "g1") == Claim([other.lease_id], [], [])
    assert claim([], [other.lease_id], "g1") == Claim([], [other.lease_id], [])
    # Evicted, and pending or leased again: no earlier attempt is.
    queue._exits.evict(queue.ledger.entries[lease.group_id], "overtaken")
    for _ in range(2):
        assert claim([], [lease.lease_id]) == Claim([], [lease.lease_id], [])
        assert claim([lease.lease_id], []) == Claim([lease.lease_id], [], [])
        queue.lease("g1", V0, 1, 0.0)


def test_an_admitted_result_whose_payload_was_given_up_is_asked_for():
    queue = make_queue(groups_per_update=1)
    sender = Sender(queue)
    sender.lease()
    sender.finish()
    (entry,) = queue.ledger.of_state(State.QUEUED)
    queue.ledger.keep(entry)
    queue.generator_lost("g0")
    assert entry.state is State.PENDING and sender.box.unconfirmed == []
    assert sender.hello() == Claim([], [], [entry.group_id])
    sender.resend(1000.0)
    assert states(queue) == [(State.QUEUED, 1, True)]


def test_leases_that_got_lost_are_taken_back_without_costing_an_attempt():
    queue = make_queue(groups_per_update=1, max_lag=20, max_attempts=1)
    lost = queue.lease("g0", V0, 2, 0.0, 1).leases
    here = queue.lease("g0", V0, 2, 0.0, 2).leases
    under_way = queue.lease("g0", V0, 1, 0.0, 3).leases
    others = queue.lease("g1", V0, 1, 0.0, 1).leases
    names = [x.lease_id for x in here]
    assert queue.claim("g0", V0, names[:1], names[1:], 0.0, heard=2).void == []
    out = {e.group_id for e in queue.ledger.of_state(State.LEASED)}
    assert out == {x.group_id for x in [*here, *under_way, *others]} and queue.tally.counters["lost_lease"] == 2
    again = queue.lease("g1", V0, 2, 0.0, 2).leases
    assert [x.lease_id for x in again] == [x.lease_id for x in lost] and not queue.tally.dropped


def test_a_hello_that_crosses_leases_on_the_way_takes_none_of_them_back(make_net):
    net = make_net()
    learner, g = net.learner(), net.peer("g0")
    publish(learner, 0)
    g.recv()
    first = g.lease(1)
    boot = net.server._boot
    second = g.lease(2)
    assert (first.seq, second.seq) == (1, 2)
    running = [x.lease_id for x in first.leases]
    # It was said before the second Leases arrived.
    g.hello(leases=running, replay=boot, heard=1)
    assert net.queue.ledger.count(State.LEASED) == 3
    # So was one that knew another process of replay.
    g.hello(leases=running, replay="another", heard=9)
    assert net.queue.ledger.count(State.LEASED) == 3
    g.hello(leases=running, replay=boot, heard=2)
    assert net.queue.ledger.count(State.LEASED) == 1 and net.counters["lost_lease"] == 2
    # An answer that could not be sent has no number.
    assert g.lease(2).seq == 3


def test_a_hello_is_answered_with_what_became_of_the_results_that_are_kept(make_net):
    net = make_net()
    learner, g = net.learner(), net.peer("g0")
    publish(learner, 0)
    g.recv()
    leases = g.lease(3).leases
    for lease in leases[:2]:
        g.ask(g.group(lease))
    queue = net.queue
    queue._exits.evict(queue.ledger.entries[leases[0].group_id], "overtaken")
    queue.drain_resolved()
    kept = [x.lease_id for x in leases]
    assert g.hello(kept=kept) == wire.Ack([], [], 0, [leases[0].lease_id])
    assert g.recv()[0] == wire.Send([leases[2].group_id])
    assert isinstance(g.recv()[0], wire.Welcome) and g.quiet()
    # A void result that comes all the same takes no other result of its group with it.
    assert g.ask(g.group(leases[0])) == wire.Ack([], [], 0, [leases[0].lease_id])


def test_a_generator_hears_of_an_eviction_before_the_prompt_is_leased_anew(make_net):
    net = make_net(groups_per_update=1)
    learner, g = net.learner(), net.peer("g0")
    publish(learner, 0)
    g.recv()
    (lease,) = g.lease(1).leases
    g.ask(g.group(lease))
    net.queue._exits.evict(net.queue.ledger.entries[lease.group_id], "overtaken")
    g.send(wire.LeaseRequest((0, 0), 1))
    first, second = g.recv()[0], g.recv()[0]
    assert first == wire.Ack([], [lease.group_id]) and second.leases[0].group_id == lease.group_id


def test_only_what_is_said_once_stays_owed_to_a_generator_that_is_away():
    notices = Notices()
    queue = make_queue()
    (name,) = fill(queue, 1)[:1]
    (lease,) = queue.lease("g0", V0, 1, 0.0).leases
    head = wire.read_group(wire.encode_group(answer(lease)))
    notices.resolved([("g0", name)])
    notices.result("g0", head, "resolved", True)
    ((who, ack, owed),) = notices.drain()
    assert (who, ack) == ("g0", wire.Ack([], [name], 0, [lease.lease_id])) and notices.drain() == []
    notices.untold(who, owed)
    assert notices.drain() == [("g0", wire.Ack([], [name]), [name])]


@pytest.mark.parametrize("seed", range(4))
def test_after_any_losses_a_hello_makes_generators_keep_what_replay_has_and_nothing_else(seed):
    random = Random(seed)
    queue = make_queue(groups_per_update=2, max_lag=8, max_attempts=10**6, stale="evict")
    senders = [Sender(queue, f"g{i}") for i in range(2)]
    update, take_id, epoch, done, lost, kept_most = 0, 0, 0, [], 0, 0
    for step in range(1500):
        sender, heard = random.choice(senders), random.random() < 0.6
        lost += not heard
        match random.randrange(8):
            case 0 | 1:
                sender.lease(random.randint(1, 2), held=queue.clock.newest)
                if not heard:
                    sender.running = sender.running[:1]
            case 2 | 3:
                sender.finish(heard)
            case 4:
                queue.expire(1e6 * random.random() * 2e-4)
            case 5 if queued := queue.ledger.of_state(State.QUEUED):
                queue._exits.evict(random.choice(queued), "overtaken")
            case 6 if take := queue.take(take_id, update):
                done += queue.commit(take_id, update + 1, "trained", take.batches[0], batch=update)
                update, take_id = update + 1, take_id + 1
                queue.publish(Version(epoch, update))
            case 7 if random.random() < 0.1 and update > 2:
                epoch, update, take_id = epoch + 1, update - 2, 0
                undone = [c for c in done if c.update >= update]
                done = [c for c in done if c.update < update]
                assert queue.publish(Version(epoch, update), undone)
        for each in senders:
            each.tell(heard)
        if step % 10 == 9:
            for each in senders * 2:
                each.hello()
                each.resend(1e9 + 1e5 * step)
            for each in senders:
                each.hello()
                mine = [e for e in queue.ledger.entries.values() if e.digest is not None and e.sender == each.name]
                assert sorted(each.box.lease_ids) == sorted(f"{e.group_id}#{e.digest.attempt}" for e in mine)
                assert all(e.payload for e in mine) and each.box.unconfirmed == []
                kept_most = max(kept_most, len(mine))
    counters = queue.tally.counters
    assert lost > 400 and kept_most > 3 and epoch > 3 and not queue.tally.dropped
    assert all(counters[name] > 5 for name in ("late_result", "duplicate", "rolled_back", "overtaken")), counters
