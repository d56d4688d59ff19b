"""Live settings as pure state: changes, undo, when they come into force, the disk."""

import json

import msgspec
import pytest

from asyncrl import wire
from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.replay.knobs import KEPT, LONGEST, LONGEST_SUM, PENDING, Change, Knobs, KnobsState

TREE = {"model": {"path": "m"}, "staleness": {"max_lag": 16, "sync_every": 4}}
LAG, EVERY, Q, LR = "staleness.max_lag", "staleness.sync_every", "algorithm.rdc.q", "learner.lr"


@pytest.fixture
def knobs():
    return Knobs(validate(TREE))


def tune(knobs, values, key="", by="me"):
    return knobs.change(values, by, key, 3, 100.0)


def undo(knobs, count, key=""):
    return knobs.undo(count, "me", key, 3, 100.0)


def test_a_change_says_what_it_changed_and_comes_into_force_with_a_take(knobs):
    change = tune(knobs, {LAG: "8", Q: "0.1"})
    assert (change.seq, change.by, change.update, change.values) == (1, "me", 3, {LAG: ("16", "8"), Q: ("0.08", "0.1")})
    assert (knobs.coming.seq, knobs.coming.values) == (1, {LAG: "8", Q: "0.1"})
    assert knobs.in_force == 0 and knobs.at(0).values == {}
    config = knobs.adopt(4, 4)
    assert (config.staleness.max_lag, config.algorithm.rdc.q, knobs.in_force, knobs.since) == (8, 0.1, 1, 4)
    assert knobs.adopt(5, 4) is None, "nothing newer"
    assert knobs.freeze() == (knobs.coming, knobs.coming)


def test_what_is_so_already_is_no_change_and_what_equals_the_config_is_not_tuned(knobs):
    assert tune(knobs, {LAG: "16"}) is None and knobs.seq == 0
    tune(knobs, {LAG: "8"})
    assert tune(knobs, {LAG: "8"}) is None and knobs.seq == 1
    assert tune(knobs, {LAG: "16"}).values == {LAG: ("8", "16")}
    assert knobs.coming.values == {} and knobs.seq == 2


def test_a_request_that_is_sent_again_is_done_once(knobs):
    first = tune(knobs, {Q: "0.1"}, key="a")
    tune(knobs, {Q: "0.2"}, key="b")
    assert tune(knobs, {Q: "0.1"}, key="a") == first
    assert knobs.coming.values == {Q: "0.2"} and knobs.seq == 2
    back = undo(knobs, 1, key="c")
    assert undo(knobs, 1, key="c") == back and knobs.coming.values == {Q: "0.1"}


def test_undo_takes_back_the_last_changes_that_are_not_undone(knobs):
    tune(knobs, {Q: "0.1"})
    tune(knobs, {Q: "0.2", LR: "0.001"})
    assert undo(knobs, 1).values == {Q: ("0.2", "0.1"), LR: ("0.001", "0.0003")}
    tune(knobs, {Q: "0.3"})
    two = undo(knobs, 2)
    assert (two.seq, two.undoes, two.values) == (5, (1, 4), {Q: ("0.3", "0.08")})
    assert knobs.coming.values == {}
    with pytest.raises(ConfigError, match="--undo 1: nothing is tuned"):
        undo(knobs, 1)
    tune(knobs, {Q: "0.1"})
    with pytest.raises(ConfigError, match="--undo 2: 1 changes are left that can be undone"):
        undo(knobs, 2)
    assert knobs.coming.values == {Q: "0.1"}, "refused as a whole"


def test_what_contradicts_what_was_tuned_before_is_refused(knobs):
    tune(knobs, {EVERY: "8"})
    with pytest.raises(ConfigError, match="max_lag=4 is smaller than sync_every - 1 = 7"):
        tune(knobs, {LAG: "4"})
    tune(knobs, {LAG: "7"})
    tune(knobs, {EVERY: "1"})
    tune(knobs, {LAG: "0"})
    assert knobs.coming.values == {LAG: "0", EVERY: "1"} and knobs.seq == 4


