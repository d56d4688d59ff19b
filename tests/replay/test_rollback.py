"""A learner that was killed goes on from an older update: what it threw away is undone, and undone once."""

from __future__ import annotations

import json

import pytest

from asyncrl import wire
from asyncrl.replay.cursor import Cursor
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.journal import Journal, Rollback, surviving
from asyncrl.replay.ledger import State
from asyncrl.replay.queue import Committed, ReplayQueue
from asyncrl.types import Version
from tests.replay.net import Net, publish
from tests.replay.support import answer, deliver, fill, make_prompts, make_queue


def line(batch: int, name: str, epoch: int = 0) -> dict:
    return Committed(batch, epoch, f"0/{name}", "g0", "trained", batch)._asdict()


# --- the file -----------------------------------------------------------------------------------


def test_what_survives_is_what_no_later_line_undid():
    lines = [line(0, "a"), line(1, "b"), line(2, "c"), {"rolled_back_to": 2, "epoch": 1, "update": 2}]
    lines += [line(2, "d", 1), line(3, "e", 1), {"rolled_back_to": 1, "epoch": 2, "update": 1}, line(1, "c", 2)]
    assert [c["group_id"] for c in surviving(lines)] == ["0/a", "0/c"]
    assert [c["group_id"] for c in surviving(lines[:6])] == ["0/a", "0/b", "0/d", "0/e"]
    assert surviving([]) == surviving([{"rolled_back_to": 0, "epoch": 1, "update": 0}]) == []


def test_the_journal_says_what_a_rollback_undoes_and_says_it_again_to_the_next_process(tmp_path):
    journal = Journal(tmp_path)
    batches = [Committed(i, 0, f"0/{i}", "g0", "trained", i) for i in range(4)]
    journal.write(batches[:2])
    mark = journal.num_bytes
    journal.write(batches[2:])
    rollback = journal.roll_back(1, Version(1, 1), "/w/1.1")
    assert rollback == Rollback(1, 1, 1, "/w/1.1", tuple(batches[1:]))
    # Told twice it has nothing left to undo.
    assert journal.roll_back(1, Version(2, 1), "").groups == ()
    again = batches[2]._replace(epoch=2, batch=1)
    journal.write([again])
    journal.close()
    journal = Journal(tmp_path)
    assert journal.since(mark) == [*batches[2:], rollback, Rollback(1, 2, 1), again]
    journal.close()
    lines = [json.loads(x) for x in (tmp_path / "committed.jsonl").read_text().splitlines()]
    assert lines[4] == {"rolled_back_to": 1, "epoch": 1, "update": 1, "source": "/w/1.1"}
    assert [Committed(**c) for c in surviving(lines)] == [batches[0], again]


def test_a_run_that_begins_anew_in_the_folder_of_another_does_not_undo_its_groups_later(tmp_path):
    journal = Journal(tmp_path)
    journal.begin()
    assert journal.num_bytes == 0
    journal.write([Committed(5, 0, "0/a", "g0", "trained", 5)])
    journal.begin()
    journal.write([Committed(0, 0, "0/a", "g0", "trained", 0)])
    assert journal.roll_back(1, Version(1, 1), "").groups == ()
    journal.close()


# --- the queue ----------------------------------------------------------------------------------


def test_a_group_of_a_data_epoch_that_was_complete_and_forgotten_is_opened_again():
    cursor = Cursor(make_prompts(11), 0)
    first = [cursor.next() for _ in range(11)]
    for epoch, index in first:
        cursor.resolve(epoch, index)
    second = cursor.next()
    assert cursor.reopen(cursor.group_id(*first[3])) == first[3]
    assert [cursor.is_resolved(cursor.group_id(*x)) for x in first] == [i != 3 for i in range(11)]
    assert cursor.reopen(cursor.group_id(*first[3])) is None
    assert cursor.reopen(cursor.group_id(*second)) is None
    assert cursor.reopen("7/p0") is cursor.reopen("0/nobody") is cursor.reopen("x/p0") is None
    cursor.resolve(*first[3])
    assert cursor.is_resolved(cursor.group_id(*first[3]))


def commits(queue: ReplayQueue, take_id: int, update: int) -> list[Committed]:
    take = queue.take(take_id, update)
    assert take is not None, queue.waiting
    return queue.commit(take_id, update + 1, "trained", take.batches[0], batch=update)


