"""Replay killed at each point where it matters: between a change, its record, and the answer about it."""

from __future__ import annotations

import json
import os
import resource

import msgspec
import pytest

from asyncrl import wire
from asyncrl.errors import ConfigError, RunError
from asyncrl.replay import desk
from asyncrl.replay.claims import Claim
from asyncrl.replay.cursor import RESERVE, Cursor
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.journal import Journal
from asyncrl.replay.ledger import State
from asyncrl.replay.queue import Committed, QueueState, ReplayQueue
from asyncrl.replay.snapshot import SnapshotFile
from asyncrl.types import Version
from tests.replay.net import Net, publish
from tests.replay.support import MODEL, answer, deliver, fill, make_prompts, make_queue, train


def again(queue: ReplayQueue, saved: bytes | None = None) -> ReplayQueue:
    """Another process with what the disk has of this one."""
    data = saved or msgspec.msgpack.encode(queue.save())
    new = ReplayQueue(queue.ledger.prompts, queue.limits, MODEL)
    new.load(msgspec.msgpack.decode(data, type=QueueState))
    return new


# --- the queue ----------------------------------------------------------------------------------


def test_a_loaded_queue_knows_what_is_resolved_and_gives_out_the_rest_once():
    # B52: 20 prompts, 4 trained, 4 queued, 2 in the works, then a kill.
    queue = make_queue(num_prompts=20, max_lag=9)
    done = fill(queue, 4)
    train(queue, 0, 0)
    queued = fill(queue, 4)
    out = queue.lease("g1", Version(0, 0), 2, 0.0).leases
    queue = again(queue)
    assert all(queue.ledger.is_resolved(i) for i in done) and queue.clock.update == 1
    # Whoever held nothing: everything that is not done is leased again, first what was out, then in the old order.
    leases = queue.lease("g0", Version(0, 0), 16, 0.0).leases
    names = [x.group_id for x in leases]
    assert set(names[:6]) == {*queued, *(x.group_id for x in out)} and len(set(names)) == 16
    assert not set(names) & set(done) and {i.partition("/")[0] for i in names} == {"0"}
    assert [x.attempt for x in leases] == [2] * 6 + [1] * 10


def test_a_generator_keeps_its_leases_over_a_restart_of_replay():
    queue = make_queue(max_lag=9)
    leases = queue.lease("g0", Version(0, 0), 3, 0.0).leases
    queue = again(queue)
    ids = [x.lease_id for x in leases]
    claim = queue.claim("g0", Version(0, 0), ids[:1], ids[1:2], 5.0)
    assert claim == Claim([], [], [leases[1].group_id])
    assert queue.ledger.count(State.LEASED) == 2
    assert deliver(queue, answer(leases[1]), [b"group", b""], "g0").status == "admitted"
    # The third one was not claimed: it is leased to another, and the first result wins.
    (other,) = queue.lease("g1", Version(0, 0), 1, 5.0).leases
    assert (other.group_id, other.attempt) == (leases[2].group_id, 2)
    assert deliver(queue, answer(leases[2]), [b"group", b""], "g0").status == "admitted"
    assert queue.drain_cancelled() == [("g1", other.lease_id)]


def test_the_same_attempt_that_two_processes_gave_out_is_cancelled_by_its_holder():
    queue = make_queue(max_lag=9)
    queue.save()
    saved = msgspec.msgpack.encode(queue.save())
    (old,) = queue.lease("g0", Version(0, 0), 1, 0.0).leases
    queue = again(queue, saved)
    (new,) = queue.lease("g1", Version(0, 0), 1, 0.0).leases
    assert new.lease_id == old.lease_id
    assert deliver(queue, answer(old), [b"group", b""], "g0").status == "admitted"
    assert queue.drain_cancelled() == [("g1", new.lease_id)]


def test_a_late_copy_of_an_evicted_result_stays_out_after_a_restart():
    queue = make_queue(max_lag=1)
    (lease,) = queue.lease("g0", Version(0, 0), 1, 0.0).leases
    queue.publish(Version(0, 2))
    assert deliver(queue, answer(lease), [b"group", b""], "g0").reason == "stale"
    queue = again(queue)
    put = deliver(queue, answer(lease, [(2, 4)], [(2, 4)]), [b"group", b""], "g0")
    assert put.status == "resolved" and queue.tally.counters["duplicate"] == 1


