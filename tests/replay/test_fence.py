"""Over real sockets: what a replaced learner, a stray rank or an odd number may not do to the run."""

from __future__ import annotations

import pytest

from asyncrl import wire
from asyncrl.replay.ledger import State
from asyncrl.types import Group, Version
from tests.replay.net import Net, Peer, publish
from tests.replay.support import response


def deliver(generator: Peer, count: int, epoch: int = 0, update: int = 0) -> list[str]:
    """Groups that the generator samples from a version, waiting in the queue afterwards; their ids."""
    generator.send(wire.LeaseRequest((epoch, update), count))
    while not isinstance(reply := generator.recv()[0], wire.Leases):
        pass
    ids = []
    for lease in reply.leases:
        responses = tuple(response(f"{lease.lease_id}.{i}", [(update, 4)], float(i), epoch) for i in range(2))
        group = Group(lease.group_id, wire.prompt_from_msg(lease.prompt), "g0", lease.attempt, 1.0, responses)
        assert generator.ask(wire.encode_group(group)) == wire.Ack([lease.group_id], [])
        ids.append(lease.group_id)
    return ids


def start(make_net, groups: int = 4, **limits: object) -> tuple[Net, Peer, Peer]:
    """A net whose queue holds groups of version 0.0, its learner and its generator."""
    net = make_net(**limits)
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    assert len(deliver(generator, groups)) == groups
    return net, learner, generator


def successor(net: Net, update: int = 0) -> Peer:
    """A learner that goes on at `update` as run epoch 1."""
    learner = Peer(net, "learner-0", "learner", "learner-0-new")
    net.peers.append(learner)
    assert isinstance(learner.hello("b1"), wire.Welcome)
    assert learner.ask(wire.Published(1, update, "/w/1", batches=update)) == wire.Ack([], [])
    return learner


def refused(reply: wire.Message, words: str) -> bool:
    return isinstance(reply, wire.Refused) and words in reply.reason


# --- a rank of the learner before ---------------------------------------------------------------


def test_a_stray_rank_of_the_learner_before_neither_evicts_nor_takes(make_net):
    net, _, generator = start(make_net)
    stray = net.learner(1)
    net.queue.clock.advance(9)
    stray.send(wire.Take(9, 9, 1, 2))
    assert stray.quiet()
    learner = successor(net)
    deliver(generator, 8, epoch=1)
    queued = net.queue.ledger.count(State.QUEUED)
    assert queued >= 4
    for _ in range(3):
        # It is not known any more; with its Hello it says of which run epoch it is.
        assert stray.ask(wire.Take(9, 9, 1, 2)) == wire.Rejoin()
        assert refused(stray.hello(held=(0, 9)), "a newer learner took over as run epoch 1")
    # Introduced without a version, its takes are still of another run epoch.
    assert isinstance(stray.hello(), wire.Welcome)
    assert refused(stray.ask(wire.Take(9, 9, 1, 2)), "a newer learner took over as run epoch 1")
    assert net.queue.ledger.count(State.QUEUED) == queued and not net.queue._takes.by_id
    reply = learner.ask(wire.Take(0, 0, 0, 1, epoch=1))
    assert reply.ready and len(reply.frames) == 4


def test_what_a_replaced_rank_0_says_is_refused_and_changes_nothing(make_net):
    net, learner, _ = start(make_net)
    assert learner.ask(wire.Take(0, 0, 0, 1)).ready
    ids = [e.group_id for e in net.queue.ledger.of_state(State.TAKEN)]
    assert learner.ask(wire.Commit(0, 1, "trained", ids)) == wire.Ack([], ids)
    publish(learner, 1)
    new = successor(net)
    before = net.queue.save()
    # On the connection that may still speak: the fence does not depend on who was forgotten.
    words = "a newer learner took over as run epoch 1, this one is of run epoch 0"
    for message in (
        wire.Take(1, 1, 0, 1),
        wire.Commit(0, 1, "trained", ids),
        wire.Commit(1, 2, "trained", []),
        wire.Published(0, 2, "/w/0.2"),
        wire.Published(0, 1, "/w/0.1"),
        wire.Done(0),
    ):
        assert refused(new.ask(message), words), message
    after = net.queue.save()
    assert after._replace(tally=None) == before._replace(tally=None)
    assert net.queue.clock.newest == Version(1, 0) and not net.queue.closed
    assert new.ask(wire.Published(1, 0, "/w/1")) == wire.Ack([], []), "announced again"


