"""Over real sockets: who may take part, who gives way to whom, and how everybody hears that the run cannot go on."""

import subprocess
import sys

import pytest

from asyncrl import wire
from asyncrl.config import validate
from asyncrl.errors import RunError, TransportError
from asyncrl.learner.client import ReplayClient
from asyncrl.models.describe import describe
from asyncrl.replay import server as module
from asyncrl.replay.ledger import State
from asyncrl.replay.peers import objection
from asyncrl.replay.server import only_one
from tests.replay.net import publish
from tests.replay.test_process import make_config
from tests.replay.test_restart_process import Replay

HELD = """
import sys, time
from pathlib import Path
from asyncrl.replay.server import only_one
with only_one(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


# --- the watchdog ------------------------------------------------------------------------------


def test_a_run_whose_leases_all_fail_ends_with_the_first_reason_for_everybody(make_net):
    net = make_net(watchdog_s=20.0)
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    learner.send(wire.Take(0, 0, 0, 1))
    for second in range(20):
        assert net.server.failure == ""
        (lease,) = generator.lease(1).leases
        reason = f"TaskError: verifier {second} is broken"
        generator.send(wire.Failed(lease.lease_id, lease.group_id, reason))
        learner.send(wire.Take(0, 0, 0, 1))
        assert generator.quiet()
        net.now += 1.0
    net.settle()
    assert net.server.failure.endswith("first cause: g0: TaskError: verifier 0 is broken")
    stop = wire.Stop(net.server.failure)
    heard = [learner.recv()[0]]
    while not isinstance(heard[-1], wire.Stop):
        heard.append(learner.recv()[0])
    # What the learner waits for names the first failure, long before the end.
    assert "first failure: g0: TaskError: verifier 0 is broken" in heard[0].waiting
    assert heard[-1] == stop and generator.recv()[0] == stop
    # Whoever speaks after that hears it as well, and nothing is committed any more.
    assert learner.ask(wire.Commit(0, 1, "trained", [])) == stop
    assert generator.ask(wire.LeaseRequest((0, 0), 1)) == stop
    assert not net.server.over
    net.now += 6.0
    assert net.server.over and not net.server.finished


def test_a_generators_own_error_is_the_cause_when_all_are_gone(make_net):
    net = make_net(watchdog_s=30.0)
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    generator.send(wire.Failed("", "", "EngineError: out of memory"))
    assert generator.quiet() and net.counters["generator_engineerror"] == 1
    for _ in range(31):
        learner.send(wire.Take(0, 0, 0, 1))
        net.now += 1.0
        net.settle()
    assert "every generator is gone" in net.server.failure
    assert net.server.failure.endswith("first cause: g0: EngineError: out of memory")


def test_a_slow_fleet_and_a_learner_in_a_long_step_only_warn(make_net, caplog):
    net = make_net(watchdog_s=20.0, lease_timeout_s=500.0)
    learner, generator = net.learner(), net.peer("g0")
    publish(learner, 0)
    generator.recv()
    assert len(generator.lease(2).leases) == 2
    for second in range(45):
        if second < 25:
            learner.send(wire.Take(0, 0, 0, 1))
        generator.send(wire.Heartbeat((0, 0), {"tokens": float(second)}))
        net.now += 1.0
        net.settle()
    assert net.server.failure == ""
    warned = [r.getMessage() for r in caplog.records if "nothing was achieved" in r.getMessage()]
    assert len(warned) == 2
    assert "0 of 4 groups for update 0" in warned[0] and "2 leases running" in warned[0]
    assert "the learner has not asked for groups" in warned[1]


# --- two of one name ---------------------------------------------------------------------------


def test_of_two_generators_with_one_id_the_newer_stays_and_the_older_is_told(make_net):
    net = make_net()
    learner, old = net.learner(), net.peer("g0", hello=False, identity="g0|old")
    publish(learner, 0)
    old.hello("old", held=(0, 0))
    assert len(old.lease(3).leases) == 3
    new = net.peer("g0", hello=False, identity="g0|new")
    assert isinstance(new.hello("new", held=(0, 0)), wire.Welcome)
    told = wire.Refused("another generator joined as g0; give each its own --id")
    assert old.recv()[0] == told
    # What the older one sampled is leased again; it cannot come back, whatever it sends.
    assert net.queue.ledger.count(State.PENDING) == 3
    assert isinstance(old.ask(wire.LeaseRequest((0, 0), 1)), wire.Rejoin)
    assert old.hello("old", held=(0, 0)) == told
    assert len(new.lease(3).leases) == 3 and new.quiet()
    assert net.queue.ledger.count(State.LEASED) == 3


def test_a_learner_that_comes_back_after_its_successor_commits_and_publishes_nothing(make_net):
    net = make_net()
    old = net.peer("learner-0", "learner", hello=False, identity="learner-0-old")
    old.hello("old")
    publish(old, 0)
    new = net.peer("learner-0", "learner", hello=False, identity="learner-0-new")
    assert isinstance(new.hello("new"), wire.Welcome)
    assert "another learner joined this run as learner-0" in old.recv()[0].reason
    assert isinstance(old.ask(wire.Published(0, 4, "/w/4")), wire.Rejoin)
    assert isinstance(old.ask(wire.Commit(0, 9, "trained", [])), wire.Rejoin)
    assert "another learner joined" in old.hello("old").reason
    assert (net.queue.clock.update, net.queue.clock.newest) == (0, (0, 0))
    publish(new, 4)


# --- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["generator", "learner"])
def test_a_peer_with_another_setting_is_refused_with_key_values_and_remedy(make_net, role):
    net = make_net(settings={"sampling.temperature": "1.0", "run.seed": "3"})
    peer = net.peer("x", role, hello=False)
    reply = peer.hello(settings={"sampling.temperature": "0.7", "run.seed": "3"})
    assert isinstance(reply, wire.Refused)
    assert "has sampling.temperature=0.7, replay has sampling.temperature=1.0; start every role" in reply.reason
    assert net.counters["refused_peer"] == 1
    assert isinstance(peer.hello(settings={"sampling.temperature": "1.0", "run.seed": "3"}), wire.Welcome)


def test_roles_send_and_check_the_settings_of_their_config(tmp_path):
    config = make_config(tmp_path)
    info, file = describe(config.model.path), config.run_dir / "replay.address"
    replay = Replay(config)
    try:
        other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 9})})
        with pytest.raises(TransportError, match=r"run\.seed=9, replay has run\.seed=0"):
            ReplayClient(file, 0, info, 60.0, None, other.shared_settings())
        ReplayClient(file, 0, info, 60.0, None, config.shared_settings()).close()
    finally:
        replay.kill()


def test_settings_of_any_length_fit_into_a_hello_and_differ_when_they_do():
    def told(last):
        train = [{"path": f"{i}.jsonl", "template": "Think. " * 100 + "{question}"} for i in range(63)]
        task = {"name": "sources", "train": [*train, {"path": last}], "eval": [{"path": "test.jsonl"}]}
        return validate({"model": {"path": "m"}, "task": task}).shared_settings()

    ours, theirs = told("a.jsonl"), told("b.jsonl")
    for settings in (ours, theirs):
        hello = wire.Hello(wire.SCHEMA, "generator", "g", "b", [0], 8, 2, 32, "f", settings=settings)
        assert wire.decode(wire.encode(hello)) == hello
    assert [key for key in ours if ours[key] != theirs[key]] == ["task.train"]
    reason = objection(hello, None, ours)
    assert "g has task.train=[{" in reason and len(wire.decode(wire.encode(wire.Refused(reason))).reason) < 2**16


def test_roles_agree_on_what_a_cut_off_response_costs(tmp_path):
    config = make_config(tmp_path)
    for change in ({"truncated": "penalise"}, {"truncated_penalty": 0.5}, {"overlong_buffer": 1}):
        other = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=change)})
        assert other.shared_settings() != config.shared_settings()


# --- one replay in a folder --------------------------------------------------------------------


def test_a_second_replay_in_a_folder_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HELD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"another replay serves the run folder {tmp_path}"), only_one(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait(20)
        holder.stdout.close()
    with only_one(tmp_path):
        assert (tmp_path / module.LOCK).exists()
