"""Every spelling of an address parses, or says what is wrong with it (B49)."""

import socket

import pytest

from asyncrl.errors import TransportError
from asyncrl.transport.address import Address, is_loopback, parse, reachable, resolve


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1", "127.0.0.1", None),
        ("tcp://127.0.0.1:5555", "127.0.0.1", 5555),
        ("localhost:0", "localhost", None),
        ("node-7.cluster:80", "node-7.cluster", 80),
        ("::1", "::1", None),
        ("[::1]", "::1", None),
        ("tcp://[::1]:5555", "::1", 5555),
        ("[fe80::1%eth0]:*", "fe80::1%eth0", None),
        ("*", "*", None),
        (" tcp://*:7000 ", "*", 7000),
    ],
)
def test_parses(text, host, port):
    assert parse(text) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ipc:///run/x", "only tcp://"),
        ("tcp://[::1", r"\[IPv6\]:port"),
        ("[::1]5555", r"\[IPv6\]:port"),
        ("tcp://:5555", "no host"),
        ("", "no host"),
        ("host:99999", "below 65536"),
        ("host:-1", "below 65536"),
        ("host:http", "below 65536"),
        ("1:2:nonsense", r"needs \[IPv6\]:port"),
    ],
)
def test_refuses_with_a_reason(text, words):
    with pytest.raises(TransportError, match=words):
        parse(text)


def test_prints_what_it_parses():
    for text in ("tcp://127.0.0.1:5555", "tcp://[::1]:*", "tcp://*:80"):
        assert str(parse(text)) == text


def test_resolves_names_to_ipv4_first():
    assert resolve("localhost") == "127.0.0.1" and resolve("::1") == "::1" and resolve("*") == "*"
    with pytest.raises(TransportError, match=r"nobody\.invalid.*cannot be resolved"):
        resolve("nobody.invalid")


def test_loopback():
    assert all(is_loopback(h) for h in ("127.0.0.1", "127.3.2.1", "::1", "localhost"))
    assert not any(is_loopback(h) for h in ("*", "0.0.0.0", "::", "192.0.2.1", "2001:db8::1"))


def test_a_wildcard_is_published_under_this_hosts_name():
    assert reachable("tcp://127.0.0.1:40000") == "tcp://127.0.0.1:40000"
    assert reachable("tcp://[::1]:40000") == "tcp://[::1]:40000"
    assert reachable("tcp://[::ffff:127.0.0.1]:40000") == "tcp://127.0.0.1:40000"
    assert parse(reachable("tcp://[::]:40000")).host in (socket.gethostname(), "127.0.0.1")