def test_a_learner_that_is_killed_often_costs_no_prompt_its_attempts():
    queue = make_queue(max_lag=9, groups_per_update=1, max_attempts=2)
    for epoch in range(8):
        queue.publish(Version(epoch, 0))
        queue.publish(Version(epoch, 1))
        sampled, running = queue.lease("g0", Version(epoch, 1), 2, 0.0).leases
        assert sampled.attempt == running.attempt == epoch + 1
        group = answer(sampled, [(1, 4)], [(1, 4)], epoch=epoch)
        assert deliver(queue, group, [b"group", b""], "g0").status == "admitted"
        # What is remembered of it outlives replay.
        queue, saved = make_queue(max_lag=9, groups_per_update=1, max_attempts=2), queue.save()
        queue.clock.newest = None
        queue.load(saved)
        queue.claim("g0", Version(epoch, 1), [running.lease_id], [sampled.lease_id], 0.0)
        assert deliver(queue, group, [b"group", b""], "g0").status == "admitted"
    queue.publish(Version(8, 0))
    assert queue.tally.counters["lost_version"] == 16 and not queue.tally.dropped
    # An attempt that died with its generator counts: the prompt may be what kills it.
    for attempt in (9, 10):
        assert {x.attempt for x in queue.lease("g0", Version(8, 0), 2, 0.0).leases} == {attempt}
        queue.generator_lost("g0")
    assert queue.tally.counters["max_attempts"] == 2


def test_the_undone_prompts_are_leased_first_and_trained_once_more():
    queue = make_queue(max_lag=9)
    done = []
    for update in range(3):
        fill(queue, 4)
        done += commits(queue, update, update)
        queue.publish(Version(0, update + 1))
    assert queue.clock.update == 3
    assert queue.publish(Version(1, 1), [c for c in done if c.batch >= 1])
    assert (queue.clock.update, queue.tally.counters["rolled_back"]) == (1, 8)
    leases = queue.lease("g0", Version(1, 1), 9, 0.0).leases
    assert [x.group_id for x in leases[:8]] == [c.group_id for c in done[4:]]
    assert [x.attempt for x in leases[:8]] == [1] * 8 and leases[8].group_id not in {c.group_id for c in done}
    # Told again (with the same list), nothing happens: they are open.
    assert not queue.publish(Version(1, 1), done)
    assert queue.publish(Version(2, 1), done[4:]) and queue.tally.counters["rolled_back"] == 8
    for lease in leases[:4]:
        assert deliver(queue, answer(lease, [(1, 4)], [(1, 4)], epoch=1), [b"group", b""], "g0").status == "admitted"
    again = commits(queue, 0, 1)
    assert {c.group_id for c in again} == {c.group_id for c in done[4:8]} and {c.epoch for c in again} == {2}


def test_what_was_sampled_under_surviving_versions_stays_and_the_rest_goes():
    # B31: generators at 0.3, the learner goes on from update 1.
    queue = make_queue(max_lag=9)
    (old,) = fill(queue, 1)
    queue.publish(Version(0, 1))
    (fork,) = fill(queue, 1, held=1)
    for update in (2, 3):
        queue.publish(Version(0, update))
    (lost,) = fill(queue, 1, held=3)
    (mixed,) = fill(queue, 1, [(1, 2), (3, 2)], [(1, 4)], held=1)
    young, doomed = (queue.lease("g1", Version(0, held), 1, 0.0).leases[0] for held in (1, 3))
    queue.publish(Version(1, 1))
    entries = queue.ledger.entries
    assert entries[old].state is entries[fork].state is State.QUEUED
    assert entries[lost].state is entries[mixed].state is entries[doomed.group_id].state is State.PENDING
    assert queue.tally.counters["lost_version"] == 3
    assert entries[young.group_id].state is State.LEASED and queue.drain_cancelled() == [("g1", doomed.lease_id)]
    # Its generator loaded a lost version in mid-response before it heard of the new one.
    assert deliver(queue, answer(young, [(1, 2), (2, 2)], [(1, 4)]), [b"group", b""], "g1").reason == "lost_version"
    assert queue.refusal(Version(0, 3)) == "version_too_old" and queue.refusal(Version(1, 1)) == ""


def test_a_result_of_before_is_as_good_as_a_new_one_when_its_versions_survive():
    queue = make_queue(max_lag=9)
    leases = queue.lease("g0", Version(0, 0), 4, 0.0).leases
    groups = [answer(x) for x in leases]
    for group in groups:
        deliver(queue, group, [b"group", b""], "g0")
    done = commits(queue, 0, 0)
    queue.publish(Version(1, 0), done)
    # Sent before its generator heard that it was resolved.
    assert deliver(queue, groups[0], [b"group", b""], "g0").status == "admitted"
    assert deliver(queue, groups[0], [b"group", b""], "g0").status == "known"