def test_ranks_of_the_new_learner_are_forgotten_once_and_come_back(make_net):
    net, _, _ = start(make_net)
    rank = net.learner(1)
    learner = successor(net)
    assert set(net.server.peers.known) == {b"learner-0-new", b"g0"}
    assert rank.ask(wire.Take(0, 0, 1, 2, epoch=1)) == wire.Rejoin()
    assert isinstance(rank.hello(), wire.Welcome)
    rank.send(wire.Take(0, 0, 1, 2, epoch=1))
    learner.send(wire.Take(0, 0, 0, 2, epoch=1))
    ready = [peer.recv()[0] for peer in (rank, learner)]
    assert all(r.ready for r in ready) and sum(len(r.frames) for r in ready) == 4


def test_after_a_restart_of_replay_the_replaced_learner_displaces_nobody(make_net):
    net, learner, _ = start(make_net)
    publish(learner, 5)
    successor(net, 3)
    net = make_net()
    new, old = net.peer("learner-0", "learner", False, "new"), net.peer("learner-0", "learner", False, "old")
    assert isinstance(new.hello("b1", held=(1, 3)), wire.Welcome)
    assert refused(old.hello("b0", held=(0, 5)), "a newer learner took over as run epoch 1")
    assert new.quiet() and new.ask(wire.Published(1, 3, "/w/1", batches=3)) == wire.Ack([], [])
    assert isinstance(old.ask(wire.Published(0, 7, "/w/7")), wire.Rejoin)
    assert net.queue.clock.newest == Version(1, 3) and net.queue.clock.reached == 5


# --- odd numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "message", "words"),
    [
        (0, wire.Take(5, 10**9, 0, 1), "the clock is at 0"),
        (0, wire.Take(1, 1, 0, 1), "the clock is at 0"),
        (1, wire.Take(1, 2, 1, 2), "the clock is at 0"),
        (0, wire.Take(1, -1, 0, 1), "is over"),
        (0, wire.Take(0, 0, 0, 1, epoch=1), "no version of run epoch 1"),
        (0, wire.Commit(0, 10**9, "trained", []), "the clock is at 0"),
        (0, wire.Commit(0, 2, "trained", []), "the clock is at 0"),
        (0, wire.Commit(0, 1, "skipped", []), "the clock is at 0"),
        (0, wire.Commit(0, 0, "skipped", [], batch=-7), "negative"),
        (0, wire.Commit(0, -5, "skipped", []), "negative"),
        (0, wire.Commit(0, 1, "trained", [], epoch=7), "no version of run epoch 7"),
        (1, wire.Commit(0, 1, "trained", []), "learner-1 may not send Commit"),
        (0, wire.Published(0, 2**40, "x"), "the run has 100 updates"),
        (0, wire.Published(0, 1, "x"), "before its update is committed"),
        (0, wire.Published(1, 1, "x"), "knows of updates up to 0"),
        (0, wire.Published(2**40, 0, "x"), "replay is in run epoch 0"),
        (3, wire.Published(1, 0, "x"), "learner-3 may not send Published"),
        (3, wire.Done(0), "learner-3 may not send Done"),
        (0, wire.Done(0), "the clock is at 0 of 100 updates"),
        (0, wire.Done(10**9), "the clock is at 0 of 100 updates"),
    ],
)
def test_one_odd_message_changes_nothing(make_net, rank, message, words):
    net, learner, generator = start(make_net, total_updates=100)
    assert learner.ask(wire.Take(0, 0, 0, 1)).ready
    deliver(generator, 4)
    peer = net.learner(rank) if rank else learner
    before, queued = net.queue.save(), net.queue.ledger.count(State.QUEUED)
    reply = peer.ask(message)
    assert refused(reply, words), reply
    assert net.queue.save()._replace(tally=None) == before._replace(tally=None) and not net.queue.tally.dropped
    assert net.queue.ledger.count(State.QUEUED) == queued == 4 and not net.queue.refusal(Version(0, 0))