def test_what_was_leased_after_the_last_save_is_known():
    queue = make_queue(max_lag=99)
    saved = msgspec.msgpack.encode(queue.save())
    assert not queue.unsaved
    leases = queue.lease("g0", Version(0, 0), RESERVE, 0.0).leases
    assert not queue.unsaved
    assert queue.lease("g0", Version(0, 0), 1, 0.0).leases and queue.unsaved
    queue = again(queue, saved)
    assert deliver(queue, answer(leases[-1]), [b"group", b""], "g0").status == "admitted"
    # It came before its turn, and it is not given out when its turn comes.
    rest = [x.group_id for x in queue.lease("g0", Version(0, 0), RESERVE, 0.0).leases]
    assert leases[-1].group_id not in rest
    assert rest[: RESERVE - 1] == [x.group_id for x in leases[:-1]]


def test_restarts_without_progress_do_not_pile_up_prompts():
    queue = make_queue(num_prompts=1000)
    for _ in range(20):
        queue = again(queue)
    assert len(queue.ledger.entries) == RESERVE and queue.ledger.cursor.given == RESERVE


def test_capacity_after_a_restart_is_that_of_the_lag_rule():
    # B36 (b): at update 40 with G 8 and max_lag 1 there are 16 leases to have, not 336.
    queue = make_queue(groups_per_update=8, max_lag=1)
    for update in range(40):
        fill(queue, 8, held=update)
        train(queue, update, update)
        queue.publish(Version(0, update + 1))
    queue = again(queue)
    grant = queue.lease("g0", Version(0, 40), 1000, 0.0)
    assert (len(grant.leases), grant.idle) == (16, "ahead_full")


def test_counters_and_versions_go_on():
    queue = make_queue()
    fill(queue, 4)
    train(queue, 0, 0)
    queue.publish(Version(0, 1))
    queue.publish(Version(1, 0))
    queue.publish(Version(1, 5))
    new = again(queue)
    assert new.clock.save() == queue.clock.save() and new.tally.save() == queue.tally.save()
    assert new.tally.trained.count == 8 and new.clock.lost(Version(0, 1)) and not new.clock.unknown(Version(0, 1))


def test_the_cursor_crosses_data_epochs_in_the_same_order():
    prompts = make_prompts(10)
    whole, first = Cursor(prompts, 3), Cursor(prompts, 3)
    order = [whole.next() for _ in range(40)]
    got = [first.next() for _ in range(17)]
    for epoch, index in got[:12]:
        first.resolve(epoch, index)
    second = Cursor(prompts, 3)
    second.load(first.save(spare=RESERVE))
    assert [second.is_resolved(second.group_id(*g)) for g in got] == [True] * 12 + [False] * 5
    assert got + [second.next() for _ in range(23)] == order
    # Two bytes for the 10 prompts of each open data epoch.
    assert {e: len(b) for e, b in second.save(0).resolved.items()} == {1: 2, 2: 2, 3: 2}


# --- the files ----------------------------------------------------------------------------------


def test_half_a_line_of_the_journal_is_cut_off(tmp_path):
    journal = Journal(tmp_path)
    journal.write([Committed(0, 0, "0/a", "g0", "trained")])
    mark = journal.num_bytes
    journal.write([Committed(1, 0, "0/b", "g0", "trained"), Committed(1, 0, "0/c", "g0", "skipped")])
    journal.close()
    file = tmp_path / "committed.jsonl"
    os.truncate(file, file.stat().st_size - 5)
    journal = Journal(tmp_path)
    assert journal.since(mark) == [Committed(1, 0, "0/b", "g0", "trained")]
    journal.write([Committed(1, 0, "0/c", "g0", "skipped")])
    assert [c.group_id for c in journal.since(0)] == ["0/a", "0/b", "0/c"]
    journal.close()


