"""Live settings over real sockets: who is told what, the log, takes, restarts of replay."""

import json

import pytest

from asyncrl import wire
from asyncrl.config import validate
from asyncrl.replay.tune_log import FILE, TuneLog
from tests.replay.net import Net, publish

TREE = {
    "model": {"path": "m"}, "staleness": {"max_lag": 16, "sync_every": 4}, "generator": {"groups_in_flight": 8},
    "algorithm": {"groups_per_update": 4, "group_size": 2}, "learner": {"updates": 100},
}  # fmt: skip
LAG, EVERY, Q, LR = "staleness.max_lag", "staleness.sync_every", "algorithm.rdc.q", "learner.lr"


@pytest.fixture
def start(tmp_path):
    nets = []

    def make(**tree):
        nets.append(Net(tmp_path, config=validate(TREE | tree)))
        return nets[-1]

    yield make
    for net in nets:
        net.close()


def tune(peer, values, undo=0, key=""):
    reply = peer.ask(wire.Tune({k: json.dumps(v) for k, v in values.items()}, undo, "me", key))
    assert isinstance(reply, wire.TuneReply) and reply.key == key
    return reply


def lines(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def until(peer, kind):
    """The next message of that kind; what comes before it is passed over."""
    while not isinstance(message := peer.recv()[0], kind):
        pass
    return message


def feed(generator, count=4, update=0):
    generator.send(wire.LeaseRequest((0, update), count))
    for lease in until(generator, wire.Leases).leases:
        generator.send(generator.group(lease, update))
    generator.net.settle()


def take(learner, take_id, update):
    """The take, when it is ready at once."""
    reply = learner.ask(wire.Take(take_id, update, 0, 1))
    assert isinstance(reply, wire.TakeReply) and reply.ready
    return reply


def commit(learner, reply, update):
    ids = list(learner.net.queue._takes.by_id[reply.take_id].batches[0])
    assert isinstance(learner.ask(wire.Commit(reply.take_id, update, "trained", ids, batch=update - 1)), wire.Ack)


def test_a_stranger_tunes_and_the_next_take_has_it(start, tmp_path):
    net = start()
    learner, generator, operator = net.learner(), net.peer("g0"), net.peer("op", hello=False)
    publish(learner, 0)
    feed(generator)
    first = take(learner, 0, 0)
    assert first.tuned == first.coming == wire.Tuned()
    reply = tune(operator, {LAG: 8, Q: 0.1})
    assert reply.ok and reply.tuned == wire.Tuned(1, {LAG: "8", Q: "0.1"})
    assert reply.text.splitlines() == [
        "staleness.max_lag: 16 -> 8",
        "algorithm.rdc.q: 0.08 -> 0.1",
        "change 1: from update 1 on, whose take is the next",
    ]
    assert until(generator, wire.Settings) == wire.Settings(reply.tuned), "told at once"
    assert take(learner, 0, 0) == first, "a take that is asked for again is the same, settings and all"
    commit(learner, first, 1)
    feed(generator)
    second = take(learner, 1, 1)
    assert second.tuned == second.coming == reply.tuned and second.bounds == [1 - 8]
    said = lines(tmp_path)
    assert said[0] | {"time": 0} == {
        "seq": 1, "time": 0, "update": 0, "by": "me", "changes": {LAG: [16, 8], Q: [0.08, 0.1]}
    }  # fmt: skip
    assert said[1:] == [{"seq": 1, "applied_at": 1}]


def test_a_generator_that_missed_it_is_told_again_and_one_that_joins_hears_it(start):
    net = start()
    learner, generator, operator = net.learner(), net.peer("g0"), net.peer("op", hello=False)
    publish(learner, 0)
    tuned = tune(operator, {"generator.groups_in_flight": 2}).tuned
    assert until(generator, wire.Settings) == wire.Settings(tuned)
    generator.send(wire.Heartbeat((0, 0), {"tuned": 0.0}))
    assert until(generator, wire.Settings) == wire.Settings(tuned)
    generator.send(wire.Heartbeat((0, 0), {"tuned": 0.0}))
    assert generator.quiet(), "not at every beat"
    net.now += 2.0
    generator.send(wire.Heartbeat((0, 0), {"tuned": 1.0}))
    assert generator.quiet(), "it knows"
    assert net.peer("g1", hello=False).hello().tuned == tuned


def test_what_is_refused_changes_nothing_and_says_why(start, tmp_path):
    net = start()
    operator = net.peer("op", hello=False)
    for request, words in (
        (wire.Tune({"staleness.maxlag": "8"}), "did you mean 'staleness.max_lag'"),
        (wire.Tune({LAG: "two"}), "is no JSON"),
        (wire.Tune({LAG: "2"}), "max_lag=2 is smaller than sync_every - 1 = 3"),
        (wire.Tune({"alarms.command": '["/bin/sh"]'}), "cannot be changed in a running job"),
        (wire.Tune(undo=1), "--undo 1: nothing is tuned"),
        (wire.Tune(undo=-1), "give a number from 1 on"),
        (wire.Tune({LAG: "8"}, 1), "not both"),
    ):
        reply = operator.ask(request)
        assert not reply.ok and words in reply.text, reply
        assert reply.tuned == wire.Tuned()
    assert not (tmp_path / FILE).exists()
    assert tune(operator, {LAG: 16}).text == "nothing to change: staleness.max_lag is 16 already"


def test_tightening_waits_for_the_version_that_the_next_take_needs(start, tmp_path):
    net = start()
    learner, generator, operator = net.learner(), net.peer("g0"), net.peer("op", hello=False)
    publish(learner, 0)
    feed(generator, 4)
    commit(learner, take(learner, 0, 0), 1)
    assert "from update 2 on at the earliest" in tune(operator, {LAG: 0, EVERY: 1}).text
    feed(generator, 8)
    loose = take(learner, 1, 1)
    assert (loose.tuned.seq, loose.coming.seq, loose.bounds) == (0, 1, [1 - 16]), "still the old rules, as a whole"
    commit(learner, loose, 2)
    publish(learner, 2)
    assert net.queue.tally.counters["stale"] == 0
    learner.send(wire.Take(2, 2, 0, 1))
    net.settle()
    assert net.queue.tally.counters["stale"] == 4, "what is too old now leaves the queue"
    feed(generator, 4, 2)
    reply, _ = learner.recv()
    assert (reply.tuned.seq, reply.bounds) == (1, [2])
    assert lines(tmp_path)[-1] == {"seq": 1, "applied_at": 2}


def test_fifty_changes_in_a_row_survive_a_kill_with_their_log(start, tmp_path):
    net = start()
    operator = net.peer("op", hello=False)
    for i in range(50):
        assert tune(operator, {LR: 1e-4 + i * 1e-6}, key=f"k{i}").tuned.seq == i + 1
    # The process is killed behind the snapshot of the last change and within its line of the log.
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-30])
    again = start()
    assert again.queue.knobs.save() == net.queue.knobs.save()
    said = [line for line in TuneLog(tmp_path).lines() if "update" in line]
    assert [line["seq"] for line in said] == list(range(1, 51)), "every change once"
    assert tune(again.peer("op2", hello=False), {LR: 0.5}, key="k49").tuned.seq == 50, "that was done before the kill"