def test_a_rank_that_is_ahead_of_the_commit_waits_for_it_and_evicts_nothing(make_net):
    net, learner, _ = start(make_net, groups_per_update=2, max_lag=1)
    rank = net.learner(1)
    for peer, number in ((learner, 0), (rank, 1)):
        peer.send(wire.Take(0, 0, number, 2))
    assert learner.recv()[0].ready and rank.recv()[0].ready
    ids = [e.group_id for e in net.queue.ledger.of_state(State.TAKEN)]
    rank.send(wire.Take(1, 1, 1, 2))
    assert rank.quiet() and net.queue.ledger.count(State.QUEUED) == 2
    assert net.queue.waiting == "the commit of update 0"
    learner.ask(wire.Commit(0, 1, "trained", ids))
    learner.send(wire.Take(1, 1, 0, 2))
    assert rank.recv()[0].ready and learner.recv()[0].ready


# --- repeats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
def test_commits_and_the_end_are_acknowledged_again_after_a_lost_answer(make_net, restarted):
    net, learner, generator = start(make_net, total_updates=2)
    for update in range(2):
        assert learner.ask(wire.Take(update, update, 0, 1)).ready
        assert learner.ask(wire.Take(update, update, 0, 1)).ready
        ids = [e.group_id for e in net.queue.ledger.of_state(State.TAKEN)]
        commit = wire.Commit(update, update + 1, "trained", ids, batch=update)
        assert learner.ask(commit) == wire.Ack([], ids)
        if not update:
            first = commit
            deliver(generator, 4)
    assert learner.ask(wire.Done(2)) == wire.Ack([], [])
    if restarted:
        net = make_net(total_updates=2)
        learner = net.learner()
    assert learner.ask(commit) == wire.Ack([], commit.group_ids)
    assert learner.ask(first) == wire.Ack([], first.group_ids), "late, from before"
    assert learner.ask(wire.Done(2)) == wire.Ack([], [])
    assert net.queue.clock.update == 2 and net.queue.tally.trained.count == 16


def test_a_commit_of_a_past_update_resolves_nothing(make_net):
    net, learner, _ = start(make_net)
    assert learner.ask(wire.Take(0, 0, 0, 1)).ready
    ids = [e.group_id for e in net.queue.ledger.of_state(State.TAKEN)]
    net.queue.clock.advance(2)
    assert refused(learner.ask(wire.Commit(0, 1, "trained", ids)), "of groups not committed yet, the clock is at 2")
    assert net.queue.ledger.count(State.TAKEN) == 4


def test_a_new_replay_goes_on_where_the_learners_checkpoint_is(make_net):
    net = make_net(total_updates=100)
    learner, generator = net.learner(), net.peer("g0")
    assert learner.ask(wire.Published(1, 40, "/w/1.40", batches=40)) == wire.Ack([], [])
    deliver(generator, 4, epoch=1, update=40)
    assert learner.ask(wire.Take(0, 40, 0, 1, epoch=1)).ready


def test_a_name_of_which_no_metric_could_be_made_is_refused(make_net):
    net = make_net()
    assert refused(net.peer("x", hello=False).hello(peer_id="g" * 151), "1 to 150 characters, not 151")
    assert refused(net.peer("y", hello=False).hello(peer_id=""), "1 to 150 characters, not 0")


def test_a_name_that_cannot_be_printed_is_refused(make_net):
    net = make_net()
    assert refused(net.peer("x", hello=False).hello(peer_id="g\n0"), "names are printable")
    assert refused(net.peer("y", hello=False).hello(boot="\0"), "names are printable")
