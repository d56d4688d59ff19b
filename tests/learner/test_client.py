"""The learner's client against a replay that is slow, forgets it, or is started again."""

import numpy as np
import pytest

from asyncrl import wire
from asyncrl.errors import NoAnswer
from asyncrl.learner.client import Limit, ReplayClient, answer_limit, reportable
from asyncrl.types import ModelInfo, Version
from tests.helpers.scripted_replay import Replay, plain

INFO = ModelInfo((0, 1), 8, 2, 32, "f00d")


@pytest.fixture
def connect(tmp_path):
    started = []

    def start(answers, answer=None):
        replay = Replay(tmp_path / "replay.address", answers)
        client = ReplayClient(tmp_path / "replay.address", 0, INFO, 10.0, answer=answer)
        started.extend([client.close, replay.end])
        return client, replay

    yield start
    for end in started:
        end()


def test_a_late_acknowledgement_is_not_taken_for_another(connect):
    # The second copy of the Ack to Published must not end the Commit.
    def twice(message):
        return plain(message) * 2 if isinstance(message, wire.Published) else plain(message)

    client, replay = connect(lambda m: twice(m) if not isinstance(m, wire.Commit) else [], Limit(5.0, "a.key=5"))
    client.published(Version(0, 0), "/w/0")
    with pytest.raises(NoAnswer, match=r"did not answer Commit within 5 s \(a\.key=5\)"):
        client.commit(0, 1, "trained", ["0/a"])
    assert any(isinstance(m, wire.Commit) for m in replay.heard)


@pytest.mark.parametrize(("start_s", "collective_s", "ranks", "seconds", "key"), [
    (180.0, 120.0, 1, 180.0, "run.start_timeout_s"),
    (180.0, 120.0, 2, 90.0, "0.75 of learner.collective_timeout_s=120, as other ranks wait"),
    (60.0, 120.0, 2, 60.0, "run.start_timeout_s"),
])  # fmt: skip
def test_rank_0_gives_up_on_replay_before_the_other_ranks_give_up_on_rank_0(start_s, collective_s, ranks, seconds, key):
    assert answer_limit(start_s, collective_s, ranks) == Limit(seconds, key)


def test_a_replay_that_forgot_the_learner_hears_hello_version_and_request(connect):
    known = {"hello": False, "forget": False}

    def answers(message):
        if isinstance(message, wire.Commit) and not known["forget"]:
            known["forget"] = True
            # One for each of the messages that waited for it.
            return [wire.Rejoin()] * 3
        return plain(message)

    client, replay = connect(answers)
    client.published(Version(0, 4), "/w/4", batches=6)
    client.commit(0, 5, "trained", ["0/a"], batch=6)
    kinds = [type(m).__name__ for m in replay.heard]
    assert kinds == ["Hello", "Published", "Commit", "Hello", "Published", "Commit"]
    assert (replay.heard[4].update, replay.heard[4].source, replay.heard[4].batches) == (4, "/w/4", 6)
    assert replay.heard[2] == replay.heard[5] and replay.heard[2].batch == 6


def test_a_replay_that_forgot_the_learner_hears_its_last_record_again(connect):
    forgets = [True]

    def answers(message):
        if isinstance(message, wire.Commit) and forgets:
            forgets.clear()
            return [wire.Rejoin()]
        return plain(message)

    client, replay = connect(answers)
    client.epoch = 2
    alarm = wire.AlarmMsg("kl", 3, "kl is high", "lower learner.lr")
    client.report(4, {"policy/reward": 0.5}, [alarm])
    client.commit(0, 5, "trained", ["0/a"])
    assert [type(m).__name__ for m in replay.heard] == ["Hello", "Report", "Commit", "Hello", "Report", "Commit"]
    first, again = replay.heard[1], replay.heard[4]
    assert first == wire.Report(4, {"policy/reward": 0.5}, [alarm], 1, 2)
    assert again == wire.Report(4, {"policy/reward": 0.5}, [alarm], 0, 2)


