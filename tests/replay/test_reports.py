"""What replay keeps of the learner's records, and whose it takes."""

import math

import pytest

from asyncrl import wire
from asyncrl.replay.reports import PACE_RECORDS, Reports
from tests.replay.net import publish


@pytest.fixture
def net(make_net):
    return make_net()


def state(peer):
    return peer.ask(wire.Status()).state


def test_the_last_record_is_in_the_state(net):
    learner = net.learner()
    assert (state(learner)["report"], state(learner)["update_s"]) == (None, None)
    publish(learner, 0)
    alarm = wire.AlarmMsg("kl", 3, "kl is high", "lower the lr")
    assert learner.ask(wire.Report(0, {"policy/reward": 0.5}, [alarm], seq=7)) == wire.Ack([], [], 7)
    net.now += 3.0
    assert learner.ask(wire.Report(1, {"policy/reward": 0.25, "x/nan": math.nan}, seq=8)) == wire.Ack([], [], 8)
    found = state(learner)
    assert found["update_s"] == 3.0
    report = found["report"]
    assert (report["update"], report["epoch"], report["alarms"]) == (1, 0, [])
    assert report["values"].pop("policy/reward") == 0.25 and math.isnan(report["values"]["x/nan"])
    assert 0 <= found["time"] - report["time"] < 60


def test_alarms_are_those_of_the_last_record(net):
    learner = net.learner()
    learner.ask(wire.Report(0, {}, [wire.AlarmMsg("kl", 3, "kl is high", "lower the lr")]))
    report = state(learner)["report"]
    assert report["alarms"] == [{"name": "kl", "since": 3, "text": "kl is high", "remedy": "lower the lr"}]


def test_a_record_counts_from_rank_0_of_the_run_epoch_only(net):
    learner, other, generator = net.learner(), net.learner(1), net.peer("g0")
    publish(learner, 4, epoch=1)
    generator.recv()
    other.hello(held=(1, 4))
    said = other.ask(wire.Report(4, {}, epoch=1))
    assert said == wire.Refused("learner-1 may not send Report: rank 0 does, as learner-0")
    assert generator.ask(wire.Report(4, {}, epoch=1)) == wire.Refused("a generator may not send Report")
    assert "a newer learner took over as run epoch 1" in learner.ask(wire.Report(4, {}, epoch=0)).reason
    assert "no version of run epoch 2 was published" in learner.ask(wire.Report(4, {}, epoch=2)).reason
    assert state(learner)["report"] is None
    assert learner.ask(wire.Report(4, {}, epoch=1)) == wire.Ack([], [])
    assert state(learner)["report"]["epoch"] == 1


def test_who_takes_part_and_since_when(net):
    stranger = net.peer("watcher", hello=False)
    assert state(stranger)["learner"] == {"ranks": 0, "seen_s": None}
    learner, _, generator = net.learner(), net.learner(1), net.peer("g0")
    publish(learner, 0)
    net.now += 4.0
    generator.send(wire.Heartbeat((0, 0), {}))
    net.now += 1.0
    found = state(stranger)
    assert found["learner"] == {"ranks": 2, "seen_s": 5.0} and found["uptime_s"] == 5.0
    learner.ask(wire.Status())
    assert state(stranger)["learner"]["seen_s"] == 0.0, "every sign of life counts"
    assert (found["run"], found["total_updates"], found["max_lag"]) == ("", 0, 2)
    assert found["failure"] == found["first_failure"] == ""
    generator.send(wire.Failed("", "", "EngineError: out of memory"))
    while not (found := state(stranger))["first_failure"]:
        pass
    assert found["first_failure"] == "g0: EngineError: out of memory"


def test_the_pace_is_over_the_last_records_and_begins_anew_with_a_learner_that_went_back():
    reports = Reports()
    for update in range(100):
        # Slow at first.
        reports.put(wire.Report(update, {}), update * (10.0 if update < 50 else 2.0))
    assert reports.update_s() == 2.0
    # A batch that was skipped makes a record of the same update.
    reports.put(wire.Report(99, {}), 1000.0)
    assert reports.update_s() == 2.0
    reports.put(wire.Report(90, {}, epoch=1), 1001.0)
    assert reports.update_s() is None
    reports.put(wire.Report(92, {}, epoch=1), 1002.0)
    assert reports.update_s() == 0.5
    assert PACE_RECORDS < 50
