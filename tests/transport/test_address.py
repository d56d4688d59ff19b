"""Every spelling of an address parses, or says what is wrong with it (B49)."""

import socket

import pytest

from asyncrl.errors import ConfigError, TransportError
from asyncrl.transport import address
from asyncrl.transport.address import Address, is_loopback, own_address, parse, reachable, refuse_open, resolve


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


def test_a_wildcard_is_published_under_an_address_that_other_hosts_can_use():
    assert reachable("tcp://127.0.0.1:40000") == "tcp://127.0.0.1:40000"
    assert reachable("tcp://[::1]:40000") == "tcp://[::1]:40000"
    assert reachable("tcp://[::ffff:127.0.0.1]:40000") == "tcp://127.0.0.1:40000"
    for endpoint in ("tcp://[::]:40000", "tcp://*:40000", "tcp://0.0.0.0:40000"):
        host, port = parse(reachable(endpoint))
        assert port == 40000 and host == resolve(host) and host != "*"
        # A host without any network but its own has no better one.
        assert not is_loopback(host) or list(address._routed()) + list(address._on_interfaces()) in (
            [], ["127.0.0.1"], ["::1"],
        )  # fmt: skip
    assert ":" not in parse(reachable("tcp://0.0.0.0:40000")).host


def test_a_host_name_that_means_loopback_is_not_published(monkeypatch):
    # Debian puts the host's own name on 127.0.1.1, others on 127.0.0.1.
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(address, "_routed", lambda: iter(["169.254.7.7", "198.51.100.77"]))
    monkeypatch.setattr(address, "_on_interfaces", lambda: iter(["127.0.0.1"]))
    # Neither a link-local address, nor one that is not ours, nor loopback: nothing is left but the last resort.
    assert own_address() == "127.0.0.1"


def test_an_open_address_needs_a_decision():
    refuse_open("tcp://localhost:5", "loopback", "replay.bind")
    for security in ("curve", "none"):
        refuse_open("tcp://*:5", security, "replay.bind")
    with pytest.raises(ConfigError) as caught:
        refuse_open("tcp://*:5", "loopback", "replay.bind")
    for words in (
        "replay.bind='tcp://*:5'", "replay.security=loopback", "replay.bind=tcp://127.0.0.1:*",
        "replay.security=curve", "asyncrl keys new", "replay.security=none",
    ):  # fmt: skip
        assert words in str(caught.value)