def test_a_restart_with_another_config_drops_what_it_changed(start, tmp_path):
    net = start()
    tune(net.peer("op", hello=False), {LAG: 8, Q: 0.1})
    again = start(algorithm={"groups_per_update": 4, "group_size": 2, "rdc": {"q": 0.3}})
    assert again.queue.knobs.coming.values == {LAG: "8"}
    assert lines(tmp_path)[-1] == {"seq": 1, "dropped": {Q: [0.1, 0.3]}}


def test_two_operators_at_the_same_time(start, tmp_path):
    net = start()
    one, two = net.peer("one", hello=False), net.peer("two", hello=False)
    for i in range(10):
        one.send(wire.Tune({Q: json.dumps(0.1 + i / 100)}, 0, "one", f"a{i}"))
        two.send(wire.Tune({LR: json.dumps(0.001 + i / 1e4)}, 0, "two", f"b{i}"))
    seqs = [peer.recv()[0].tuned.seq for _ in range(10) for peer in (one, two)]
    assert sorted(seqs) == list(range(1, 21))
    assert net.queue.knobs.coming.values == {Q: json.dumps(0.1 + 9 / 100), LR: json.dumps(0.001 + 9 / 1e4)}
    assert [line["seq"] for line in lines(tmp_path)] == list(range(1, 21))


def test_evaluations_follow_and_a_new_run_begins_with_an_empty_log(start, tmp_path):
    net = start(eval={"every": 0})
    learner, generator, operator = net.learner(), net.peer("g0"), net.peer("op", hello=False)
    publish(learner, 0)
    assert net.evals.num_open == 0
    feed(generator, 8)
    tune(operator, {"eval.every": 1})
    for update in (0, 1):
        commit(learner, take(learner, update, update), update + 1)
    publish(learner, 2)
    assert net.evals.num_open == 1
    net.server._tuning.begin()
    assert not (tmp_path / FILE).exists()


def test_the_listing_has_what_is_tuned_first(start):
    net = start()
    operator = net.peer("op", hello=False)
    tune(operator, {LAG: 8})
    text = operator.ask(wire.Tune()).text.splitlines()
    assert text[:3] == [
        "1 changes so far, 0 of them in force", "staleness.max_lag = 8   (config: 16; from the next take on)",
        "can be tuned (as in the config now):",
    ]  # fmt: skip
    assert "  learner.lr = 0.0003" in text and not any("alarms.command =" in line for line in text)


def test_a_reply_can_be_read_after_whatever_was_sent(start):
    net = start()
    operator = net.peer("op", hello=False)
    text = "[" + ",".join(['"log"'] * 10_900) + "]"
    assert len(text) < 2**16
    reply = operator.ask(wire.Tune({"alarms.f_2.actions": text}, 0, "me", "a"))
    assert not reply.ok and reply.tuned == wire.Tuned()
    assert tune(operator, {LAG: 8}).tuned.values == {LAG: "8"}
    assert net.peer("g0", hello=False).hello().tuned.values == {LAG: "8"}


def test_a_log_that_a_crash_of_the_host_damaged_is_gone_on_with(start, tmp_path, caplog):
    net = start()
    operator = net.peer("op", hello=False)
    for i in range(3):
        tune(operator, {LR: 1e-4 + i * 1e-6})
    one, two, three = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    # Blocks that were never written read as NUL; what follows them is whole.
    damaged = [one, b"\0" * 100 + b"\n", b"\xff{not json}\n", b"7\n", b'{"seq": "x", "update": 1}\n', b"\0" * 9 + two]
    (tmp_path / FILE).write_bytes(b"".join(damaged) + b"\0" * 50)
    again = start()
    assert "4 damaged lines" in caplog.text
    assert [line["seq"] for line in TuneLog(tmp_path).lines()] == [1, 2, 3]
    assert tune(again.peer("op2", hello=False), {LR: 0.5}).tuned.seq == 4
    assert json.loads(three)["seq"] == 3
