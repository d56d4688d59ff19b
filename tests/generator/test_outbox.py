"""What is sent again, and how often."""

from asyncrl.generator.outbox import Outbox


def outbox(*names):
    box = Outbox()
    for name in names:
        box.add(name, f"{name}#1", [name.encode()], 0.0)
    return box


def test_a_group_is_sent_again_after_5_10_20_40_60_60_seconds():
    box = outbox("a")
    times = [t for t in range(300) if box.due(float(t))]
    # Later than 5, then 10, 20, 40, 60, 60 seconds after the last time; never more than one copy at a time.
    assert times == [6, 17, 38, 79, 140, 201, 262]


def test_what_replay_has_is_kept_but_not_sent():
    box = outbox("a", "b")
    box.admitted(["a", "unknown"])
    assert box.due(6.0) == [[b"b"]] and len(box) == 2 and box.lease_ids == ["a#1", "b#1"]
    box.resolved(["a", "unknown"])
    assert box.lease_ids == ["b#1"]


def test_a_new_replay_gets_everything_once():
    box = outbox("a", "b")
    box.admitted(["a"])
    assert box.due(6.0) == [[b"b"]]
    box.renew()
    assert box.due(6.1) == [[b"a"], [b"b"]]
    assert box.due(7.0) == box.due(11.0) == []
    assert box.due(11.2) == [[b"a"], [b"b"]]


def test_a_newer_result_of_a_group_is_kept_beside_the_older_until_replay_says_which_it_has():
    box = outbox("a")
    box.admitted(["a"])
    # Replay leases it anew: whatever it said of the first result, it has it no more.
    assert box.wanted(["a"]) and not box.wanted(["b"])
    assert box.due(1.0) == [[b"a"]]
    box.add("a", "a#2", [b"second"], 2.0)
    assert "a#1" in box and box.lease_ids == ["a#1", "a#2"]
    box.void(["a#1", "unknown#1"])
    box.admitted(["a"])
    assert box.lease_ids == ["a#2"] and box.unconfirmed == []
    box.renew()
    assert box.due(3.0) == [[b"second"]]


def test_a_resolved_group_is_forgotten_with_all_its_results():
    box = outbox("a", "b")
    box.add("a", "a#2", [b"second"], 1.0)
    box.resolved(["a"])
    assert box.lease_ids == ["b#1"]


def test_what_replay_has_no_room_for_waits_until_it_is_asked_for():
    box = outbox("a", "b")
    box.hold(["a", "unknown"], 1.0)
    assert box.due(6.5) == [[b"b"]] and box.due(30.0) == [[b"b"]]
    # Kept on purpose: nothing that a generator on its way out has to wait for.
    assert box.unconfirmed == [[b"b"]]
    box.wanted(["a", "unknown"])
    assert box.due(30.1) == [[b"a"]] and box.unconfirmed == [[b"a"], [b"b"]]


def test_a_question_that_got_lost_costs_a_minute():
    box = outbox("a")
    box.hold(["a"], 1.0)
    assert box.due(61.0) == [] and box.due(61.1) == [[b"a"]]


def test_an_admitted_group_that_had_to_make_room_is_sent_when_it_is_asked_for():
    box = outbox("a")
    box.admitted(["a"])
    assert box.due(100.0) == []
    box.wanted(["a"])
    assert box.due(100.1) == [[b"a"]]
