"""Sockets: one ROUTER that serves, DEALERs that connect, over TCP.

Frames in, frames out; delivery is at most once here (acks and resends belong to the protocol above).
Every blocking call has a timeout. Nothing is unpickled. Knows no message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import zmq
import zmq.asyncio

from asyncrl.errors import ConfigError, TransportError
from asyncrl.transport import address as addresses

Buffer = bytes | bytearray | memoryview

MAX_FRAME_BYTES = 2**29
"""A peer that announces a longer frame is disconnected before memory is taken for it."""

LARGE_FRAME_BYTES = 2**16
"""Received frames above this stay where libzmq put them; smaller ones are cheaper to copy."""

LINGER_MS = 2000
"""Longest time that close waits for unsent frames."""

_DRAIN = 256


class Server:
    """A bound ROUTER socket. Use from one thread.

    bind: `tcp://host:port`, port `*` for any free one. Raises ConfigError (named `setting`) when the
    address is reachable from other machines although security is "loopback", TransportError when it
    cannot be bound.
    """

    def __init__(
        self, bind: str, security: Literal["loopback", "none"] = "loopback", *, setting: str = "replay.bind"
    ) -> None:
        wanted = addresses.parse(bind)
        if security == "loopback" and not addresses.is_loopback(wanted.host):
            section = setting.rpartition(".")[0]
            raise ConfigError(
                f"{setting}={bind!r} can be reached from other machines and anyone there could send data; "
                f"set {setting}=tcp://127.0.0.1:* or, on a network you trust, {section}.security=none"
            )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        # Mandatory: a send to an absent or full peer is reported. Handover: a peer that reconnects takes its name.
        self._socket.router_mandatory = True
        self._socket.router_handover = True
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
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = addresses.reachable(endpoint.decode())

    def poll(self, timeout_s: float) -> list[tuple[bytes, list[Buffer]]]:
        """Messages as (peer, frames); waits for the first one at most timeout_s."""
        received: list[tuple[bytes, list[Buffer]]] = []
        if not self._socket.poll(_ms(timeout_s), zmq.POLLIN):
            return received
        while len(received) < _DRAIN:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            received.append((peer.bytes, _lean(frames)))
        return received

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Hand frames to libzmq for a peer; never blocks. False: the peer is absent or too slow."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as exc:
            if exc.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise TransportError(f"cannot send to {peer!r}: {exc}") from exc
        return True

    def close(self) -> None:
        """Close; waits for unsent frames at most LINGER_MS."""
        self._socket.close()
        self._context.term()


class Client:
    """A DEALER socket connected to a Server under a stable identity. Use from one thread."""

    def __init__(self, address: str, identity: bytes) -> None:
        self.address = address
        self._context = zmq.Context()
        self._socket = _connect(self._context, address, identity)

    def send(self, frames: Sequence[Buffer], timeout_s: float = 10.0) -> None:
        """Hand frames to libzmq; waits for room at most timeout_s, then raises TransportError."""
        if not self._socket.poll(_ms(timeout_s), zmq.POLLOUT):
            raise _full(self.address, timeout_s)
        self._socket.send_multipart(list(frames), zmq.NOBLOCK, copy=False)

    def recv(self, timeout_s: float) -> list[Buffer] | None:
        """The next message, None after timeout_s."""
        if not self._socket.poll(_ms(timeout_s), zmq.POLLIN):
            return None
        return _lean(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def close(self) -> None:
        """Close; waits for unsent frames at most LINGER_MS."""
        self._socket.close()
        self._context.term()


class AsyncClient:
    """The same for asyncio: any number of senders, one receiver, one event loop."""

    def __init__(self, address: str, identity: bytes) -> None:
        self.address = address
        self._context = zmq.asyncio.Context()
        self._socket = _connect(self._context, address, identity)

    async def send(self, frames: Sequence[Buffer], timeout_s: float = 10.0) -> None:
        """Hand frames to libzmq; waits for room at most timeout_s, then raises TransportError."""
        try:
            # Not wait_for: on Python 3.11 it swallows a cancellation that meets its result.
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart(list(frames), copy=False)
        except TimeoutError as exc:
            raise _full(self.address, timeout_s) from exc

    async def recv(self, timeout_s: float) -> list[Buffer] | None:
        """The next message, None after timeout_s. Cancelling it loses no message."""
        # Poll first: a cancelled poll takes nothing from the socket, a cancelled receive might.
        if not await self._socket.poll(_ms(timeout_s), zmq.POLLIN):
            return None
        return _lean(await self._socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def close(self) -> None:
        """Close; waits for unsent frames at most LINGER_MS."""
        self._socket.close()
        self._context.term()


def _configure(socket: Any) -> None:
    socket.linger = LINGER_MS
    socket.ipv6 = True
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2000
    # A host that vanished without a goodbye is noticed and the connection made anew.
    socket.heartbeat_ivl = 10_000
    socket.heartbeat_timeout = 60_000


def _connect(context: Any, address: str, identity: bytes) -> Any:
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
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as exc:
        socket.close(0)
        context.term()
        raise TransportError(f"cannot connect to {address!r}: {exc}") from exc
    return socket


def _lean(frames: Sequence[Any]) -> list[Buffer]:
    """Frames as buffers. Copying the small ones also frees the receive buffer that they share."""
    return [f.bytes if len(f) <= LARGE_FRAME_BYTES else f.buffer for f in frames]


def _full(address: str, timeout_s: float) -> TransportError:
    return TransportError(f"no room to send to {address} for {timeout_s:g} s; the peer is gone or stuck")


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
