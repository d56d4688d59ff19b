"""From cumulative counters of replay's state to metrics."""

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