def test_what_replay_cannot_serve_is_refused_though_it_validates():
    def check(config):
        if config.staleness.max_lag > 20:
            raise ConfigError("too large for me")

    knobs = Knobs(validate(TREE), check)
    with pytest.raises(ConfigError, match="too large for me"):
        tune(knobs, {LAG: "21"})
    assert knobs.seq == 0 and knobs.coming.values == {}


def test_a_take_is_frozen_under_the_newest_settings_for_which_a_version_exists(knobs):
    tune(knobs, {LAG: "0", EVERY: "1"})
    assert knobs.adopt(7, 4) is None, "version 4 is no use for update 7 at max_lag 0"
    tuned, coming = knobs.freeze()
    assert (tuned.seq, coming.seq) == (0, 1) and not knobs.follows, "the learner hears by what to publish next"
    assert knobs.adopt(8, 8).staleness.max_lag == 0 and knobs.follows
    # Looser again, and tighter before the next take: the looser state, of which a version exists, is taken.
    tune(knobs, {LAG: "16", EVERY: "8"})
    tune(knobs, {EVERY: "1"})
    tune(knobs, {LAG: "0"})
    assert knobs.adopt(10, 8).staleness.max_lag == 16 and knobs.in_force == 3


def test_without_a_config_nothing_can_be_tuned():
    knobs = Knobs()
    with pytest.raises(ConfigError, match="serves no config"):
        tune(knobs, {LAG: "1"})
    assert knobs.adopt(3, 0) is None and knobs.freeze()[0].seq == 0


def test_changes_that_wait_for_a_take_are_bounded_and_old_ones_are_forgotten(knobs):
    for i in range(PENDING):
        tune(knobs, {EVERY: str(i % 4 + 1)})
    with pytest.raises(ConfigError, match="wait for the next take"):
        tune(knobs, {LAG: "9"})
    assert tune(knobs, {"weights.paused": "true"}) and tune(knobs, {"weights.paused": "false"}), "but a pause can"
    assert len(knobs.changes) == PENDING + 2
    values = knobs.coming.values
    knobs.adopt(1, 0)
    assert len(knobs.changes) == KEPT and knobs.at(knobs.seq).values == knobs.coming.values == values
    tune(knobs, {LAG: "9"})
    with pytest.raises(ConfigError, match=f"{KEPT + 1} changes are left"):
        undo(knobs, KEPT + 2)


def stored(knobs):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(knobs.save()), type=KnobsState)


def test_a_restart_forgets_nothing(knobs):
    tune(knobs, {LAG: "8"}, key="a")
    knobs.adopt(4, 4)
    knobs.freeze()
    tune(knobs, {Q: "0.1"}, key="b")
    again = Knobs(validate(TREE))
    assert again.load(stored(knobs)) == {}
    assert again.save() == knobs.save() and again.coming == knobs.coming and again.follows
    assert tune(again, {Q: "0.5"}, key="b").seq == 2
    assert undo(again, 2).values == {Q: ("0.1", "0.08"), LAG: ("8", "16")}


def test_a_config_that_was_changed_wins_over_what_was_tuned(knobs):
    tune(knobs, {LAG: "8", Q: "0.1"})
    tune(knobs, {LR: "0.001"})
    again = Knobs(validate(TREE | {"algorithm": {"rdc": {"q": 0.3}}}))
    assert again.load(stored(knobs)) == {Q: ("0.1", "0.3")}
    assert (again.coming.seq, again.coming.values) == (2, {LAG: "8", LR: "0.001"})
    undo(again, 2)
    assert again.coming.values == {}, "an undo must not bring the old value of q back"


def test_a_config_that_contradicts_what_was_tuned_ends_all_of_it(knobs):
    tune(knobs, {LAG: "4", Q: "0.1"})
    again = Knobs(validate(TREE | {"staleness": {"max_lag": 16, "sync_every": 8}}))
    assert again.load(stored(knobs)) == {LAG: ("4", "16"), Q: ("0.1", "0.08")}
    assert again.coming.values == {}


