"""Bounds what peers can make a bound socket hold: connections, and bytes of messages that never become whole.

libzmq limits a frame and counts whole messages, but keeps the frames of an unfinished message without any limit,
at 64 bytes or more each. So the kernel's count of received bytes is compared with what came out as messages.
Linux only; where the kernel does not tell, nothing is cut off. Knows no message and no key.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket as sockets
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import zmq

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks at the connections."""
MAX_CONNECTIONS = 4096
"""More than these, or than half of the descriptors that this process may have, are ended unless they were heard."""

_BYTES_RECEIVED = 128  # tcpi_bytes_received in struct tcp_info


class Meter:
    """Watches the connections of the socket bound to `port`. `note` every message, `look` now and then.

    limit_bytes: what one connection may send without finishing a message. ended: the counter for
    `refused_unfinished` and `refused_connections`.
    """

    def __init__(self, port: int, limit_bytes: int, ended: Counter[str]) -> None:
        self._port, self._limit, self._ended = port, limit_bytes, ended
        self._heard: set[int] = set()
        self._finished: set[int] = set()
        self._marks: dict[int, int] = {}
        self._suspects: set[int] = set()
        self._looked_at = time.monotonic()
        self.max_connections = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def note(self, frame: Any) -> None:
        """A whole message arrived. frame: any frame of it."""
        with contextlib.suppress(zmq.ZMQError):
            self._finished.add(frame.get(zmq.SRCFD))

    def look(self, now: float) -> None:
        """Once in LOOK_S: end the connections that are over a limit. Call it when no message waits."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        finished, self._finished = self._finished, set()
        marks: dict[int, int] = {}
        seen = dict(_connections(self._port))
        for fd, num_bytes in seen.items():
            # Fewer bytes than before: another connection under the same number.
            mark = self._marks.get(fd, 0)
            marks[fd] = num_bytes if fd in finished else mark if mark <= num_bytes else 0
            if fd not in finished and num_bytes < mark:
                self._heard.discard(fd)
        over = {fd for fd, mark in marks.items() if seen[fd] - mark > self._limit}
        # Twice in a row: after a pause of this process, libzmq has yet to read what the kernel received meanwhile.
        for fd in over & self._suspects:
            self._end(fd, "unfinished", f"{seen[fd] - marks[fd]} bytes without a whole message")
        self._suspects = over
        self._heard = (self._heard | finished) & marks.keys()
        for fd in [fd for fd in marks if fd not in self._heard][: max(0, len(marks) - self.max_connections)]:
            self._end(fd, "connections", f"more than {self.max_connections} of them, and this one was never heard")
        self._marks = marks

    def _end(self, fd: int, reason: str, why: str) -> None:
        key = f"refused_{reason}"
        if not self._ended[key]:
            log.warning("ended a connection: %s (logged once and counted)", why)
        self._ended[key] += 1
        hang_up(fd)


def hang_up(fd: int) -> None:
    """End the TCP connection behind a descriptor of libzmq, which has no call for that."""
    try:
        with sockets.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(sockets.SHUT_RDWR)
    except OSError:
        log.debug("a connection had ended already")


def _connections(port: int) -> Iterator[tuple[int, int]]:
    """(descriptor, bytes received) of this process's TCP connections whose own end is `port`."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            # Not everything is a socket, and a duplicate that socket() refuses would stay open.
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            connection = stack.enter_context(sockets.socket(fileno=os.dup(int(name))))
            if connection.family not in (sockets.AF_INET, sockets.AF_INET6) or connection.getsockname()[1] != port:
                continue
            connection.getpeername()  # raises on the listening socket
            info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _BYTES_RECEIVED + 8)
            if len(info) == _BYTES_RECEIVED + 8:
                yield int(name), struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]
