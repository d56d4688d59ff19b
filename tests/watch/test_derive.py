"""Numbers of `asyncrl status` from literal states."""

import math

import pytest

from asyncrl.watch.derive import derive, phase
from tests.watch.states import RECORD, empty, full, generator


def test_the_numbers_of_a_running_run():
    d = derive(full())
    assert d["phase"] == "running" and d["well"] and d["since_s"] is None
    # 63 updates are left, each took 0.92 s.
    assert d["updates"] == {"done": 57, "total": 120, "seconds_each": 0.92, "eta_s": pytest.approx(57.96)}
    assert d["lag"] == {"mean": 3.25, "p90": 6.0, "max": 7.0, "limit": 8}
    assert d["record_age_s"] == 2.0
    assert d["accuracy"] == {
        "sampled": 0.81, "greedy": 0.84, "version": 40, "count": 800, "status": None, "sets": {},
    }  # fmt: skip
    assert d["learning"]["reward"] == 0.7421875 and d["learning"]["skipped_updates"] is None
    assert d["dropped"] == {"lease_expired": 1, "stale": 12}
    assert d["idle"]["learner"] == {"few_groups": 0.2, "other": 0.088}


def test_without_an_earlier_look_rates_are_those_of_the_last_record():
    d = derive(full())
    assert list(d["generators"]) == ["g0", "g2", "g10"]
    assert [g["tokens_per_s"] for g in d["generators"].values()] == [4900.0, 5100.0, None]
    # g2 is dead, and of g10 the record knows nothing.
    assert d["tokens_per_s"] == {"generators": 4900.0, "learner": 5210.4}
    assert d["busy"] == {"generators": 0.5, "learner": 0.712}
    # 10 refusals for one reason and 2 for another since the record.
    assert d["idle"]["generators"] == {"ahead_full": pytest.approx(10 / 12), "version_too_old": pytest.approx(2 / 12)}
    assert d["idle"]["generators_over"] == "the last record"


def test_rates_since_an_earlier_look_are_by_the_generators_own_clock():
    before = full(
        time=990.0, generators={"g0": generator(gauges={"tokens": 400.0, "busy_s": 2.0, "time": 96.0})},
        idle={"ahead_full": 97, "version_too_old": 9},
    )  # fmt: skip
    d = derive(full(), before)
    assert d["since_s"] == 10.0
    assert (d["generators"]["g0"]["tokens_per_s"], d["generators"]["g0"]["busy"]) == (150.0, 0.75)
    assert d["generators"]["g10"]["tokens_per_s"] is None, "it was not there before"
    assert d["idle"]["generators"] == {"ahead_full": 0.75, "version_too_old": 0.25}
    assert d["idle"]["generators_over"] == "the last look"


@pytest.mark.parametrize("gauges", [{"tokens": 2000.0, "time": 90.0}, {"tokens": 900.0, "time": 99.8}])
def test_a_process_that_began_anew_or_did_not_beat_since_has_the_rate_of_the_record(gauges):
    d = derive(full(), full(time=990.0, generators={"g0": generator(gauges=gauges)}))
    assert d["generators"]["g0"]["tokens_per_s"] == 4900.0


def test_idle_reasons_are_over_the_whole_run_when_nothing_was_refused_since():
    d = derive(full(idle={"ahead_full": 90, "version_too_old": 8}))
    assert d["idle"]["generators_over"] == "the start"
    assert d["idle"]["generators"]["ahead_full"] == pytest.approx(90 / 98)


def test_how_far_a_generator_is_behind_is_known_within_its_run_epoch_only():
    d = derive(
        full(newest=[1, 56], generators={"a": generator(held=[1, 48]), "b": generator(), "c": generator(held=None)})
    )
    assert [g["behind"] for g in d["generators"].values()] == [8, None, None]


def test_a_run_that_has_no_record_yet_has_no_numbers():
    d = derive(empty())
    assert d["updates"] == {"done": 0, "total": 120, "seconds_each": None, "eta_s": None}
    assert d["lag"] == {"mean": None, "p90": None, "max": None, "limit": 8}
    assert d["tokens_per_s"] == d["busy"] == {"generators": None, "learner": None}
    assert d["accuracy"] is None and d["alarms"] == [] and d["record_age_s"] is None
    assert d["idle"] == {"generators": {}, "generators_over": "", "learner": {}}


def test_a_run_without_an_end_has_no_time_to_go_and_a_finished_one_none_left():
    assert derive(full(total_updates=0))["updates"] == {"done": 57, "total": None, "seconds_each": 0.92, "eta_s": None}
    assert derive(full(update=120))["updates"]["eta_s"] == 0.0


@pytest.mark.parametrize(("state", "words", "well"), [
    (empty(), "waiting for the learner", True),
    (empty(learner={"ranks": 1, "seen_s": 0.1}), "starting: no version is published yet", True),
    (full(generators={}), "waiting for the first generator", True),
    (full(generators={"g0": generator(alive=False)}), "no generator is alive", False),
    (full(learner={"ranks": 1, "seen_s": 29.0}), "running", True),
    (full(learner={"ranks": 1, "seen_s": 31.0}),
     "silent: the learner was not heard for 31 s (a long step, or it is gone)", False),
    # Five updates of this run take 50 s.
    (full(update_s=10.0, learner={"ranks": 1, "seen_s": 49.0}), "running", True),
    (full(closed=True), "made its last update; an evaluation is open", True),
    (full(closed=True, finished=True, learner={"ranks": 1, "seen_s": 99.0}), "finished", True),
    (full(failure="no generator joined"), "failed: no generator joined", False),
])  # fmt: skip
def test_what_a_run_is_doing(state, words, well):
    assert phase(state) == words
    assert derive(state)["well"] is well


def test_a_paused_run_says_so_and_has_no_time_to_go():
    state = full()
    assert derive(state)["updates"]["eta_s"] is not None
    state["tuned"] = {
        "seq": 1,
        "in_force": 1,
        "values": {"weights.paused": "true"},
        "config": {"weights.paused": "false"},
    }
    d = derive(state)
    assert d["phase"].startswith("paused: no version is published; asyncrl tune RUN weights.paused=false")
    assert d["updates"]["eta_s"] is None and d["updates"]["done"] == state["update"]


def test_live_settings_stand_beside_those_of_the_config():
    values = {"staleness.max_lag": "4", "algorithm.rdc.mode": '"observe"'}
    config = {"staleness.max_lag": "8", "algorithm.rdc.mode": '"filter"'}
    d = derive(full(tuned={"seq": 3, "in_force": 3, "values": values, "config": config}))
    assert d["settings"] == {
        "algorithm.rdc.mode": {"value": "observe", "config": "filter"}, "staleness.max_lag": {"value": 4, "config": 8},
    }  # fmt: skip


def test_a_number_that_is_not_finite_stays_what_it_is():
    values = RECORD | {"mismatch/kl_k3": math.nan}
    d = derive(full(report={"update": 56, "epoch": 0, "values": values, "time": 998.0, "alarms": []}))
    assert math.isnan(d["learning"]["kl_k3"])