def test_a_record_that_is_too_long_for_a_message_leaves_single_generators_out():
    """What does not decode is not answered, and would end the learner."""
    few = {f"generator/g{i}/lag": 1.0 for i in range(4095)} | {"policy/reward": 0.5}
    assert reportable(few) == few
    assert reportable(few | {"policy/entropy": 0.1}) == {"policy/reward": 0.5, "policy/entropy": 0.1}
    many = {f"drift/layer_{i}": np.float32(1.0) for i in range(5000)}
    wire.decode(wire.encode(wire.Report(0, reportable(many))))
    assert len(reportable(many)) == 4096
    assert reportable(few | {"x" * 257: 1.0}) == few


def test_a_replay_at_another_address_is_followed_and_told_the_newest_version(connect, tmp_path):
    client, old = connect(plain)
    client.published(Version(0, 8), "/w/8")
    old.end()
    new = Replay(tmp_path / "replay.address", plain)
    client.done(8)
    new.end()
    assert [type(m).__name__ for m in new.heard] == ["Hello", "Published", "Done"]


def test_all_that_a_learner_says_names_its_run_epoch_and_its_hello_what_it_published(connect):
    said = []

    def answers(message):
        said.append(message)
        if isinstance(message, wire.Take):
            return [wire.TakeReply(message.take_id, True, "", [], [4], [])]
        return [wire.Rejoin()] if isinstance(message, wire.Done) and len(said) == 5 else plain(message)

    client, _ = connect(answers)
    client.epoch = 2
    client.take(0, 4, 0, 1, 20.0)
    client.published(Version(2, 4), "/w/4")
    client.commit(0, 5, "trained", ["0/a"])
    client.done(5)
    assert [m.held for m in said if isinstance(m, wire.Hello)] == [None, (2, 4)]
    assert [m.epoch for m in said if not isinstance(m, wire.Hello)] == [2] * len(said[1:-3]) + [2, 2]


def test_a_rank_that_publishes_nothing_names_its_run_epoch_from_its_first_take_on(connect):
    taken = []

    def answers(message):
        if isinstance(message, wire.Take):
            taken.append(message)
            return [wire.TakeReply(0, True, "", [], [4], [])] if len(taken) > 1 else [wire.Rejoin()]
        return plain(message)

    client, replay = connect(answers)
    client.epoch = 3
    client.take(0, 4, 0, 1, 20.0)
    assert [m.held for m in replay.heard if isinstance(m, wire.Hello)] == [None, (3, 4)]


def test_a_version_is_announced_while_a_take_waits_and_the_take_is_asked_for_again(connect):
    """On policy the take is ready only after the announcement, which comes from the same thread."""
    heard = []

    def answers(message):
        heard.append(message)
        published = any(isinstance(m, wire.Published) for m in heard)
        if isinstance(message, wire.Take):
            # Ready too early to be seen: what the announcement passes over must come again.
            return [wire.TakeReply(message.take_id, True, "", [], [4], [])] if published else []
        return plain(message)

    client, replay = connect(answers)
    left = [True]

    def announce():
        if not left:
            return False
        left.clear()
        client.published(Version(0, 1), "/w/1")
        return True

    assert client.take(0, 1, 0, 1, 20.0, announce).bounds == [4]
    assert [type(m).__name__ for m in replay.heard] == ["Hello", "Take", "Published", "Take"]


def test_close_waits_for_no_replay_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.transport.sockets.LINGER_S", 3600.0)
    replay = Replay(tmp_path / "replay.address", plain)
    client = ReplayClient(tmp_path / "replay.address", 0, INFO, 10.0, answer=Limit(0.5, "a.key"))
    replay.end()
    with pytest.raises(NoAnswer):
        client.commit(0, 1, "trained", ["0/a"])
    client.close()  # or else this test takes an hour
