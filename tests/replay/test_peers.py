"""How many peers replay remembers, and under which names."""

import sys

from msgspec import structs

from asyncrl.replay.notices import Notices
from asyncrl.replay.peers import BUSY_INTERVALS, MAX_GENERATORS, MAX_LEARNERS, Peers
from asyncrl.wire import SCHEMA, GroupHead, Hello, PromptMsg

HELLO = Hello(SCHEMA, "generator", "g0", "b0", [], 0, 0, 0, "", (0, 0))
GROUP = GroupHead("0/a", "g0", 1, 1.0, 1.0, PromptMsg("a", [], "", "", ""), [], [], [], [], [])


def test_generators_under_ever_new_names_fill_no_memory():
    peers = Peers()
    for i in range(MAX_GENERATORS):
        hello = structs.replace(HELLO, peer_id=f"g{i}")
        assert peers.refusal(b"%d" % i, hello) == ""
        peers.join(b"%d" % i, hello, float(i))
    one_more = structs.replace(HELLO, peer_id="another")
    assert peers.refusal(b"x", one_more) == f"another is one generator too many: {MAX_GENERATORS} are alive"
    assert peers.refusal(b"y", structs.replace(HELLO, peer_id="g7", boot_id="b1")) == "", "one that is known comes back"
    # The one that is silent for longest makes room.
    assert peers.silent(100.0, 95.0) == [f"g{i}" for i in range(5)]
    assert peers.refusal(b"x", one_more) == ""
    peers.join(b"x", one_more, 100.0)
    assert len(peers.generators) == len(peers.known) == MAX_GENERATORS and "g0" not in peers.generators


def test_what_is_kept_of_one_generator_is_bounded():
    peers = Peers()
    peers.join(b"a", HELLO, 0.0)
    for _ in range(3):
        peers.beat("g0", {f"{i:064d}": float(i) for i in range(64)}, [(float(i), i + 1.0) for i in range(2**14)])
    one = peers.generators["g0"]
    size = sum(sys.getsizeof(k) + sys.getsizeof(v) for k, v in one.gauges.items())
    size += sum(sys.getsizeof(i) + 2 * sys.getsizeof(0.0) for i in one.busy) + sys.getsizeof(one.gauges)
    assert len(one.busy) == BUSY_INTERVALS and size < 80_000


def test_a_connection_has_one_name():
    peers = Peers()
    peers.join(b"a", HELLO, 0.0)
    other = structs.replace(HELLO, peer_id="g1")
    assert peers.refusal(b"a", other) == "g1 says Hello on the connection of generator g0; connect anew"
    assert "connect anew" in peers.refusal(b"a", structs.replace(HELLO, role="learner"))
    assert peers.refusal(b"a", structs.replace(HELLO, boot_id="b1")) == ""


def test_ranks_under_ever_new_names_fill_no_memory():
    peers = Peers()
    peers.join(b"g", HELLO, 0.0)
    for i in range(MAX_LEARNERS + 3):
        peers.join(b"%d" % i, structs.replace(HELLO, role="learner", peer_id=f"l{i}"), 0.0)
    assert len(peers.known) == MAX_LEARNERS + 1 and b"2" not in peers.known and {b"g", b"3"} <= set(peers.known)


def test_answers_that_a_peer_does_not_read_are_not_kept_for_it():
    notices = Notices()
    notices.resolved([("g0", "0/a")])
    for i in range(100):
        notices.result("g0", GROUP._replace(group_id=f"x{i}"), "refused", False)
        ((name, ack, owed),) = notices.drain()
        assert ack.resolved[:1] == [f"x{i}"] and "0/a" in ack.resolved and len(ack.resolved) == 2
        notices.untold(name, owed)
    ((_, ack, _),) = notices.drain()
    assert ack.resolved == ["0/a"] and notices.drain() == []