EDGES = "algorithm.rdc.bucket_edges"


def test_a_value_that_grows_when_it_is_respelled_is_refused_before_it_is_kept(knobs):
    # Every later TuneReply, TakeReply and Welcome has it: longer than a message allows, nobody could read them.
    for key, value, words in (
        (EDGES, list(range(1001, 2001)), f"{EDGES}: the value has 6000 characters as JSON, more than {LONGEST}"),
        ("alarms.f_2.actions", ["log"] * 10_000, "at most 5 items"),
        ("sentinel.signals", ["drift"] * 3, "at most 2 items"),
        (EDGES, list(range(1, 1026)), "at most 1024 items"),
    ):
        text = json.dumps(value, separators=(",", ":"))
        assert len(text) < 2**16, "it comes through the wire"
        with pytest.raises(ConfigError, match=words):
            tune(knobs, {key: text})
        with pytest.raises(ConfigError, match=words):
            tune(knobs, {Q: "0.1", key: text})
    assert knobs.seq == 0 and knobs.coming.values == {}
    tune(knobs, {EDGES: json.dumps(list(range(1001, 1601)))})
    reply = wire.encode(wire.TuneReply(True, "", knobs.coming))
    assert wire.decode(reply).tuned == knobs.coming


def test_all_tuned_values_together_are_bounded(knobs, monkeypatch):
    monkeypatch.setattr("asyncrl.replay.knobs.LONGEST_SUM", 10)
    tune(knobs, {LAG: "8", Q: "0.125"})
    with pytest.raises(ConfigError, match=r"learner\.lr: the tuned values have 11 characters together, more than 10"):
        tune(knobs, {LR: "0.001"})
    assert knobs.seq == 1
    assert LONGEST_SUM < 2**16


def test_a_stored_value_that_is_too_long_ends_alone(knobs):
    tune(knobs, {LAG: "8"})
    state = knobs.save()
    long = json.dumps(list(range(1001, 2001)))
    change = Change(2, 1.0, 3, "me", "", {EDGES: ("null", long)})
    again = Knobs(validate(TREE))
    state = state._replace(seq=2, changes=[*state.changes, change], config=state.config | {EDGES: "null"})
    assert again.load(state) == {EDGES: (long, "null")}
    assert again.coming.values == {LAG: "8"}


def test_the_end_of_a_pause_lets_nothing_else_pass(knobs):
    for i in range(PENDING):
        tune(knobs, {EVERY: str(i % 4 + 1)})
    for values in ({"weights.paused": "false", Q: "0.1"}, {"weights.paused": "true", Q: "0.1"}):
        with pytest.raises(ConfigError, match=f"{PENDING} changes wait for the next take"):
            tune(knobs, values)
    for i in range(PENDING):
        assert tune(knobs, {"weights.paused": json.dumps(i % 2 == 0)})
    with pytest.raises(ConfigError, match=f"{2 * PENDING} changes wait for the next take"):
        tune(knobs, {"weights.paused": "true"})
    assert len(knobs.changes) == 2 * PENDING


def test_the_end_of_a_pause_is_never_refused(knobs):
    for i in range(2 * PENDING - 1):
        tune(knobs, {"weights.paused": json.dumps(i % 2 == 0)})
    tune(knobs, {"weights.paused": "false"})
    assert len(knobs.changes) == 2 * PENDING
    knobs.in_force = 1
    tune(knobs, {"weights.paused": "true"})
    assert tune(knobs, {"weights.paused": "false"}).seq == 2 * PENDING + 2


def test_a_key_that_a_resume_named_is_that_of_the_config_again(knobs):
    tune(knobs, {LAG: "8", Q: "0.1", "weights.paused": "true"})
    again = Knobs(validate(TREE), untune={LAG, "weights.paused", LR})
    assert again.load(stored(knobs)) == {LAG: ("8", "16"), "weights.paused": ("true", "false")}
    assert (again.seq, again.coming.values) == (1, {Q: "0.1"})
    undo(again, 1)
    assert again.coming.values == {}
