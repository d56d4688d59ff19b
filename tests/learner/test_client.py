"""The learner's client against a replay that is slow, forgets it, or is started again."""

import threading

import pytest

from asyncrl import wire
from asyncrl.learner.client import ReplayClient
from asyncrl.transport.rendezvous import publish_address
from asyncrl.transport.sockets import Server
from asyncrl.types import ModelInfo, Version

INFO = ModelInfo((0, 1), 8, 2, 32, "f00d")


class Replay(threading.Thread):
    """Answers by a script: `answers(message)` is what to send back. Keeps what it heard."""

    def __init__(self, file, answers):
        super().__init__(daemon=True)
        self.server, self.answers, self.heard, self.over = Server("tcp://127.0.0.1:*"), answers, [], False
        publish_address(file, self.server.address)
        self.start()

    def run(self):
        while not self.over:
            for peer, frames in self.server.poll(0.02):
                message = wire.decode(frames)
                self.heard.append(message)
                for reply in self.answers(message):
                    self.server.send(peer, wire.encode(reply))
        self.server.close()

    def end(self):
        self.over = True
        self.join(10)


def plain(message):
    """What replay answers on a good day."""
    match message:
        case wire.Hello():
            return [wire.Welcome(0, 0, None, "b")]
        case wire.Commit(group_ids=ids, seq=seq):
            return [wire.Ack([], ids, seq)]
        case wire.Published(seq=seq) | wire.Done(seq=seq):
            return [wire.Ack([], [], seq)]
    return []


@pytest.fixture
def connect(tmp_path):
    started = []

    def start(answers):
        replay = Replay(tmp_path / "replay.address", answers)
        client = ReplayClient(tmp_path / "replay.address", 0, INFO, 10.0)
        started.extend([client.close, replay.end])
        return client, replay

    yield start
    for end in started:
        end()


def test_a_late_acknowledgement_is_not_taken_for_another(connect):
    # The second copy of the Ack to Published must not end the Commit.
    def twice(message):
        return plain(message) * 2 if isinstance(message, wire.Published) else plain(message)

    client, replay = connect(lambda m: twice(m) if not isinstance(m, wire.Commit) else [])
    client.published(Version(0, 0), "/w/0")
    client._timeout_s = 1.0
    with pytest.raises(RuntimeError, match="did not answer Commit within 1 s"):
        client.commit(0, 1, "trained", ["0/a"])
    assert sum(isinstance(m, wire.Commit) for m in replay.heard) == 1


def test_a_replay_that_forgot_the_learner_hears_hello_version_and_request(connect):
    known = {"hello": False, "forget": False}

    def answers(message):
        if isinstance(message, wire.Commit) and not known["forget"]:
            known["forget"] = True
            return [wire.Rejoin()]
        return plain(message)

    client, replay = connect(answers)
    client.published(Version(0, 4), "/w/4", batches=6)
    client.commit(0, 5, "trained", ["0/a"], batch=6)
    kinds = [type(m).__name__ for m in replay.heard]
    assert kinds == ["Hello", "Published", "Commit", "Hello", "Published", "Commit"]
    assert (replay.heard[4].update, replay.heard[4].source, replay.heard[4].batches) == (4, "/w/4", 6)
    assert replay.heard[2] == replay.heard[5] and replay.heard[2].batch == 6


def test_a_replay_at_another_address_is_followed_and_told_the_newest_version(connect, tmp_path):
    client, old = connect(plain)
    client.published(Version(0, 8), "/w/8")
    old.end()
    new = Replay(tmp_path / "replay.address", plain)
    client.done(8)
    new.end()
    assert [type(m).__name__ for m in new.heard] == ["Hello", "Published", "Done"]


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