# --- the server ---------------------------------------------------------------------------------


def make_progress(net: Net, updates: int = 3):
    """A learner and a generator; update 0, 1, ... is committed as the batch of that number. Group ids by batch."""
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    generator.lease(0, rows=6 * net.evals.num_open)
    out = []
    for update in range(updates):
        for lease in generator.lease(4).leases:
            generator.ask(generator.group(lease))
        learner.send(wire.Take(update, update, 0, 1))
        reply, buffers = learner.recv()
        assert reply.ready
        at = [0, *reply.frames]
        ids = [wire.decode_group([b"group", *buffers[sum(at[:i]) :][: at[i]]]).group_id for i in range(1, 5)]
        assert learner.ask(wire.Commit(update, update + 1, "trained", ids, batch=update)) == wire.Ack([], ids)
        assert generator.recv()[0] == wire.Ack([], ids)
        out.append(ids)
    return learner, generator, out


def read(tmp_path) -> list[dict]:
    return [json.loads(x) for x in (tmp_path / "committed.jsonl").read_text().splitlines()]


def test_a_learner_that_goes_back_gets_the_prompts_of_what_it_lost_again(make_net, tmp_path):
    net = make_net(max_lag=9)
    _, generator, ids = make_progress(net)
    learner = net.peer("learner-0", "learner", identity="another")
    assert learner.ask(wire.Published(1, 1, "/w/1.1", batches=1)) == wire.Ack([], [])
    assert generator.recv()[0] == wire.NewVersion(1, 1, "/w/1.1")
    assert net.counters["rolled_back"] == 8
    assert read(tmp_path)[-1] == {"rolled_back_to": 1, "epoch": 1, "update": 1, "source": "/w/1.1"}
    assert [c["group_id"] for c in surviving(read(tmp_path))] == ids[0]
    reply = generator.ask(wire.LeaseRequest((1, 1), 8, 0))
    assert [x.group_id for x in reply.leases] == [*ids[1], *ids[2]]
    # Announced again: nothing more happens.
    size = net.journal.num_bytes
    assert learner.ask(wire.Published(1, 1, "/w/1.1", batches=1)) == wire.Ack([], [])
    assert net.journal.num_bytes == size and net.counters["rolled_back"] == 8
    assert net.server.queue.clock.update == 1


@pytest.mark.parametrize("killed", ["before", "half a line", "after the journal", "after the snapshot"])
def test_replay_killed_around_a_rollback_does_it_once(make_net, tmp_path, killed):
    net = make_net(max_lag=9, every=1)
    _, _, ids = make_progress(net)
    if killed == "half a line":
        with open(tmp_path / "committed.jsonl", "ab") as file:
            file.write(b'{"rolled_back_to": 1, "ep')
    elif killed == "after the journal":
        net.journal.roll_back(1, Version(1, 1), "/w/1.1")
    elif killed == "after the snapshot":
        net.server._versions.announce(Version(1, 1), "/w/1.1", 1)
        net.server.save()
    net = make_net(max_lag=9, every=1)
    done = killed.startswith("after")
    assert net.counters["rolled_back"] == 8 * done and net.queue.clock.epoch == done
    learner, generator = net.peer("learner-0", "learner", hello=False), net.peer("g0", hello=False)
    newest = (1, 1, "/w/1.1") if done else (0, 0, "/w/0.0")
    assert learner.hello() == wire.Welcome(int(done), 1 if done else 3, newest)
    publish(learner, 1, 1) if done else learner.ask(wire.Published(1, 1, "/w/1.1", batches=1))
    assert net.counters["rolled_back"] == 8 and net.queue.clock.update == 1
    assert [c["group_id"] for c in surviving(read(tmp_path))] == ids[0]
    assert sum("rolled_back_to" in x for x in read(tmp_path)) == 1
    # The evaluation of the new epoch is open however it came to be known.
    assert net.evals._open[-1].target == Version(1, 1)
    generator.hello()
    assert [x.group_id for x in generator.ask(wire.LeaseRequest((1, 1), 8, 8)).leases if not x.eval_id] != []
    assert {e.group_id for e in net.queue.ledger.entries.values()} >= {*ids[1], *ids[2]}


