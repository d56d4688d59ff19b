"""From cumulative counters of replay's state to metrics."""

import pytest

from asyncrl.learner.fleet import FleetRates


def state(**load_failures):
    generators = {
        name: {"alive": True, "gauges": {"load_failures": n, "time": 1.0}, "held": (0, 1)}
        for name, n in load_failures.items()
    }
    return {"queue_depth": 0, "leased": 0, "bytes": 0, "counters": {}, "idle": {}, "generators": generators}


def test_failed_loads_are_those_of_all_generators_and_survive_their_restarts():
    rates = FleetRates()
    counted = [
        rates.scalars(state(**failures), 1.0)["generator/failed_loads"]
        for failures in ({"g0": 0, "g1": 0}, {"g0": 0, "g1": 2}, {"g0": 1, "g1": 3}, {"g0": 1, "g1": 0}, {"g1": 1})
    ]
    # 2, then 1 each; g1 starts again at 0 and fails once more.
    assert counted == [0, 2, 4, 4, 5]


def test_failed_verifiers_are_counted_over_the_fleet_and_survive_restarts_of_generators():
    rates = FleetRates()

    def fleet(**errors):
        made = state(**dict.fromkeys(errors, 0))
        for name, n in errors.items():
            made["generators"][name]["gauges"] |= {"verifier_errors": n, "verifier_timeouts": 2 * n}
        return made

    seen = [rates.scalars(fleet(**errors), 1.0) for errors in ({"g0": 1, "g1": 2}, {"g0": 1, "g1": 0}, {"g0": 4})]
    assert [s["verifier/errors"] for s in seen] == [3, 3, 6]
    assert [s["verifier/timeouts"] for s in seen] == [6, 6, 12]
    assert seen[0]["verifier/restarts"] == 0 and seen[2]["generator/g0/verifier_errors"] == 4


def test_counters_are_also_given_as_what_came_since_the_record_before():
    rates = FleetRates()
    first = rates.scalars({**state(), "counters": {"stale": 5}, "idle": {"capacity": 7}}, 1.0)
    assert not [name for name in first if name.startswith(("replay/dropped_now/", "replay/refused_per_s/"))]
    second = rates.scalars({**state(), "counters": {"stale": 8, "duplicate": 1}, "idle": {"capacity": 17}}, 4.0)
    assert second["replay/dropped_now/stale"] == 3 and second["replay/dropped_now/duplicate"] == 1
    assert second["replay/dropped_now/overtaken"] == 0  # none, and not nothing
    assert second["replay/refused_per_s/capacity"] == 2.5 and second["replay/dropped/stale"] == 8
    # A replay that was started again counts from an older snapshot.
    third = rates.scalars({**state(), "counters": {"stale": 6}, "idle": {"capacity": 17}}, 1.0)
    assert third["replay/dropped_now/stale"] == 0 and third["replay/refused_per_s/capacity"] == 0


def test_a_learner_that_was_started_again_does_not_count_what_was_before_it():
    rates = FleetRates()
    rates.begin({**state(), "counters": {"stale": 100}, "idle": {"capacity": 50}, "take_waits": {"groups": 9.0}})
    out = rates.scalars({**state(), "counters": {"stale": 101}, "idle": {"capacity": 52}}, 1.0)
    assert out["replay/dropped_now/stale"] == 1 and out["replay/refused_per_s/capacity"] == 2
    assert rates.since("take_waits", {"groups": 9.5, "version": 1.0}) == {"groups": 0.5, "version": 1.0}


def test_the_idle_time_of_living_generators_is_averaged_and_adds_up_with_their_busy_time():
    rates = FleetRates()

    def beat(at, busy, load, tokens):
        return {"time": at, "busy_s": busy, "load_s": load, "tokens": tokens}

    def fleet(at, idle, *gauges):
        made = {
            f"g{i}": {"alive": i < 2, "held": (0, 4 * i), "failures": i, "gauges": beat(at, *g)}
            for i, g in enumerate(gauges)
        }
        return {**state(), "generators": made, "idle": idle}

    rates.scalars(fleet(0.0, {"ahead_full": 0}, (0, 0, 0), (0, 0, 0), (0, 0, 0)), 10.0)
    out = rates.scalars(fleet(10.0, {"ahead_full": 3}, (8, 1, 1000), (4, 0, 3000), (0, 0, 0)), 10.0)
    assert out["throughput/generator_busy_fraction"] == pytest.approx(0.6)
    assert out["throughput/generator_idle/loading"] == pytest.approx(0.05)
    assert out["throughput/generator_idle/ahead_full"] == pytest.approx((0.1 + 0.6) / 2)
    assert out["throughput/generator_idle/other"] == 0
    assert [out[f"generator/tokens_per_s_{k}"] for k in ("lowest", "mean", "highest")] == [100, 200, 300]
    assert [out[f"generator/version_{k}"] for k in ("lowest", "mean", "highest")] == [0, 2, 4]
    assert out["generator/g2/failures"] == 2 and "generator/g0/loading" not in out


def test_two_pauses_of_generation_in_one_window_add_up():
    rates = FleetRates()
    record = 0.0
    busy_s = 0.0
    for pauses in ((), (1.0, 2.0)):  # seconds; work before, between and after them
        for work, pause in zip((4.0, 2.0, 1.0), (*pauses, 0.0, 0.0, 0.0), strict=False):
            busy_s, record = busy_s + work, record + work + pause
            gauges = {"time": record, "busy_s": busy_s, "tokens": 100 * busy_s}
            beats = {
                **state(),
                "idle": {"ahead_full": len(pauses)},
                "generators": {"g0": {"alive": True, "gauges": gauges}},
            }
        out = rates.scalars(beats, 7.0 + sum(pauses))
    assert out["throughput/generator_busy_fraction"] == pytest.approx(7 / 10)
    assert sum(v for k, v in out.items() if "generator_idle/" in k) * 10 == pytest.approx(3.0)
    assert out["throughput/generator_idle/ahead_full"] * 10 == pytest.approx(3.0)
    assert out["throughput/generator_tokens_per_s"] == pytest.approx(70)


def test_prompts_that_were_left_out_of_the_files_are_counted_by_reason_over_all_training_sources():
    state = {
        "queue_depth": 0, "leased": 0, "bytes": 0, "counters": {}, "idle": {}, "generators": {},
        "data": {"math/overlong": 3, "code/overlong": 2, "math/duplicate": 7, "eval/aime/overlong": 100},
    }  # fmt: skip
    out = FleetRates().scalars(state, 1.0)
    assert {k: v for k, v in out.items() if k.startswith("data/")} == {"data/overlong": 5.0, "data/duplicate": 7.0}
