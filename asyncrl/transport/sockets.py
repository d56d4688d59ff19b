"""Sockets: one ROUTER that serves, DEALERs that connect, over TCP.

Frames in, frames out; delivery is at most once here (acks and resends belong to the protocol above).
Every blocking call has a timeout. Nothing is unpickled. Knows no message.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.asyncio

from asyncrl.errors import TransportError
from asyncrl.transport import address as addresses
from asyncrl.transport.curve import Guard, Watch, pin
from asyncrl.transport.keys import ClientKeys, server_keys
from asyncrl.transport.meter import Meter

Buffer = bytes | bytearray | memoryview

MAX_FRAME_BYTES = 2**29
"""A peer that announces a longer frame is disconnected before memory is taken for it."""

LARGE_FRAME_BYTES = 2**16
"""Received frames above this stay where libzmq put them; smaller ones are cheaper to copy."""

MAX_FRAMES = 2**16
"""Messages of more frames are dropped by a server and counted."""

LINGER_S = 2.0
"""Longest time that unsent frames have to leave when a socket is closed."""

HANDSHAKE_MS = 10_000
"""A peer that has not finished its handshake after this long is disconnected: until then libzmq buffers for it."""

_DRAIN = 256
_WAITING = 32
_TEND_S = 0.5


class Server:
    """A bound ROUTER socket. Use from one thread of the process that made it.

    bind: `tcp://host:port`, port `*` for any free one. security "curve" reads `keys`, a folder of
    `asyncrl keys`, and lets in the clients of its allow-list only. refused: where to count
    what was not let in (`refused_*`). max_bytes bounds a frame, and what one peer may send before a
    message is whole; peers beyond it are disconnected. max_frames: longer messages are dropped.
    Raises ConfigError (named `setting`) when the address is reachable from other machines although
    security is "loopback", or for what is wrong with the keys; TransportError when it cannot be bound.
    """

    def __init__(
        self,
        bind: str,
        security: Literal["loopback", "curve", "none"] = "loopback",
        *,
        keys: str | Path | None = None,
        setting: str = "replay.bind",
        refused: Counter[str] | None = None,
        max_bytes: int = MAX_FRAME_BYTES,
        max_frames: int = MAX_FRAMES,
    ) -> None:
        wanted = addresses.parse(bind)
        addresses.refuse_open(bind, security, setting)
        self.refused: Counter[str] = Counter() if refused is None else refused
        section = setting.rpartition(".")[0]
        secrets = server_keys(keys, f"{section}.keys") if security == "curve" else None
        self._pid, self._max_frames = os.getpid(), max_frames
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.maxmsgsize = max_bytes
        self._socket.handshake_ivl = HANDSHAKE_MS
        # Whole messages of one peer that wait to be read; the rest waits with the peer.
        self._socket.rcvhwm = _WAITING
        # Mandatory: a send to an absent or full peer is reported. Handover: a peer that reconnects takes its name.
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        # Before bind, so that nobody comes in unasked.
        self._guard = Guard(self._context, self._socket, secrets, self.refused) if secrets else None
        self._poller = zmq.Poller()
        for each in (self._socket, *((self._guard.zap, self._guard.monitor) if self._guard else ())):
            self._poller.register(each, zmq.POLLIN)
        self._bind(bind, wanted, setting)
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = addresses.reachable(endpoint.decode())
        self._meter = Meter(addresses.parse(self.address).port or 0, max_bytes, self.refused)

    def _bind(self, bind: str, wanted: addresses.Address, setting: str) -> None:
        try:
            self._socket.bind(str(addresses.Address(addresses.resolve(wanted.host), wanted.port)))
        except zmq.ZMQError as exc:
            self.close()
            if exc.errno == zmq.EADDRINUSE:
                raise TransportError(
                    f"port {wanted.port} of {setting}={bind!r} is taken by another process; "
                    f"choose another port, or * for a free one"
                ) from exc
            raise TransportError(f"{setting}={bind!r} cannot be bound: {exc}") from exc
        except TransportError:
            self.close()
            raise

    def poll(self, timeout_s: float) -> list[tuple[bytes, list[Buffer]]]:
        """Messages as (peer, frames); waits for the first one at most timeout_s."""
        _same_process(self._pid)
        received: list[tuple[bytes, list[Buffer]]] = []
        if not self._wait(timeout_s):
            self._meter.look(time.monotonic())
            return received
        for _ in range(_DRAIN):
            try:
                peer = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._meter.look(time.monotonic())
                break
            frames = self._rest(peer)
            self._meter.note(peer)
            if frames is None:
                self.refused["refused_frames"] += 1
            elif self._guard is None or self._guard.admits(peer):
                received.append((peer.bytes, frames))
        return received

    def _rest(self, frame: Any) -> list[Buffer] | None:
        """The frames behind the first one as buffers, None when there are too many."""
        frames: list[Buffer] = []
        receive, most = self._socket.recv, self._max_frames
        while frame.more:
            # The parts of a message arrive together.
            frame = receive(zmq.NOBLOCK, copy=False)
            if len(frames) <= most:
                frames.append(frame.bytes if len(frame) <= LARGE_FRAME_BYTES else frame.buffer)
        return frames if len(frames) <= most else None

    def _wait(self, timeout_s: float) -> bool:
        """True when a message is there; answers handshakes meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            ready = dict(self._poller.poll(_ms(deadline - time.monotonic())))
            if self._guard is not None and len(ready) > (self._socket in ready):
                self._guard.serve()
            if self._socket in ready or time.monotonic() >= deadline:
                return self._socket in ready

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Hand frames to libzmq for a peer; never blocks. False: the peer is absent, revoked or too slow."""
        _same_process(self._pid)
        if self._guard is not None and not self._guard.serves(peer):
            return False
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as exc:
            if exc.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise TransportError(f"cannot send to {peer!r}: {exc}") from exc
        return True

    def close(self) -> None:
        """Close; waits for unsent frames at most LINGER_S."""
        if self._pid == os.getpid():
            if self._guard is not None:
                self._guard.close()
            self._socket.close()
            self._context.term()


class Client:
    """A DEALER socket connected to a Server under a stable identity. Use from one thread of the process that made it.

    keys: for a Server with security "curve". While the server refuses the handshake, the reason is
    logged once and the client goes on trying.
    """

    def __init__(self, address: str, identity: bytes, keys: ClientKeys | None = None) -> None:
        self.address, self._pid = address, os.getpid()
        self._context = zmq.Context()
        self._socket, self._watch = _connect(self._context, address, identity, keys)

    def send(self, frames: Sequence[Buffer], timeout_s: float = 10.0) -> None:
        """Hand frames to libzmq; waits for room at most timeout_s, then raises TransportError."""
        _same_process(self._pid)
        deadline = time.monotonic() + timeout_s
        while not self._socket.poll(_ms(min(deadline - time.monotonic(), _TEND_S)), zmq.POLLOUT):
            self._watch.tend()
            if time.monotonic() >= deadline:
                raise _full(self.address, timeout_s)
        self._socket.send_multipart(list(frames), zmq.NOBLOCK, copy=False)

    def recv(self, timeout_s: float) -> list[Buffer] | None:
        """The next message, None after timeout_s."""
        _same_process(self._pid)
        if not self._socket.poll(_ms(timeout_s), zmq.POLLIN):
            self._watch.tend()
            return None
        return _lean(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def close(self) -> None:
        """Close; waits for unsent frames at most LINGER_S."""
        if self._pid == os.getpid():
            self._watch.close()
            self._socket.close()
            self._context.term()

    def leave(self) -> None:
        """Close without waiting: what is unsent has LINGER_S to leave in the background."""
        if self._pid == os.getpid():
            _leave(self._context, self._socket, self._watch)


class AsyncClient:
    """The same for asyncio: any number of senders, one receiver, one event loop."""

    def __init__(self, address: str, identity: bytes, keys: ClientKeys | None = None) -> None:
        self.address, self._pid = address, os.getpid()
        self._context = zmq.asyncio.Context()
        self._socket, self._watch = _connect(self._context, address, identity, keys)

    async def send(self, frames: Sequence[Buffer], timeout_s: float = 10.0) -> None:
        """Hand frames to libzmq; waits for room at most timeout_s, then raises TransportError."""
        _same_process(self._pid)
        sending = self._socket.send_multipart(list(frames), copy=False)
        deadline = time.monotonic() + timeout_s
        try:
            # Not wait_for: on Python 3.11 it swallows a cancellation that meets its result.
            while not sending.done() and (left := deadline - time.monotonic()) > 0:
                await asyncio.wait({sending}, timeout=min(left, _TEND_S))
                if not sending.done():
                    self._watch.tend()
            if not sending.done():
                raise _full(self.address, timeout_s)
            await sending
        finally:
            sending.cancel()

    async def recv(self, timeout_s: float) -> list[Buffer] | None:
        """The next message, None after timeout_s. Cancelling it loses no message."""
        # Poll first: a cancelled poll takes nothing from the socket, a cancelled receive might.
        if not await self._socket.poll(_ms(timeout_s), zmq.POLLIN):
            self._watch.tend()
            return None
        return _lean(await self._socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def reconnected(self) -> bool:
        """True once after every new connection but the first: what was on its way in the old one is lost."""
        self._watch.tend()
        found, self._watch.reconnected = self._watch.reconnected, False
        return found

    async def close(self) -> None:
        """Close; waits for unsent frames at most LINGER_S, while the event loop goes on."""
        if self._pid == os.getpid():
            self._watch.close()
            self._socket.close()
            await asyncio.to_thread(self._context.term)

    def leave(self) -> None:
        """Close without waiting: what is unsent has LINGER_S to leave in the background."""
        if self._pid == os.getpid():
            _leave(self._context, self._socket, self._watch)


def _leave(context: Any, socket: Any, watch: Watch) -> None:
    # Not linger 0: libzmq 4.3.5 aborts the process when the connection breaks at that moment in mid-message.
    watch.close()
    socket.close()
    threading.Thread(target=context.term, name="linger", daemon=True).start()


def _same_process(pid: int) -> None:
    # libzmq's threads do not exist in a forked child: a send would vanish, a receive never return.
    if pid != os.getpid():
        raise TransportError(f"this socket belongs to process {pid}; a forked child must open its own, or be spawned")


def _configure(socket: Any) -> None:
    socket.linger = _ms(LINGER_S)
    socket.ipv6 = True
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2000
    # A host that vanished without a goodbye is noticed and the connection made anew.
    # By the kernel and not by heartbeats of libzmq: 4.3.5 aborts the process ("!_io_error") when one is due on a broken
    # connection whose messages nobody has read yet, for example after this process was stopped for a while.
    socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, 10
    socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 10, 5
    socket.tcp_maxrt = 60_000


def _connect(context: Any, address: str, identity: bytes, keys: ClientKeys | None) -> tuple[Any, Watch]:
    try:
        target = addresses.parse(address)
        if target.port is None or target.host == "*":
            raise TransportError(f"cannot connect to {address!r}: it names no host and port")
        endpoint = str(addresses.Address(addresses.resolve(target.host), target.port))
    except TransportError:
        context.term()
        raise
    socket = context.socket(zmq.DEALER)
    _configure(socket)
    socket.routing_id = identity
    if keys is not None:
        pin(socket, keys)
    watch = Watch(context, socket, endpoint, keys)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as exc:
        watch.close()
        socket.close(0)
        context.term()
        raise TransportError(f"cannot connect to {address!r}: {exc}") from exc
    return socket, watch


def _lean(frames: Sequence[Any]) -> list[Buffer]:
    """Frames as buffers. Copying the small ones also frees the receive buffer that they share."""
    return [f.bytes if len(f) <= LARGE_FRAME_BYTES else f.buffer for f in frames]


def _full(address: str, timeout_s: float) -> TransportError:
    return TransportError(f"no room to send to {address} for {timeout_s:g} s; the peer is gone or stuck")


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
