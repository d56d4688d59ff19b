"""Addresses: `tcp://host:port` in every spelling people use, to what a socket can bind or connect.

Host names are resolved here and always to IPv4 first, so that `localhost` means the same thing to
the side that binds and to the side that connects.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from asyncrl.errors import TransportError


class Address(NamedTuple):
    """Host (a literal, a name, or `*` for all interfaces) and port (None: any free one)."""

    host: str
    port: int | None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{'*' if self.port is None else self.port}"


def parse(text: str) -> Address:
    """`[tcp://]host[:port]`; IPv6 with a port needs brackets, port `*` or 0 means any free one.

    Raises TransportError that says what is wrong.
    """
    scheme, mark, rest = text.strip().rpartition("://")
    if mark and scheme != "tcp":
        raise TransportError(f"address {text!r}: only tcp:// is supported, {scheme}:// is not")
    if rest.startswith("["):
        host, close, tail = rest[1:].partition("]")
        if not close or (tail and not tail.startswith(":")):
            raise TransportError(f"address {text!r}: expected [IPv6]:port")
        port = tail[1:]
    elif rest.count(":") > 1:
        host, port = rest, ""
    else:
        host, _, port = rest.partition(":")
    if not host:
        raise TransportError(f"address {text!r} has no host; use tcp://127.0.0.1:* or tcp://*:5555")
    if ":" in host and not _is_literal(host):
        raise TransportError(f"address {text!r}: {host!r} is not an IPv6 address; an IPv6 port needs [IPv6]:port")
    return Address(host, _port(text, port))


def resolve(host: str) -> str:
    """A numeric address for `host`, IPv4 first; `*` stays. Raises TransportError if it has none."""
    if host == "*" or _is_literal(host):
        return host
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)]
    except (OSError, UnicodeError) as exc:
        raise TransportError(f"host {host!r} cannot be resolved: {exc}") from exc
    return next((a for a in found if ":" not in a), found[0])


def is_loopback(host: str) -> bool:
    """True when only this machine can reach `host` (a literal, a name, or `*`, which is not)."""
    numeric = resolve(host)
    return numeric != "*" and ipaddress.ip_address(numeric.partition("%")[0]).is_loopback


def reachable(endpoint: str) -> str:
    """What others should connect to for a bound endpoint: a wildcard host becomes this host's name."""
    host, port = parse(endpoint)
    numeric = host.removeprefix("::ffff:") if host.startswith("::ffff:") and "." in host else host
    if numeric in ("*", "::", "0.0.0.0"):
        numeric = socket.gethostname()
        try:
            resolve(numeric)
        except TransportError:
            numeric = "127.0.0.1"
    return str(Address(numeric, port))


def _port(text: str, port: str) -> int | None:
    if port in ("", "*", "0"):
        return None
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise TransportError(f"address {text!r}: port {port!r} is not a number below 65536 or *")
    return int(port)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