def test_a_journal_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    journal = Journal(tmp_path)
    journal.write([Committed(0, 0, "0/a", "g0", "trained")])
    many = [Committed(1, 0, f"0/{i}", "g0", "trained") for i in range(100)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for one line and half of the next.
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.num_bytes * 5 // 2, hard))
    try:
        with pytest.raises(RunError, match=r"committed\.jsonl cannot be written.*File too large"):
            journal.write(many)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert journal.num_bytes == (tmp_path / "committed.jsonl").stat().st_size
    mark = journal.num_bytes
    journal.write(many[:1])
    assert [c.group_id for c in journal.since(0)] == ["0/a", "0/0"] and journal.since(mark) == many[:1]
    journal.close()


def test_a_snapshot_of_an_earlier_format_is_refused_by_name(tmp_path):
    (tmp_path / "replay.snapshot").write_bytes(msgspec.msgpack.encode([1, "f", 0, []]))
    with pytest.raises(ConfigError, match=r"replay\.snapshot is of .*another asyncrl; choose another run\.name"):
        SnapshotFile(tmp_path, "f").read()


def test_a_snapshot_that_cannot_be_written_ends_replay_with_the_reason(tmp_path):
    file = SnapshotFile(tmp_path / "nowhere", "f")
    queue = make_queue()
    evals = Evaluations([], queue.tally, every=0)
    fields = {"restarts": 0, "source": "", "generators": [], "done": False, "journal_bytes": 0}
    with pytest.raises(RunError, match=r"replay\.snapshot cannot be written.*train groups twice"):
        file.write(queue=queue.save(), evaluations=evals.save(), **fields)


# --- the server, killed at each point -----------------------------------------------------------


class Run:
    """Replay, one learner rank (or two) and one generator that keeps what it sent."""

    def __init__(self, folder, world=1, **limits):
        self.folder, self.world, self.limits = folder, world, limits
        self.net = Net(folder, **limits)
        self.learners = [self.net.learner(r) for r in range(world)]
        self.generator = self.net.peer("g0")
        publish(self.learners[0], 0)
        self.generator.recv()
        self.sent = {}

    def sample(self, count):
        for lease in self.generator.lease(count).leases:
            self.sent[lease.group_id] = (lease.lease_id, self.generator.group(lease))
            assert self.generator.ask(self.sent[lease.group_id][1]) == wire.Ack([lease.group_id], [])

    def restart(self):
        """SIGKILL: nothing is saved, nothing is said."""
        self.net.close()
        self.net = Net(self.folder, **self.limits)
        self.learners = [self.net.learner(r) for r in range(self.world)]
        self.generator = self.net.peer("g0", hello=False)

    def back(self, **changes):
        """The generator's Hello with what it keeps."""
        return self.generator.hello(kept=[lease_id for lease_id, _ in self.sent.values()], held=(0, 0), **changes)

    def send_again(self):
        return [self.generator.ask(frames) for _, frames in self.sent.values()]

    def take(self, rank=0, take_id=0, update=0):
        reply, buffers = self.ready(rank, wire.Take(take_id, update, rank, self.world))
        at, ids = 0, []
        for count in reply.frames:
            ids.append(wire.decode_group([b"group", *buffers[at : at + count]]).group_id)
            at += count
        return ids

    def ready(self, rank, message):
        self.learners[rank].send(message)
        return self.learners[rank].recv()

    def lines(self):
        return [json.loads(x)["group_id"] for x in (self.folder / "committed.jsonl").read_text().splitlines()]


@pytest.fixture
def start(tmp_path):
    runs = []

    def make(**changes):
        runs.append(Run(tmp_path, **changes))
        return runs[-1]

    yield make
    for run in runs:
        run.net.close()


def test_killed_after_a_take_was_frozen_the_same_groups_are_given_out(start):
    run = start()
    run.sample(6)
    first = run.take()
    run.restart()
    run.learners[0].send(wire.Take(0, 0, 0, 1))
    assert run.learners[0].quiet()
    run.back()
    assert run.net.queue.recovery.active and run.learners[0].quiet()
    run.send_again()
    assert not run.net.queue.recovery.active
    reply, buffers = run.learners[0].recv()
    at = 0
    for name, count in zip(first, reply.frames, strict=True):
        assert [bytes(b) for b in buffers[at : at + count]] == [bytes(b) for b in run.sent[name][1][1:]]
        at += count
    assert run.net.queue.ledger.count(State.QUEUED) == 2


def test_killed_while_the_learner_trains_the_commit_is_taken_without_the_payloads(start):
    run = start()
    run.sample(4)
    ids = run.take()
    run.restart()
    assert run.learners[0].ask(wire.Commit(0, 1, "trained", ids, 7)) == wire.Ack([], ids, 7)
    assert run.lines() == ids and run.net.queue.clock.update == 1
    assert run.net.queue.tally.trained.count == 8
    # The generator hears on its return that none is wanted any more, before it would send them again.
    run.generator.send(wire.Hello(
        wire.SCHEMA, "generator", "g0", "b0", [0, 1], 8, 2, 32, "f00d", (0, 0), [], [x for x, _ in run.sent.values()]
    ))  # fmt: skip
    reply = run.generator.recv()[0]
    assert isinstance(reply, wire.Ack) and sorted(reply.void) == sorted(f"{i}#1" for i in ids)
    assert isinstance(run.generator.recv()[0], wire.Welcome)
    assert all(a == wire.Ack([], [i]) for a, i in zip(run.send_again(), run.sent, strict=True))


@pytest.mark.parametrize("written", [0, 2, 4], ids=["no line", "half the lines", "all lines"])
def test_killed_in_the_middle_of_a_commit_every_group_is_committed_once(start, written):
    run = start()
    run.sample(4)
    ids = run.take()
    snapshot = (run.folder / "replay.snapshot").read_bytes()
    run.learners[0].ask(wire.Commit(0, 1, "trained", ids))
    lines = (run.folder / "committed.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "committed.jsonl").write_text("".join(lines[:written]) + '{"update": 0, "ep' * (written < 4))
    (run.folder / "replay.snapshot").write_bytes(snapshot)
    run.restart()
    assert run.net.queue.clock.update == int(written > 0)
    run.back()
    run.learners[0].ask(wire.Commit(0, 1, "trained", ids))
    assert sorted(run.lines()) == sorted(ids) and run.net.queue.tally.trained.count == 8
    assert run.net.queue.ledger.in_flight == 0


def test_killed_before_a_publication_is_acknowledged_the_generators_hear_of_it_all_the_same(start):
    run = start()
    publish(run.learners[0], 4)
    run.restart()
    welcome = run.generator.hello()
    assert welcome == wire.Welcome(0, 4, (0, 4, "/w/0.4"))
    # A learner that begins again publishes the same version from another place.
    run.learners[0].ask(wire.Published(0, 4, "/other"))
    assert run.generator.hello().newest == (0, 4, "/other")
    run.restart()
    assert run.generator.hello().newest == (0, 4, "/other")


def test_no_lease_and_no_new_take_until_the_generators_are_back(start):
    run = start()
    run.net.peer("g1")
    run.sample(4)
    run.restart()
    run.back()
    run.send_again()
    assert run.generator.lease(1) == wire.Leases([], "recovering", 1)
    run.learners[0].send(wire.Take(0, 0, 0, 1))
    assert run.learners[0].quiet() and run.net.queue.waiting.startswith("g1 to send 0")
    run.net.now += 14.9
    run.generator.send(wire.Heartbeat((0, 0), {}))
    assert run.generator.quiet() and run.learners[0].recv()[0].waiting.startswith("g1")
    # As long as a generator may be silent.
    run.net.now += 0.2
    assert run.learners[0].recv()[0].ready
    assert len(run.generator.lease(1).leases) == 1


def test_a_take_whose_payloads_died_with_their_generator_is_made_anew_when_no_rank_has_it(start):
    run = start(world=2)
    run.sample(4)
    lost = run.take(0) + run.take(1)
    run.restart()
    run.generator.hello(boot="b1")
    for rank in range(2):
        run.learners[rank].send(wire.Take(0, 0, rank, 2))
    run.sent.clear()
    assert run.learners[0].quiet()
    run.sample(4)
    assert run.net.counters["lost_payload"] == 4
    ids = sorted(run.take(0) + run.take(1))
    assert ids == sorted(run.sent) == sorted(lost)
    assert {x.rpartition("#")[2] for x, _ in run.sent.values()} == {"2"}


def test_a_rank_goes_without_what_is_lost_when_another_rank_has_its_shard(start):
    run = start(world=2)
    run.sample(4)
    here, there = run.take(0), run.take(1)
    run.restart()
    run.generator.hello(boot="b1")
    run.learners[1].send(wire.Take(0, 0, 1, 2))
    assert run.learners[1].quiet()
    run.net.now += desk.PATIENCE_S
    reply, buffers = run.learners[1].recv()
    while not reply.ready:
        reply, buffers = run.learners[1].recv()
    assert (reply.batch, buffers, reply.bounds) == ([], [], [-2])
    run.learners[0].ask(wire.Commit(0, 1, "trained", here))
    assert run.lines() == here and run.net.queue.ledger.in_flight == 0
    assert sorted(run.generator.recv()[0].resolved) == sorted(here)
    assert {x.group_id for x in run.generator.lease(2).leases} == set(there)


def test_killed_after_the_last_update_the_end_is_remembered(tmp_path):
    net = Net(tmp_path, every=20)
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    lease = generator.lease(1, rows=2).leases[0]
    learner.ask(wire.Done(0))
    net.close()
    net = Net(tmp_path, every=20)
    assert net.queue.closed and net.evals.num_open == 1 and not net.server.finished
    learner, generator = net.learner(), net.peer("g0")
    answers = [wire.EvalAnswer(f"e{i}", 0, greedy, 1.0, 3, "stop") for i in range(3) for greedy in (True, False)]
    generator.send(wire.EvalResult(lease.eval_id, (0, 0), answers))
    assert generator.quiet() and net.server.finished
    net.close()
    net = Net(tmp_path, every=20)
    state = net.learner().ask(wire.Status()).state
    assert state["finished"] and state["restarts"] == 2
    assert [e["count"] for e in state["evaluations"]] == [6]
    net.close()
