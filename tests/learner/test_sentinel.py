"""The sentinel's judgement of synthetic fleets: faults of real sizes, sound fleets, verdicts, alarms, probes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.config import validate
from asyncrl.learner.recorder import Recorder, absent
from asyncrl.learner.sentinel import Order, Sentinel, part_of, scale_of, signal_of
from asyncrl.learner.table import Table
from asyncrl.sections.sentinel import SentinelSection

SIZE = 8
"""Responses of a group."""


class Fleet:
    """Generators whose drift and |log-ratio| grow with the lag and fall with the length, group by group.

    Each fault multiplies both for one generator. level: mean drift at lag 0.
    """

    def __init__(self, seed: int, count: int, per_update: int = 96, level: float = 0.014) -> None:
        self.random, self.count, self.per_update, self.level = np.random.default_rng(seed), count, per_update, level
        self.names = [f"g{i}" for i in range(count)]
        self.faults: dict[str, tuple[float, float]] = {}
        self.lags: dict[str, tuple[int, int]] = {}
        self.weights = np.ones(count)
        self.lengths: dict[str, tuple[int, int]] = {}
        self.cut: set[str] = set()
        self.update = 0
        self.quarantine: dict[str, dict] = {}
        self.boots: dict[str, str] = {}
        self.dead: set[str] = set()

    def state(self) -> dict:
        generators = {
            n: {"alive": n not in self.dead, "boot": self.boots.get(n, "b")} for n in self.names
        }  # fmt: skip
        return {"generators": generators, "quarantine": self.quarantine}

    def group(self, name: str, group_id: str) -> tuple[list, list]:
        rng, (low, high) = self.random, self.lags.get(name, (0, 8))
        lag, mood = int(rng.integers(low, high + 1)), rng.lognormal(0, 0.3)
        drift_x, ratio_x = self.faults.get(name, (1.0, 1.0))
        names, rows = [], []
        for i in range(SIZE):
            length = int(rng.integers(*self.lengths.get(name, (3, 32))))
            chance = min(0.9, (self.level + 0.0013 * lag) * mood * drift_x * (1 + 2 / length))
            drift = rng.binomial(length * 6, chance) / (length * 6)
            ratio = ratio_x * (0.02 + 0.008 * lag) * rng.lognormal(0, 0.8)
            names.append((f"{group_id}.{i}", group_id, name))
            rows.append((length, lag * length, math.nan if name in self.cut else drift, ratio))
        return names, rows

    def table(self, names: list[str], per_group: str = "") -> Table:
        ids, rows = [], []
        for i, name in enumerate(names):
            more, values = self.group(name, f"{per_group}{self.update}.{i}")
            ids, rows = ids + more, rows + values
        columns = dict(zip(("tokens", "lag_sum", "drift", "abs_log_ratio"), np.asarray(rows, float).T, strict=True))
        return Table(ids, columns, 0, len(ids))

    def run(self, sentinel: Sentinel, updates: int, probes: Table | None = None) -> list[Order]:
        orders = []
        for _ in range(updates):
            free = [n for n in self.names if n not in self.quarantine and n not in self.dead]
            share = np.asarray([self.weights[self.names.index(n)] for n in free])
            who = self.random.choice(free, self.per_update // SIZE, p=share / share.sum())
            self.update += 1
            orders = sentinel.observe(self.update, self.table(list(who)), probes, self.state())
            if orders:
                break
        return orders


def highest(sentinel: Sentinel, fleet: Fleet, but: str = "") -> float:
    zs = sentinel.scalars(fleet.state())
    return max((z for k, z in zs.items() if k.endswith("_z") and k.split("/")[1] != but), default=0.0)


def z_of(sentinel: Sentinel, fleet: Fleet, name: str) -> dict[str, float]:
    zs = sentinel.scalars(fleet.state())
    both = {s: zs[f"sentinel/{name}/{s}_z"] for s in ("drift", "log_ratio") if f"sentinel/{name}/{s}_z" in zs}
    joint = zs.get(f"sentinel/{name}/joint_z")
    assert joint is None if len(both) < 2 else joint == pytest.approx(sum(both.values()) / math.sqrt(2))
    return both


# --- faults and sound fleets ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "signal"),
    [
        ((2.2, 2.0), "drift"),  # weights 16 updates older than their label, or never loaded
        ((2.4, 1.3), "drift"),  # int4 instead of fp8
        ((5.0, 1.05), "drift"),  # router noise 0.3: the probabilities hardly move
        ((10.0, 2.5), "log_ratio"),  # router noise 1.0
        ((4.0, 2.5), "log_ratio"),  # swapped experts
    ],
)
def test_one_faulty_generator_of_eight_is_found_and_named(fault, signal):
    fleet, sentinel = Fleet(1, 8, 192), Sentinel(SentinelSection())
    fleet.faults["g5"] = fault
    orders = fleet.run(sentinel, 40)
    assert [(o.generator_id, o.sound) for o in orders] == [("g5", False)]
    assert "far above the rest of the fleet at equal lag" in orders[0].reason
    assert orders[0].boot == "b"
    assert z_of(sentinel, fleet, "g5")[signal] > 5
    assert highest(sentinel, fleet, but="g5") < 6


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_no_sound_fleet_has_a_z_near_ten(seed, count):
    fleet, sentinel = Fleet(100 + seed, count), Sentinel(SentinelSection())
    fleet.weights = np.linspace(1, 4, count)  # some are four times as fast as others
    fleet.lags = {"g0": (2, 8), "g1": (0, 4)}
    fleet.lengths = {"g2": (16, 32)}
    top = 0.0
    for _ in range(25):
        assert fleet.run(sentinel, 1) == []
        top = max(top, highest(sentinel, fleet))
    assert 0 < top < 6
    assert sentinel.alarms() == []


def test_a_quiet_fleet_is_no_reason_for_an_alarm():
    # Nothing differs but one route in a thousand responses.
    fleet, sentinel = Fleet(3, 4, level=0.0), Sentinel(SentinelSection())
    fleet.lags = dict.fromkeys(fleet.names, (0, 0))
    fleet.run(sentinel, 20)
    table = fleet.table(["g1"] * 8)
    table.columns["drift"][0] = 0.02
    assert sentinel.observe(21, table, None, fleet.state()) == []
    assert highest(sentinel, fleet) < 6


def test_an_old_generator_that_says_so_is_no_outlier():
    fleet, sentinel = Fleet(4, 4), Sentinel(SentinelSection())
    # All have responses of every lag, this one mostly old ones: at equal lag it is like the others.
    fleet.lags = {"g3": (6, 8)}
    assert fleet.run(sentinel, 30) == []
    assert highest(sentinel, fleet) < 6


def test_what_no_other_has_the_like_of_is_not_judged():
    fleet, sentinel = Fleet(5, 4), Sentinel(SentinelSection())
    fleet.lags, fleet.faults = {"g3": (20, 24)}, {"g3": (5.0, 5.0)}
    assert fleet.run(sentinel, 30) == []
    assert z_of(sentinel, fleet, "g3") == {}
    assert set(z_of(sentinel, fleet, "g0")) == {"drift", "log_ratio"}


def test_responses_without_drift_are_judged_by_their_probabilities():
    fleet, sentinel = Fleet(6, 4), Sentinel(SentinelSection())
    fleet.cut, fleet.faults = {"g1"}, {"g1": (1.0, 3.0)}
    assert [o.generator_id for o in fleet.run(sentinel, 40)] == ["g1"]
    assert set(z_of(sentinel, fleet, "g1")) == {"log_ratio"}


def test_a_dense_model_has_one_signal():
    fleet, sentinel = Fleet(7, 3), Sentinel(SentinelSection())
    fleet.cut = set(fleet.names)
    fleet.run(sentinel, 20)
    assert all(set(z_of(sentinel, fleet, n)) == {"log_ratio"} for n in fleet.names)


def test_what_is_a_little_off_in_both_signals_is_found_by_both_together():
    fleet, sentinel = Fleet(17, 8, 192), Sentinel(SentinelSection())
    fleet.faults["g4"] = (1.6, 1.45)
    orders = fleet.run(sentinel, 60)
    assert [o.generator_id for o in orders] == ["g4"]
    assert "both together far above" in orders[0].reason
    assert max(z_of(sentinel, fleet, "g4").values()) < SentinelSection().z


def test_a_signal_that_is_not_wanted_is_not_there():
    fleet, sentinel = Fleet(8, 4), Sentinel(SentinelSection(signals=("drift",)))
    fleet.faults["g0"] = (1.0, 9.0)
    assert fleet.run(sentinel, 30) == []
    assert set(z_of(sentinel, fleet, "g0")) == {"drift"}


def test_masked_responses_do_not_count():
    fleet = Fleet(9, 1)
    table = fleet.table(["g0", "g0"])
    table.columns["tokens"][3:] = 0
    part = part_of(table)
    assert len(part.names) == 3
    middle = np.median(table["abs_log_ratio"][:3])
    assert scale_of(part) == middle
    ratio = table["abs_log_ratio"][0]
    assert signal_of(part, "log_ratio", scale_of(part))[0] == pytest.approx(ratio / (ratio + middle))
    assert signal_of(part, "drift", 1.0)[0] == table["drift"][0]


# --- small fleets, and how many may go -----------------------------------------------------------------


def test_of_two_none_is_named_as_the_culprit_but_their_difference_is():
    fleet, sentinel = Fleet(10, 2), Sentinel(SentinelSection())
    fleet.faults["g1"] = (6.0, 3.0)
    assert fleet.run(sentinel, 30) == []
    (alarm,) = sentinel.alarms()
    assert alarm.name == "generator/g1"
    assert "or those of the other one: 2 generators can be compared" in alarm.text
    assert "sentinel.min_generators=3" in alarm.text
    assert "restart both" in alarm.remedy


def test_of_two_nothing_is_said_before_both_windows_are_full():
    fleet, sentinel = Fleet(10, 2), Sentinel(SentinelSection())
    fleet.faults["g1"] = (6.0, 3.0)
    while not sentinel.alarms():
        fleet.run(sentinel, 1)
    full = SentinelSection().window
    assert [w["drift"].summary().num for w in sentinel._windows.values()] == [full, full]


def test_a_generator_alone_is_not_judged():
    fleet, sentinel = Fleet(11, 1), Sentinel(SentinelSection())
    assert fleet.run(sentinel, 10) == []
    assert sentinel.scalars(fleet.state()) == {"sentinel/g0/quarantined": 0.0}


def test_half_of_the_living_stay_in_and_an_alarm_says_so():
    fleet, sentinel = Fleet(12, 6, 160), Sentinel(SentinelSection())
    fleet.faults = {"g1": (8.0, 4.0)}
    for name in ("g0", "g4", "g5"):
        out(fleet, name)
    assert fleet.run(sentinel, 40) == []
    texts = {a.name: a.text for a in sentinel.alarms()}
    assert "it stays in, because half of the living generators must remain" in texts["generator/g1"]
    # With one less that is out, it is out at once.
    del fleet.quarantine["g5"]
    assert [o.generator_id for o in fleet.run(sentinel, 40)] == ["g1"]


def test_action_alarm_only_speaks():
    fleet, sentinel = Fleet(13, 4), Sentinel(SentinelSection(action="alarm"))
    fleet.faults["g2"] = (6.0, 3.0)
    assert fleet.run(sentinel, 30) == []
    (alarm,) = sentinel.alarms()
    assert alarm.name == "generator/g2"
    assert "router drift far above" in alarm.text
    assert "sentinel.action=resync" in alarm.remedy


# --- probes -------------------------------------------------------------------------------------------


def out(fleet: Fleet, name: str, phase: str = "judged", resyncs: int = 1) -> None:
    fleet.quarantine[name] = {"phase": phase, "reason": "router drift", "resyncs": resyncs, "update": 3}


def found(seed: int, fault: tuple[float, float] = (3.0, 2.5)) -> tuple[Fleet, Sentinel]:
    """A fleet whose g2 is out."""
    fleet, sentinel = Fleet(seed, 5, 160), Sentinel(SentinelSection())
    fleet.faults["g2"] = fault
    assert [o.generator_id for o in fleet.run(sentinel, 40)] == ["g2"]
    out(fleet, "g2")
    return fleet, sentinel


@pytest.mark.parametrize("seed", range(20, 26))
def test_a_clean_probe_lets_it_in_again(seed):
    fleet, sentinel = found(seed)
    fleet.faults.clear()
    (order,) = fleet.run(sentinel, 1, fleet.table(["g2"] * 16, "probe/"))
    assert (order.generator_id, order.sound, order.boot) == ("g2", True, "b")
    assert "a probe of 128 responses is clean" in order.reason
    assert sentinel.alarms() == []
    # It begins with an empty window: what it was is forgotten.
    fleet.quarantine.clear()
    assert fleet.run(sentinel, 20) == []


@pytest.mark.parametrize("seed", range(30, 36))
def test_a_probe_that_is_as_bad_does_not(seed):
    fleet, sentinel = found(seed)
    (order,) = fleet.run(sentinel, 1, fleet.table(["g2"] * 16, "probe/"))
    assert (order.generator_id, order.sound) == ("g2", False)
    assert "still has" in order.reason
    assert z_of(sentinel, fleet, "g2")


def test_a_probe_is_judged_by_a_learner_that_has_just_been_started_again():
    for fault, sound in (((1.0, 1.0), True), ((4.0, 3.0), False)):
        fleet, sentinel = Fleet(40, 5, 256), Sentinel(SentinelSection())
        fleet.faults["g2"] = fault
        out(fleet, "g2")
        (order,) = fleet.run(sentinel, 1, fleet.table(["g2"] * 16, "probe/"))
        assert order.sound == sound


def test_without_a_reference_a_probe_stays_undecided():
    fleet, sentinel = Fleet(41, 5, 8), Sentinel(SentinelSection())
    out(fleet, "g2")
    assert fleet.run(sentinel, 1, fleet.table(["g2"] * 16, "probe/")) == []


def test_what_is_trained_of_one_that_is_out_moves_neither_windows_nor_reference():
    fleet, sentinel = found(42, (20.0, 9.0))
    bad = fleet.table(["g2"] * 20 + ["g0", "g1", "g3", "g4"] * 5)
    assert sentinel.observe(99, bad, None, fleet.state()) == []
    assert z_of(sentinel, fleet, "g2") == {}
    assert highest(sentinel, fleet) < 6


def test_the_alarm_says_where_a_generator_stands():
    fleet, sentinel = found(43)
    fleet.run(sentinel, 1)
    (alarm,) = sentinel.alarms()
    assert "generator g2 is in quarantine (judged): router drift; re-syncs so far: 1" in alarm.text
    out(fleet, "g2", "set_aside", 3)
    fleet.run(sentinel, 1)
    (alarm,) = sentinel.alarms()
    assert "3 re-syncs did not help" in alarm.text
    assert "restart it" in alarm.remedy


def test_a_new_process_begins_with_an_empty_window():
    fleet, sentinel = Fleet(44, 4), Sentinel(SentinelSection(action="alarm"))
    fleet.faults["g1"] = (6.0, 3.0)
    fleet.run(sentinel, 30)
    assert sentinel.alarms()
    fleet.boots["g1"] = "another"
    fleet.run(sentinel, 1)
    assert z_of(sentinel, fleet, "g1") == {}
    assert sentinel.alarms() == []


# --- live settings ------------------------------------------------------------------------------------


def config(**sentinel):
    return validate({"model": {"path": "m"}, "generator": {"count": 4}, "sentinel": sentinel})


class Replay:
    """Stands where the connection to replay is: says in which state the fleet is."""

    def __init__(self, fleet: Fleet) -> None:
        self.status = fleet.state


def test_the_recorder_judges_by_the_settings_in_force():
    fleet, sentinel = Fleet(50, 4), Sentinel(config(enabled=False).sentinel)
    recorder = Recorder(None, Replay(fleet), None, set(), None, sentinel)
    fleet.faults["g2"] = (6.0, 3.0)

    def judge(settings, updates):
        for _ in range(updates):
            fleet.update += 1
            who = fleet.random.choice(fleet.names, 12)
            orders, scalars = recorder.judge(fleet.update, fleet.table(list(who)), None, fleet.state(), settings)
            if orders:
                break
        return [o.generator_id for o in orders], scalars

    assert judge(config(enabled=False), 20) == ([], {})
    orders, scalars = judge(config(action="alarm"), 20)
    assert orders == [] and scalars["sentinel/g2/drift_z"] > 8 and sentinel.alarms()
    assert judge(config(z=1000.0), 1)[0] == [] and not sentinel.alarms()
    assert judge(config(), 1)[0] == ["g2"]
    # One signal less, and one more again.
    assert "sentinel/g2/drift_z" not in judge(config(signals=["log_ratio"], z=1000.0), 1)[1]
    assert judge(config(z=1000.0), 1)[0] == []
    assert judge(config(enabled=False), 1) == ([], {}) and sentinel.alarms() == []
    # It begins with empty windows.
    assert judge(config(), 1)[1] == {f"sentinel/{n}/quarantined": 0.0 for n in fleet.names}


def test_another_window_holds_as_many_responses_from_then_on():
    fleet, sentinel = Fleet(51, 3), Sentinel(config(window=64, min_responses=32).sentinel)
    fleet.run(sentinel, 10)
    for size in (16, 256):
        assert sentinel.follow(config(window=size, min_responses=8).sentinel)
        fleet.run(sentinel, 30)
        assert {w.summary().num for by in sentinel._windows.values() for w in by.values()} == {size}


def test_the_dashboard_has_its_charts_also_when_it_may_be_switched_on_later():
    assert "sentinel/" not in absent(config(enabled=False))
