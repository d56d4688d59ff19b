"""The replay server over real sockets, with a clock that the test turns: every message, every refusal."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl import wire
from asyncrl.replay import desk, service
from asyncrl.replay.ledger import State
from asyncrl.types import Group, Version
from tests.replay.net import publish
from tests.replay.support import response


@pytest.fixture
def net(make_net):
    return make_net()


# --- a whole update -----------------------------------------------------------------------------


def test_one_update_from_hello_to_commit(net, tmp_path):
    learner, generator = net.learner(), net.peer("g0", hello=False)
    # The learner may ask before anything is queued, and before a generator exists.
    learner.send(wire.Take(0, 0, 0, 1))
    assert learner.quiet()
    assert generator.hello() == wire.Welcome(0, 0, None)
    assert generator.lease(9) == wire.Leases([], "no_version", 1)
    publish(learner, 0)
    assert generator.recv()[0] == wire.NewVersion(0, 0, "/w/0.0")
    leases = generator.lease(4).leases
    assert [x.attempt for x in leases] == [1] * 4 and leases[0].deadline_s == 60.0
    sent = {x.group_id: generator.group(x) for x in leases}
    for frames in sent.values():
        (group_id,) = [i for i, f in sent.items() if f is frames]
        assert generator.ask(frames) == wire.Ack([group_id], [])
    reply, buffers = learner.recv()
    assert isinstance(reply, wire.TakeReply)
    assert (reply.take_id, reply.ready, reply.batch, reply.bounds) == (0, True, [0] * 4, [-2])
    # The groups come back in the frames that the generator sent, without the kind frame.
    at, got = 0, {}
    for count in reply.frames:
        group = wire.decode_group([b"group", *buffers[at : at + count]])
        got[group.group_id] = [bytes(b) for b in buffers[at : at + count]]
        at += count
    assert got == {i: [bytes(b) for b in f[1:]] for i, f in sent.items()}
    ids = list(got)
    assert learner.ask(wire.Commit(0, 1, "trained", ids, batch=3)) == wire.Ack([], ids)
    assert generator.recv()[0] == wire.Ack([], ids) and generator.quiet()
    lines = [json.loads(x) for x in (tmp_path / "committed.jsonl").read_text().splitlines()]
    line = {"update": 0, "epoch": 0, "generator_id": "g0", "outcome": "trained", "batch": 3}
    assert lines == [line | {"group_id": i} for i in ids]
    # A repeated commit changes nothing.
    assert learner.ask(wire.Commit(0, 1, "trained", ids)) == wire.Ack([], ids)
    assert net.queue.clock.update == 1 and len((tmp_path / "committed.jsonl").read_text().splitlines()) == 4
    state = learner.ask(wire.Status()).state
    assert (state["update"], state["queue_depth"], state["leased"], state["bytes"]) == (1, 0, 0, 0)
    assert state["trained"] == {"count": 8, "length": 32, "reward": 4.0, "lag": 0} and not state["finished"]
    json.dumps(state)


def test_ranks_get_disjoint_shards_and_repeats_are_the_same(make_net):
    net = make_net(groups_per_update=5)
    ranks = [net.learner(r) for r in range(3)]
    publish(ranks[0], 0)
    generator = net.peer("g0")
    for lease in generator.lease(5).leases:
        generator.send(generator.group(lease))
    got = []
    for attempt in range(2):
        for rank, peer in enumerate(ranks):
            reply = peer.ask(wire.Take(3, 0, rank, 3))
            assert isinstance(reply, wire.TakeReply) and reply.ready, attempt
            got.append((reply.batch, reply.frames))
    assert got[:3] == got[3:] and sorted(len(b) for b, _ in got[:3]) == [1, 2, 2]
    # A world larger than the take has empty shards, and asking twice before the answer gives one answer.
    last = ranks[2]
    last.send(wire.Take(3, 0, 7, 8))
    last.send(wire.Take(3, 0, 7, 8))
    reply, buffers = last.recv()
    assert (reply.batch, reply.frames, buffers) == ([], [], []) and reply.ready


def test_a_waiting_rank_hears_what_is_missing(net):
    learner = net.learner()
    publish(learner, 0)
    learner.send(wire.Take(0, 0, 0, 1))
    assert learner.quiet()
    net.now += desk.NOTE_S
    reply, _ = learner.recv()
    assert (reply.ready, reply.take_id) == (False, 0)
    assert reply.waiting == "0 of 4 groups for update 0, 0 leased; newest version 0.0, 0 generators alive"
    assert learner.quiet()
    # The take is still parked.
    generator = net.peer("g0")
    for lease in generator.lease(4).leases:
        generator.send(generator.group(lease))
    assert learner.recv()[0].ready


def test_a_take_that_makes_no_sense_is_refused(net):
    learner = net.learner()
    publish(learner, 0)
    generator = net.peer("g0")
    assert isinstance(learner.ask(wire.Take(0, 0, 2, 2)), wire.Refused)
    for lease in generator.lease(4).leases:
        generator.send(generator.group(lease))
    assert learner.ask(wire.Take(0, 0, 0, 1)).ready
    refused = learner.ask(wire.Take(0, 5, 0, 1))
    assert refused == wire.Refused("take 0 for update 5, the clock is at 0")
    assert isinstance(learner.ask(wire.Commit(0, 1, "perhaps", [])), wire.Refused)
    assert isinstance(learner.ask(wire.Published(0, -1, "")), wire.Refused)


# --- who may take part --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 7}, ["schema 7", f"schema {wire.SCHEMA}"]),
        ({"layers": [1, 2]}, ["[1, 2]", "[0, 1]", "model.path"]),
        ({"num_experts": 16}, ["16", "8", "experts"]),
        ({"top_k": 4}, ["4", "2", "generator.model"]),
        ({"vocab_size": 33}, ["33", "32"]),
        ({"fingerprint": "beef"}, ["beef", "f00d"]),
        ({"role": "tourist"}, ["tourist"]),
        ({"peer_id": ""}, ["peer id"]),
    ],
)
def test_hello_is_refused_naming_both_sides(net, changes, words):
    peer = net.peer("g0", hello=False)
    reply = peer.hello(**changes)
    assert isinstance(reply, wire.Refused) and all(w in reply.reason for w in words), reply
    assert net.counters["refused_peer"] == 1 and net.server.peers.generators == {}


def test_hello_of_another_schema_is_answered_although_it_does_not_decode(net):
    peer = net.peer("g0", hello=False)
    reply = peer.ask([b"msg", msgspec.msgpack.encode(["hello", 99, {"all": "different"}])])
    assert isinstance(reply, wire.Refused) and "schema 99" in reply.reason


def test_a_peer_without_fingerprint_is_welcome(net):
    assert isinstance(net.peer("g0", hello=False).hello(fingerprint=""), wire.Welcome)


def test_strangers_and_wrong_roles_are_refused(net):
    stranger = net.peer("x", hello=False)
    assert stranger.ask(wire.LeaseRequest((0, 0), 1)) == wire.Rejoin()
    assert stranger.ask([b"group", b"\x90"]) == wire.Rejoin()
    generator, learner = net.peer("g0"), net.learner()
    assert "may not send Commit" in generator.ask(wire.Commit(0, 9, "trained", [])).reason
    assert "may not send LeaseRequest" in learner.ask(wire.LeaseRequest((0, 0), 1)).reason
    assert "generators" in learner.ask([b"group", b"\x90"]).reason
    assert net.queue.clock.update == 0 and net.counters["no_hello"] == 2 and net.counters["bad_request"] == 3
    # Anyone may ask for the state.
    assert isinstance(stranger.ask(wire.Status()), wire.StatusReply)


# --- generators come and go ---------------------------------------------------------------------


def test_a_silent_generator_is_dead_until_it_speaks(net):
    learner, a, b = net.learner(), net.peer("g0"), net.peer("g1")
    publish(learner, 0)
    first = a.recv()[0], a.lease(2).leases
    b.recv()
    net.now += 14.0
    b.send(wire.Heartbeat((0, 0), {"tokens": 5.0}, [(1.0, 2.0)]))
    assert b.quiet() and net.server.peers.num_alive == 2
    net.now += 2.0
    assert b.quiet() and net.server.peers.num_alive == 1
    assert net.counters["dead_generator"] == 2 and net.queue.ledger.count(State.PENDING) == 2
    again = b.lease(2).leases
    assert [(x.group_id, x.attempt) for x in again] == [(x.group_id, 2) for x in first[1]]
    # It was only slow: its result still counts, and the second generator may stop.
    ack = a.ask(a.group(first[1][0]))
    assert ack == wire.Ack([again[0].group_id], [])
    assert b.recv()[0] == wire.Cancel([again[0].lease_id])
    state = learner.ask(wire.Status()).state["generators"]
    said = {"held": [0, 0], "alive": True, "gauges": {"tokens": 5.0}, "busy": [[1.0, 2.0]], "seen_s": 0.0}
    assert state["g0"]["alive"] and state["g1"] == state["g1"] | said


def test_a_restarted_generator_gives_its_leases_up_at_once(net):
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    generator.lease(3)
    # The same boot says Hello again after a silence: nothing is lost.
    assert generator.hello("b0") == wire.Welcome(0, 0, (0, 0, "/w/0.0"))
    assert net.queue.ledger.count(State.LEASED) == 3
    generator.hello("b1")
    assert net.queue.ledger.count(State.PENDING) == 3 and net.counters["restarted_generator"] == 3


def test_expired_and_failed_leases(net):
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    a, _ = generator.lease(2).leases
    generator.send(wire.Failed(a.lease_id, a.group_id, "RouteError: 5 rows"))
    generator.send(wire.Failed(a.lease_id, a.group_id, "again"))
    assert generator.quiet() and net.counters["failed_routeerror"] == 1 and net.counters["late_failure"] == 1
    net.now += 14.0
    for _ in range(5):
        generator.send(wire.Heartbeat((0, 0), {}))
        assert generator.quiet()
        net.now += 10.0
    generator.send(wire.Heartbeat((0, 0), {}))
    assert generator.quiet()
    assert net.counters["lease_expired"] == 1 and net.server.peers.num_alive == 1


def test_leases_that_cannot_be_delivered_are_taken_back(net):
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    generator.send(wire.LeaseRequest((0, 0), 3))
    for _ in range(100):
        if net.server.socket._socket.poll(10):
            break
    net.lose(generator)
    for _ in range(5):
        net.server.step(0.01)
    assert net.queue.ledger.count(State.LEASED) == 0 and net.queue.ledger.count(State.PENDING) == 3


def test_a_late_joiner_gets_the_newest_version_and_a_deaf_one_is_told_again(net):
    # B44 (b): no announcement is needed to have the version.
    learner = net.learner()
    publish(learner, 0)
    publish(learner, 4)
    generator = net.peer("g0", hello=False)
    assert generator.hello() == wire.Welcome(0, 4, (0, 4, "/w/0.4"))
    generator.send(wire.Heartbeat((0, 0), {}))
    assert generator.recv()[0] == wire.NewVersion(0, 4, "/w/0.4")
    generator.send(wire.Heartbeat((0, 0), {}))
    assert generator.quiet()
    net.now += service.TELL_S
    assert isinstance(generator.ask(wire.LeaseRequest((0, 0), 1)), wire.Leases)
    assert generator.recv()[0] == wire.NewVersion(0, 4, "/w/0.4")
    # A version that is not newer changes nothing and is acknowledged.
    publish(learner, 4)
    publish(learner, 2)
    assert generator.quiet() and net.queue.clock.newest == Version(0, 4)


def test_resolved_groups_are_told_when_the_sender_is_back(net):
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    leases = generator.lease(4).leases
    for lease in leases:
        generator.ask(generator.group(lease))
    learner.ask(wire.Take(0, 0, 0, 1))
    net.lose(generator)
    ids = [x.group_id for x in leases]
    learner.ask(wire.Commit(0, 1, "trained", ids))
    back = net.peer("g0", hello=False)
    back.hello("b0")
    assert back.recv()[0] == wire.Ack([], ids) and back.quiet()


# --- evaluations and the end --------------------------------------------------------------------


def test_evaluation_leases_come_first_and_fill_rows(make_net):
    net = make_net(every=20)
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    # 3 sampled and 3 greedy responses take 6 of 10 rows; 4 rows are 2 groups of 2.
    leases = generator.lease(5, rows=10).leases
    assert [bool(x.eval_id) for x in leases] == [True] * 6 + [False] * 2
    assert [x.greedy for x in leases[:6]] == [False] * 3 + [True] * 3 and {x.eval_id for x in leases[:6]} == {"0.0"}
    for x in leases[:6]:
        answer = wire.EvalAnswer(x.prompt.prompt_id, x.sample, x.greedy, float(x.greedy), 3, "stop")
        generator.send(wire.EvalResult(x.eval_id, (0, 0), [answer]))
    assert generator.quiet()
    (result,) = learner.ask(wire.Status()).state["evaluations"]
    assert (result["version"], result["count"]) == (0, 6)
    assert (result["sampled_accuracy"], result["greedy_accuracy"]) == (0.0, 1.0)
    assert "never published" in generator.ask(wire.EvalResult("0.0", (0, 3), [])).reason


def test_without_rows_an_evaluation_lease_counts_as_one_of_want(make_net):
    net = make_net(every=20)
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    assert [bool(x.eval_id) for x in generator.lease(8).leases] == [True] * 6 + [False] * 2


def test_done_evaluates_the_last_version_then_stops_everyone(make_net):
    net = make_net(every=20)
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    first = generator.lease(8).leases
    publish(learner, 4)
    generator.recv()
    learner.ask(wire.Done(4))
    assert learner.ask(wire.Done(4)) == wire.Ack([], [])
    # Training leases are void, evaluations go on.
    assert generator.recv()[0] == wire.Cancel([x.lease_id for x in first if not x.eval_id])
    for lease in [x for x in first if x.eval_id]:
        answer = wire.EvalAnswer(lease.prompt.prompt_id, lease.sample, lease.greedy, 0.0, 3, "stop")
        generator.send(wire.EvalResult(lease.eval_id, (0, 0), [answer]))
    assert generator.quiet() and not learner.ask(wire.Status()).state["finished"]
    last = generator.lease(50, update=4)
    assert [x.eval_id for x in last.leases] == ["0.4"] * 6 and last.idle == "done"
    assert learner.ask(wire.Status()).state["measuring"] == [[0, 4]]
    for lease in last.leases:
        answer = wire.EvalAnswer(lease.prompt.prompt_id, lease.sample, lease.greedy, 1.0, 3, "stop")
        generator.send(wire.EvalResult(lease.eval_id, (0, 4), [answer]))
    assert generator.quiet()
    # Not before the learner has the result.
    net.now += 1.0
    assert generator.quiet()
    state = learner.ask(wire.Status()).state
    assert state["finished"] and [e["sampled_accuracy"] for e in state["evaluations"]] == [0.0, 1.0]
    assert state["measuring"] == []
    net.now += 1.0
    assert generator.recv()[0] == wire.Stop("the run is over") and not net.server.over
    assert generator.ask(wire.LeaseRequest((0, 4), 1)) == wire.Stop("the run is over")
    net.now += service.LEAVE_S
    assert net.server.over


def test_the_end_comes_even_if_nobody_serves_or_fetches(make_net):
    net = make_net(every=20)
    learner = net.learner()
    publish(learner, 0)
    learner.ask(wire.Done(0))
    net.now += 30.0
    assert learner.quiet() and net.server.finished
    for seconds in (service.FETCH_S + 1, service.LEAVE_S):
        net.now += seconds
        assert learner.quiet()
    assert net.server.over


# --- malformed input ----------------------------------------------------------------------------


def test_malformed_input_is_counted_and_serving_goes_on(net, tmp_path):
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    (lease,) = generator.lease(1).leases
    good = generator.group(lease)
    target = tmp_path / "owned"

    class Evil:
        def __reduce__(self):
            return Path.touch, (target,)

    header = msgspec.msgpack.decode(bytes(good[1]))
    huge = json.loads(json.dumps(header))
    huge[7][0][4][0] = ["int32", [2**40]]
    bad = [
        [b""],
        [b"", b""],
        [b"msg"],
        [b"msg", b""],
        [b"msg", pickle.dumps(Evil())],
        [pickle.dumps(Evil()), b""],
        [b"msg", wire.encode(wire.Heartbeat((0, 0), {}))[1][:-3]],
        [b"group", b""],
        [b"group", good[1][:-5], *good[2:]],
        good[:-1],
        [*good, b"more"],
        [*good[:2], good[2][:-1], *good[3:]],
        [b"group", msgspec.msgpack.encode(huge), *good[2:]],
        [b"group", msgspec.msgpack.encode([wire.SCHEMA + 1, *header[1:]]), *good[2:]],
        [b"msg", msgspec.msgpack.encode(["lease", [0, 0], "many"])],
        [b"msg", msgspec.msgpack.encode(["nonsense", 1])],
    ]
    for frames in bad:
        generator.send(frames)
    assert generator.quiet() and not target.exists()
    assert net.counters["malformed"] == len(bad)
    assert generator.ask(good) == wire.Ack([lease.group_id], [])


def test_negative_and_absurd_numbers_are_harmless(net):
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    assert generator.lease(-5).leases == [] and len(generator.lease(2**62).leases) == 12
    assert generator.lease(1, update=-7).idle == "version_too_old"
    assert generator.lease(1, update=2**62).idle == "unknown_version"
    generator.send(wire.Heartbeat((0, 0), {"x": float("nan")}))
    generator.send(wire.EvalResult("no such", (0, 0), [wire.EvalAnswer("e0", 0, False, 1.0, 1, "stop")]))
    assert generator.quiet()
    assert isinstance(learner.ask(wire.Commit(99, 2**40, "trained", ["0/p1", "x"])), wire.Refused)
    assert net.queue.clock.update == 0 and net.counters["bad_request"] == 1


def test_refused_groups_are_acknowledged_as_void_or_resolved(net):
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    (lease,) = generator.lease(1).leases
    # B31: sampled under a version that was never published.
    assert generator.ask(generator.group(lease, update=12)) == wire.Ack([], [], 0, [lease.lease_id])
    assert net.counters["future_version"] == 1
    lease.group_id = "0/other"
    assert generator.ask(generator.group(lease)) == wire.Ack([], ["0/other"])


def test_large_frames_are_handed_on_without_change(make_net):
    net = make_net(groups_per_update=1)
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    (lease,) = generator.lease(1).leases
    frames = generator.group(lease, tokens=50_000)
    assert generator.ask(frames) == wire.Ack([lease.group_id], [])
    (entry,) = net.queue.ledger.of_state(State.QUEUED)
    assert any(isinstance(b, memoryview) for b in entry.payload)
    learner.send(wire.Take(0, 0, 0, 1))
    reply, buffers = learner.recv()
    group = wire.decode_group([b"group", *buffers])
    assert reply.frames == [len(buffers)] and group.num_tokens == 100_000
    np.testing.assert_array_equal(group.trajectories[1].token_ids, np.arange(50_000) % 32)


# --- memory ---------------------------------------------------------------------------------------


def test_a_group_without_room_is_held_and_asked_for_when_there_is(make_net):
    net = make_net(capacity_bytes=4 * 1000, max_lag=8)
    learner, g = net.learner(), net.peer("g0")
    publish(learner, 0)
    g.recv()
    # Nothing large was seen yet, so that more is leased than fits.
    groups = [g.group(x, tokens=30) for x in g.lease(6).leases]
    size = sum(len(f) for f in groups[0])
    net.queue.ledger.largest_bytes = 0
    fits = 4000 // size
    groups += [g.group(x, tokens=30) for x in g.lease(8).leases]
    answers = [g.ask(x) for x in groups]
    assert all(isinstance(a, wire.Ack) and a.admitted for a in answers[:fits])
    assert all(isinstance(a, wire.Hold) for a in answers[fits:]) and len(answers) > fits
    state = learner.ask(wire.Status()).state
    assert state["kept"] == len(answers) - fits and state["peak_bytes"] == state["bytes"] <= 4000
    take = learner.ask(wire.Take(0, 0, 0, 1))
    assert take.ready
    ids = [i for b in net.queue._takes.by_id[0].batches for i in b]
    learner.send(wire.Commit(0, 1, "trained", ids))
    asked, resolved = [], []
    for _ in range(300):
        net.now += 0.1
        net.server.step(0.01)
        frames = g.client.recv(0)
        message = wire.decode(frames) if frames is not None else None
        asked += message.group_ids if isinstance(message, wire.Send) else []
        resolved += message.resolved if isinstance(message, wire.Ack) else []
        if len(asked) == len(resolved) == 4:
            break
    assert asked == [wire.decode_group(x).group_id for x in groups[fits : fits + 4]]
    assert g.ask(groups[fits]) == wire.Ack(asked[:1], [])
    assert net.counters["no_room"] == len(answers) - fits and not net.queue.tally.dropped


def test_prompts_that_were_given_up_are_named_in_the_state(make_net, caplog):
    net = make_net(max_attempts=1)
    learner, g = net.learner(), net.peer("g0")
    publish(learner, 0)
    g.recv()
    (lease,) = g.lease(1).leases
    g.send(wire.Failed(lease.lease_id, lease.group_id, "timeout: 3 of 8 responses were sampled within 1.6 s"))
    assert g.quiet()
    state = learner.ask(wire.Status()).state
    assert state["dropped"] == [[lease.group_id, "max_attempts"]]
    assert state["counters"]["failed_timeout"] == state["counters"]["max_attempts"] == 1
    assert lease.group_id in caplog.text


@pytest.mark.parametrize(("on_timeout", "num_partial"), [("reissue", 0), ("partial", 1)])
def test_a_group_of_fewer_responses_is_taken_and_counted_unless_only_one_is_left(make_net, on_timeout, num_partial):
    net = make_net(on_timeout=on_timeout, group_size=3)
    learner, g = net.learner(), net.peer("g0")
    publish(learner, 0)
    g.recv()
    for count, lease in enumerate(g.lease(4).leases, start=1):
        responses = tuple(response(f"{lease.lease_id}.{i}", [(0, 4)], float(i)) for i in range(count))
        group = Group(lease.group_id, wire.prompt_from_msg(lease.prompt), "g0", lease.attempt, 1.0, responses)
        reply = g.ask(wire.encode_group(group))
        assert (reply.admitted == [lease.group_id]) == (count in (2, 3))
    # Of 1, 2, 3 and 4 responses: one is no group, and four are more than were asked for.
    assert (net.counters["group_size"], net.counters["short_groups"]) == (2, 1)
    assert net.counters["partial"] == num_partial