def test_a_learner_killed_before_it_announced_anything_leaves_all_as_it_was(make_net, tmp_path):
    net = make_net(max_lag=9)
    make_progress(net)
    second = net.peer("learner-0", "learner", hello=False, identity="second")
    assert second.hello() == wire.Welcome(0, 3, (0, 0, "/w/0.0"))
    third = net.peer("learner-0", "learner", hello=False, identity="third")
    assert third.hello() == wire.Welcome(0, 3, (0, 0, "/w/0.0"))
    assert len(surviving(read(tmp_path))) == 12 and net.counters["rolled_back"] == 0


def test_takes_of_the_dead_learner_are_void_and_its_waiting_ranks_get_nothing(make_net):
    net = make_net(max_lag=9)
    first, generator, _ = make_progress(net, updates=1)
    other = net.learner(1)
    for peer, rank in ((first, 0), (other, 1)):
        peer.send(wire.Take(1, 1, rank, 2))
    assert first.quiet() and other.quiet()
    learner = net.peer("learner-0", "learner", identity="another")
    learner.ask(wire.Published(1, 0, "/w/1.0", batches=0))
    generator.recv()
    for lease in generator.ask(wire.LeaseRequest((1, 0), 4, 0)).leases:
        generator.ask(generator.group(lease))
    # The take with number 0 of the first learner is forgotten; rank 1 of old does not freeze its own.
    assert other.quiet() and not net.queue._takes.by_id
    learner.send(wire.Take(0, 0, 0, 1, epoch=1))
    reply, _ = learner.recv()
    assert reply.ready and len(reply.frames) == 4


def test_nobody_goes_back_after_the_end(make_net):
    net = make_net(max_lag=9)
    learner, _, _ = make_progress(net)
    assert learner.ask(wire.Status()).state["closed"] is False
    learner.ask(wire.Done(3))
    assert learner.ask(wire.Status()).state["closed"] is True
    reply = learner.ask(wire.Published(1, 1, "/w/1.1", batches=1))
    assert isinstance(reply, wire.Refused) and "after the end" in reply.reason
    assert net.counters["rolled_back"] == 0


# --- evaluations --------------------------------------------------------------------------------


def test_evaluations_of_lost_versions_are_void_and_due_again():
    queue = make_queue()
    evals = Evaluations(make_prompts(2, "e"), queue.tally, every=2, greedy=False)
    for update in (0, 2, 4):
        queue.publish(Version(0, update))
        evals.publish(Version(0, update))
        leases = evals.lease("g0", Version(0, update), 2 if update < 4 else 1, 0.0)
        answers = [wire.EvalAnswer(x.prompt.prompt_id, 0, False, 1.0, 3, "stop") for x in leases]
        evals.put(wire.EvalResult(leases[0].eval_id, (0, update), answers))
    assert [e["label"] for e in evals.finished] == ["0.0", "0.2"] and evals.num_open == 1
    queue.publish(Version(1, 1))
    evals.roll_back(queue.clock.lost)
    evals.publish(Version(1, 1))
    # That of update 0 stands. Those of 2 and 4 were of another timeline; the next due one is at 2 again.
    assert [e["label"] for e in evals.finished] == ["0.0"] and evals.num_open == 0
    assert queue.tally.counters["eval_rolled_back"] == 1
    evals.publish(Version(1, 2))
    leases = evals.lease("g0", Version(1, 2), 2, 0.0)
    answers = [wire.EvalAnswer(x.prompt.prompt_id, 0, False, 0.0, 3, "stop") for x in leases]
    evals.put(wire.EvalResult(leases[0].eval_id, (1, 2), answers))
    assert [(e["epoch"], e["version"], e["sampled_accuracy"]) for e in evals.finished] == [(0, 0, 1.0), (1, 2, 0.0)]


def test_the_evaluation_of_the_version_that_the_learner_went_on_from_is_not_repeated():
    queue = make_queue()
    evals = Evaluations(make_prompts(2, "e"), queue.tally, every=2, greedy=False)
    for update in (0, 2):
        queue.publish(Version(0, update))
        evals.publish(Version(0, update))
        leases = evals.lease("g0", Version(0, update), 2, 0.0)
        answers = [wire.EvalAnswer(x.prompt.prompt_id, 0, False, 1.0, 3, "stop") for x in leases]
        evals.put(wire.EvalResult(leases[0].eval_id, (0, update), answers))
    queue.publish(Version(1, 2))
    evals.roll_back(queue.clock.lost)
    evals.publish(Version(1, 2))
    assert len(evals.finished) == 2 and evals.num_open == 0
    evals.publish(Version(1, 4))
    assert evals.num_open == 1
