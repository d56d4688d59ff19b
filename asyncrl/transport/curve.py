"""CURVE on sockets: who may connect is decided by the allow-list, who was refused is counted and logged once.

The serving side answers libzmq's questions (ZAP) in its own loop and ends the connections of revoked keys; the
connecting side says why it is refused and dials again. Logs public keys only.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections import Counter
from typing import Any

import zmq
from zmq.utils import z85

from asyncrl.transport.allowlist import AllowList
from asyncrl.transport.keys import ClientKeys, ServerKeys
from asyncrl.transport.meter import hang_up

log = logging.getLogger(__name__)

RELOAD_S = 1.0
"""Messages of a revoked client are refused this long after its file went, at the latest."""
REDIAL_S = 2.0
"""A client that was refused tries again this often."""
_PATIENCE = 3
"""A handshake may break once or twice because the server restarts; then the client says what is wrong."""
_BURST = 64
_MAX_LOGGED = 256
_MAX_PEERS = 2**16
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
# ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC and _MECHANISM_MISMATCH of zmq.h, which pyzmq does not name.
_CAUSES = {
    0x11000001: "a client pins another server key",
    0x11000002: "a client uses no keys (plaintext); set its security=curve",
}


class Guard:
    """Lets the clients of an allow-list through to a ROUTER. Make it before the socket is bound.

    refused: the counter for `refused_unknown_key`, `refused_revoked_key` and `refused_handshake`.
    """

    def __init__(self, context: Any, socket: Any, keys: ServerKeys, refused: Counter[str]) -> None:
        self._allow, self._refused = AllowList(keys.allowed), refused
        self._users: dict[bytes, str] = {}
        self._logged: set[str] = set()
        self._looked = time.monotonic()
        self._socket = socket
        self.zap = context.socket(zmq.REP)
        self.zap.linger = 0
        self.zap.bind("inproc://zeromq.zap.01")
        self.monitor = watch(context, socket)
        socket.curve_server = True
        socket.curve_secretkey = keys.secret
        socket.zap_domain = b"asyncrl"
        # Without this, a handler that is absent lets everybody in.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if not self._allow.names:
            log.warning("nobody is allowed to connect yet: %s is empty", keys.allowed)

    def serve(self) -> None:
        """Answer pending questions of libzmq and note broken handshakes. Never waits."""
        for _ in range(_BURST):
            try:
                request = self.zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.zap.send_multipart(self._answer(request))
        for event, value in events(self.monitor):
            if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                cause = _CAUSES.get(value, "the client broke off, or does not speak CURVE")
                self._refuse("handshake", str(value), f"a handshake failed: {cause}")

    def admits(self, peer: Any) -> bool:
        """True for a message whose sender is still allowed; else its connection is ended. peer: first frame."""
        self._reload()
        key = _user(peer)
        if key.encode() not in self._allow.names:
            name = self._allow.former.get(key.encode(), "?")
            self._refuse("revoked_key", key, f"client {name!r} was revoked: its connection is ended")
            _hang_up(peer)
            return False
        identity = peer.bytes
        if self._users.pop(identity, None) is None and len(self._users) >= _MAX_PEERS:
            del self._users[next(iter(self._users))]
        self._users[identity] = key
        return True

    def serves(self, identity: bytes) -> bool:
        """True for a peer that was heard and is still allowed."""
        self._reload()
        return self._users.get(identity, "").encode() in self._allow.names

    def close(self) -> None:
        """Close what belongs to the guard; before the guarded socket."""
        unwatch(self._socket, self.monitor)
        self.zap.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number, _domain, address, _identity, mechanism, *credentials = request
        self._allow.refresh()
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        if key in self._allow.names:
            return [version, number, b"200", b"OK", key, b""]
        text, where = key.decode(), address.decode(errors="replace").removeprefix("::ffff:")
        former = self._allow.former.get(key)
        if former is not None:
            self._refuse("revoked_key", text, f"client {former!r} from {where} was revoked")
        else:
            why = f"no client with the public key {text} is allowed (from {where}); `asyncrl keys add` allows one"
            self._refuse("unknown_key", text, why)
        return [version, number, b"400", b"not allowed", b"", b""]

    def _reload(self) -> None:
        now = time.monotonic()
        if now - self._looked >= RELOAD_S:
            self._looked = now
            self._allow.refresh()

    def _refuse(self, reason: str, who: str, text: str) -> None:
        self._refused[f"refused_{reason}"] += 1
        key = f"{reason} {who}"
        if key not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(key)
            log.warning("refused: %s (logged once and counted)", text)


class Watch:
    """A client's view of its handshakes. `tend` it whenever nothing arrives.

    reconnected: a connection was made after an earlier one; whoever reads that sets it back.
    After a refusal in words (a key not allowed, another mechanism) libzmq never dials again; this does.
    """

    def __init__(self, context: Any, socket: Any, endpoint: str, keys: ClientKeys | None) -> None:
        self._socket, self._endpoint, self._keys = socket, endpoint, keys
        self._monitor = watch(context, socket, _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._broken = 0
        self._connected = self.reconnected = False
        self._logged: set[str] = set()
        self._redial_at: float | None = None

    def tend(self) -> None:
        """Say once why the server refuses us, and dial again when it is time. Never waits."""
        now = time.monotonic()
        for event, _ in events(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.reconnected, self._connected = self._connected, True
                continue
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._redial_at = self._redial_at or now + REDIAL_S
            self._broken += 1
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._warn("the key of this client is not allowed there; `asyncrl keys add` allows it")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or self._broken >= _PATIENCE:
                self._warn(
                    "it demands keys (security=curve), or is another program"
                    if self._keys is None
                    else "its key is not the server.pub pinned here, or it runs without security=curve"
                )
        if self._redial_at is not None and now >= self._redial_at:
            self._redial_at = None
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def close(self) -> None:
        """Close; before the watched socket."""
        unwatch(self._socket, self._monitor)

    def _warn(self, why: str) -> None:
        if why not in self._logged:
            self._logged.add(why)
            client = f" client {self._keys.name!r} ({self._keys.public.decode()})" if self._keys else " this client"
            log.warning("%s refuses%s: %s (logged once; trying again)", self._endpoint, client, why)


def pin(socket: Any, keys: ClientKeys) -> None:
    """Make a socket prove its own key and accept one server key only. Before it connects."""
    socket.curve_serverkey = keys.server
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret


def watch(context: Any, socket: Any, which: int = _FAILED) -> Any:
    """A socket that gets these events of `socket`: its failed handshakes, unless others are named."""
    where = f"inproc://handshakes-{id(socket)}"
    socket.monitor(where, which)
    monitor = context.socket(zmq.PAIR, socket_class=zmq.Socket)
    monitor.linger = 0
    # No limit: a full queue of events would stop libzmq's I/O thread.
    monitor.rcvhwm = 0
    monitor.connect(where)
    return monitor


def unwatch(socket: Any, monitor: Any) -> None:
    """End what `watch` began. In this order: an event without a reader would stop the I/O thread."""
    socket.monitor(None, 0)
    monitor.close()


def events(monitor: Any) -> list[tuple[int, int]]:
    """Pending events as (number, value), a bounded number of them."""
    out: list[tuple[int, int]] = []
    while len(out) < _BURST:
        try:
            number, value = struct.unpack("=Hi", monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            break
        out.append((number, value))
    return out


def _user(frame: Any) -> str:
    """The public key that the sender of a frame proved to own."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _hang_up(frame: Any) -> None:
    """End the connection that a frame came from. Should it have ended: its messages are refused in any case."""
    with contextlib.suppress(zmq.ZMQError):
        hang_up(frame.get(zmq.SRCFD))
