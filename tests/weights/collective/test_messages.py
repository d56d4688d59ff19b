"""What is taken for a request, an answer, an order, a report."""

import msgspec
import pytest

from asyncrl.weights.collective import messages as m
from asyncrl.weights.messages import Probe, seal

SPEC = ("a.weight", "float32", (2, 3))


@pytest.mark.parametrize(
    "request_",
    [
        m.Join("t", "g0", 1, (0, 4)),
        m.Join("t", "g0.host-1", 4096, (0, 4), "asyncrl-g0-1-ff"),
        m.Leave("t", "g0"),
        m.Hash("t", "g0", (0, 4), ("a", "b"), 2),
    ],
)
def test_requests_survive(request_):
    assert m.open_request([seal(request_)]) == request_


@pytest.mark.parametrize(
    "reply",
    [
        m.Wait("t"),
        m.Joined("t", "asyncrl-g0-1-ff", 1234, "gloo", True, ((SPEC,),)),
        m.Hashes("t", {"a": ("0" * 16,)}),
        m.Gone("t", ((0, 1), (0, 2))),
        m.Failed("t", "why"),
        m.Left("t"),
    ],
)
def test_answers_survive(reply):
    assert m.open_reply([seal(reply)]) == reply


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"x" * 40],
        [seal(Probe(1))],
        [seal(m.Wait("t"))],
        [seal(m.Join("t", "g0", 0, (0, 4)))],
        [seal(m.Join("t", "g0", 4097, (0, 4)))],
        [seal(m.Join("t", "../g0", 1, (0, 4)))],
        [seal(m.Join("t", "", 1, (0, 4)))],
        [seal(m.Join("t", "g0", 1, (0, 4))), b""],
        [seal(m.Join("t", "g0", 1, (0, 4)))[:-1]],
    ],
)
def test_anything_else_is_no_request(frames):
    assert m.open_request(frames) is None


@pytest.mark.parametrize(
    "order",
    [
        m.Setup("127.0.0.1", "g", 1, "gloo", "cpu", 1024, 2.5),
        m.Send((0, 4), "/dev/shm/x"),
        m.Sum(("a",), 1),
        m.Release(),
    ],
)
def test_orders_are_lines(order):
    assert m.line(order).count(b"\n") == 1
    assert m.order(m.line(order)) == order


@pytest.mark.parametrize(
    "report",
    [
        m.Planned(1, ((SPEC,),)),
        m.Progress("x\ny"),
        m.Sent(),
        m.Summed({"a": ("1",)}),
        m.Refused("w", True),
        m.Broken(""),
    ],
)
def test_reports_are_lines(report):
    assert m.line(report).count(b"\n") == 1
    assert m.report(m.line(report)) == report


def test_a_line_that_is_none_is_an_error():
    with pytest.raises(msgspec.MsgspecError):
        m.order(m.line(m.Sent()))
    with pytest.raises(msgspec.MsgspecError):
        m.report(b"Warning: something")
