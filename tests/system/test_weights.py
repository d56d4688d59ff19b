"""Whole runs with the weights on the network: two generators that pull every version from the learner."""

import signal

import pytest

from asyncrl.transport import keys
from asyncrl.weights.place import directory_of
from tests.system.test_run import assert_clean, assert_lag_bound

# As long as it takes until both generators trained the policy; they may be ready at very different times.
LONG = {"learner.updates": 100000, "eval.every": 20}
LONGER = {"learner.updates": 40, "eval.every": 20}


def train_until_both_took_part(run):
    """Groups of both generators are committed, and a record says of both that they hold a later version."""
    both = ("g0", "g1")

    def took_part():
        held = [max((r.get(f"generator/{g}/version", 0.0) for r in run.updates()), default=0.0) for g in both]
        return min(held) > 0 and {c["generator_id"] for c in run.committed()} == set(both)

    run.wait_for(took_part, 300)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()


def assert_loaded_over_the_network(run):
    """Both generators ended up with late versions, all of them fetched in chunks."""
    last = run.updates()[-1]
    # Each of them the first version and a later one at least.
    assert last["weights/chunks"] >= 4 and last["weights/bytes"] > 0
    assert [last[f"weights/{name}"] for name in ("unsent", "refused")] == [0.0, 0.0]
    assert last["generator/failed_loads"] == 0.0
    logs = [(run.folder / "logs" / f"{name}.log").read_text() for name in ("g0", "g1")]
    assert not [log for log in logs if "was not loaded" in log]


@pytest.mark.long
def test_two_generators_pull_their_weights_whole(start_run):
    changes = {"generator.count": 2, "weights.carrier": "zmq", "weights.delta": False}
    run = start_run("zmq", **changes, **LONG)
    train_until_both_took_part(run)
    assert_clean(run)
    assert [r["update"] for r in run.updates()] == list(range(len(run.updates())))
    assert_lag_bound(run, 4)
    assert_loaded_over_the_network(run)


def test_generators_with_a_key_pull_their_weights(start_run, tmp_path):
    """replay's keys serve for the weights as well; every interface is bound."""
    keys.new(tmp_path / "keys")
    changes = {
        "generator.count": 2,
        "replay.security": "curve",
        "replay.keys": tmp_path / "keys",
        "weights.carrier": "zmq",
        "weights.bind": "tcp://*:*",
    }
    run = start_run("curve", **changes, **LONG)
    train_until_both_took_part(run)
    assert_clean(run)
    assert [r["update"] for r in run.updates()] == list(range(len(run.updates())))
    assert_lag_bound(run, 4)
    assert_loaded_over_the_network(run)
    assert run.updates()[-1].get("weights/refused_unknown_key", 0.0) == 0.0


@pytest.mark.parametrize(("carrier", "delta"), [("zmq", False), pytest.param("shm", True, marks=pytest.mark.long)])
def test_max_lag_zero_trains_on_policy(start_run, carrier, delta):
    changes = {"staleness.max_lag": 0, "staleness.sync_every": 1, "weights.carrier": carrier, "weights.delta": delta}
    run = start_run("onpolicy", **changes)
    assert run.wait() == 0, run.text()
    assert [r["staleness/lag_max"] for r in run.updates()] == [0.0] * 6
    assert [r["staleness/lag_mean"] for r in run.updates()] == [0.0] * 6


@pytest.mark.long
def test_versions_take_turns_in_shared_memory(start_run):
    """Engines let go of what they loaded, so its memory is used again; nothing stays behind."""
    run = start_run("shm", **{"generator.count": 2}, **LONGER)
    assert run.wait() == 0, run.text()
    last = run.updates()[-1]
    # 20 versions or 21; the first three need memory of their own, and a slow reader may cost one now and then.
    assert last["weights/reused"] >= 10
    assert last["generator/failed_loads"] == 0.0
    assert not directory_of(run.folder / "weights").exists()
