"""Addresses: `tcp://host:port` in every spelling people use, to what a socket can bind or connect.

Host names are resolved here and always to IPv4 first, so that `localhost` means the same thing to
the side that binds and to the side that connects.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from asyncrl.errors import ConfigError, TransportError


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


def refuse_open(bind: str, security: str, setting: str) -> None:
    """ConfigError for an address that other machines reach without a decision who may use it."""
    if security == "loopback" and not is_loopback(parse(bind).host):
        section = setting.rpartition(".")[0]
        raise ConfigError(
            f"{setting}={bind!r} can be reached from other machines, and with {section}.security=loopback anyone "
            f"there could send data; set {setting}=tcp://127.0.0.1:*, or {section}.security=curve and {section}.keys="
            f"DIR (`asyncrl keys new DIR` makes them), or, on a network you trust, {section}.security=none"
        )


def reachable(endpoint: str) -> str:
    """What others should connect to for a bound endpoint: a wildcard becomes an address of this host."""
    host, port = parse(endpoint)
    numeric = host.removeprefix("::ffff:") if host.startswith("::ffff:") and "." in host else host
    if numeric in ("*", "::", "0.0.0.0"):
        numeric = own_address(only_ipv4=numeric == "0.0.0.0")
    return str(Address(numeric, port))


def own_address(only_ipv4: bool = False) -> str:
    """A numeric address under which other hosts reach this one: what its name means, else the one on the
    default route, else the first of an interface. 127.0.0.1 for a host without a network.
    """
    for find in (_named, _routed, _on_interfaces):
        for found in find():
            if not (only_ipv4 and ":" in found) and _is_ours(found):
                return found
    return "127.0.0.1"


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


def _named() -> list[str]:
    """Addresses of this host's name, IPv4 first. On many systems that is a loopback address only."""
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return sorted((str(info[4][0]) for info in infos), key=lambda a: ":" in a)


def _routed() -> Iterator[str]:
    """Source address of the default route. Connecting a datagram socket sends nothing."""
    for family, anywhere in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            yield str(probe.getsockname()[0])


def _on_interfaces() -> Iterator[str]:
    """IPv4 addresses of the interfaces, in their order (Linux): for a network without a default route."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                record = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(record[20:24])


def _is_ours(found: str) -> bool:
    """True for an address of this host that others can use."""
    address = ipaddress.ip_address(found.partition("%")[0])
    if address.is_loopback or address.is_link_local or address.is_unspecified:
        return False
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((found, 0))
    except OSError:
        return False
    return True
