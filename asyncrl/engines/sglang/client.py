"""JSON over HTTP to one server: keys, timeouts, and errors that say what was asked. Knows no path and no body.

Every call opens a connection of its own: servers close idle ones whenever they like, and a request that meets that
fails without anybody knowing whether it was served.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import weakref
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from asyncrl.errors import ConfigError, EngineError

_BUFFER = 2**20
"""Bytes read at a time: full routes of a long response are tens of megabytes."""
_MESSAGE = 500
"""Characters of a server's message that an error repeats."""


class Refused(EngineError):
    """The server answered, and said no: `status` (200 with success=false, or 3xx to 5xx) and its `message`."""

    def __init__(self, call: str, status: int, message: str) -> None:
        super().__init__(f"{call} was refused with {status}: {message or 'no reason given'}")
        self.status = status
        self.message = message


class Unreachable(EngineError):
    """No connection, a lost one, no answer in time, or an answer that is not of this API."""


class Client:
    """One server at http(s)://HOST[:PORT], with its keys.

    answer_s: longest wait for an answer when a call names none. It may be used from several event loops; each one
    closes its own connections. ConfigError for an URL that is not of that form.
    """

    def __init__(
        self, url: str, api_key: str | None = None, admin_key: str | None = None, answer_s: float = 60.0
    ) -> None:
        self.url = _checked(url)
        self.answer_s = answer_s
        self._api_key, self._admin_key = api_key, admin_key
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._closed: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    async def get(self, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        """The object that the server answers, {} for none. Waits for it, at most timeout_s (default answer_s)."""
        reply = await self._call("GET", path, None, timeout_s, admin=False)
        if reply is None:
            return {}
        if not isinstance(reply, dict):
            raise Unreachable(f"GET {self.url}{path} answered {type(reply).__name__}, not an object")
        return reply

    async def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None, admin: bool = False) -> Any:
        """What the server answers to body: JSON, plain text, or None for an empty answer.

        Waits for the whole answer, at most timeout_s (default answer_s, math.inf: as long as the connection holds).
        admin sends the admin key where there is one; other calls send the API key. Refused, Unreachable.
        """
        return await self._call("POST", path, json.dumps(body).encode(), timeout_s, admin)

    async def close(self) -> None:
        """Close the connections of the running event loop; its calls that still wait, and later ones, fail with
        Unreachable."""
        loop = asyncio.get_running_loop()
        # What is on its way to its end may ask once more, and would open connections that nobody closes.
        self._closed.add(loop)
        session = self._sessions.pop(loop, None)
        if session is not None:
            await session.close()

    async def _call(self, method: str, path: str, data: bytes | None, timeout_s: float | None, admin: bool) -> Any:
        limit = self.answer_s if timeout_s is None else timeout_s
        call = f"{method} {self.url}{path}"
        timeout = aiohttp.ClientTimeout(
            total=None if math.isinf(limit) else limit, sock_connect=min(limit, self.answer_s)
        )
        try:
            async with self._session().request(
                method, self.url + path, data=data, headers=self._headers(admin), timeout=timeout, allow_redirects=False
            ) as response:
                raw = await response.read()
        except TimeoutError as exc:
            # aiohttp's own text says which part of the call it was.
            wait = f"{limit:g} s" if not math.isinf(limit) else f"{self.answer_s:g} s for a connection"
            raise Unreachable(f"{call} gave no answer within {wait}: {self._clean(str(exc)) or 'silence'}") from exc
        except (aiohttp.ClientError, OSError) as exc:
            reason = self._clean(str(exc)) or "the connection was lost"
            raise Unreachable(f"{call} failed, waiting for its answer: {type(exc).__name__}: {reason}") from exc
        reply = self._parsed(call, response.status, response.content_type, raw)
        if response.status != 200 or (isinstance(reply, dict) and reply.get("success") is False):
            raise Refused(call, response.status, self._clean(_message(reply)))
        return reply

    def _parsed(self, call: str, status: int, content_type: str, raw: bytes) -> Any:
        if not raw:
            return None
        try:
            return json.loads(raw)
        except ValueError as exc:
            # Some answers are for people, and name no type (octet-stream): "Cache flushed."
            if content_type in ("text/plain", "application/octet-stream") or status != 200:
                return raw.decode(errors="replace")
            start = self._clean(raw[:80].decode(errors="replace"))
            raise Unreachable(f"{call} answered {status} with {content_type} that is not JSON: {start!r}") from exc

    def _session(self) -> aiohttp.ClientSession:
        """The session of the running loop. No proxy from the environment: servers are reached directly."""
        loop = asyncio.get_running_loop()
        if loop in self._closed:
            raise Unreachable(f"{self.url}: the connections of this event loop are closed")
        session = self._sessions.get(loop)
        if session is None or session.closed:
            connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket)
            session = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=_BUFFER)
            self._sessions[loop] = session
        return session

    def _headers(self, admin: bool) -> dict[str, str]:
        key = (self._admin_key if admin else None) or self._api_key
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": f"Bearer {key}"} if key else headers

    def _clean(self, text: str) -> str:
        """A text from outside, short and without our keys."""
        for key in (self._api_key, self._admin_key):
            if key:
                text = text.replace(key, "***")
        return text[:_MESSAGE]


def _checked(url: str) -> str:
    """The URL without a closing slash. ConfigError when it names no server."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or out of range
        good = False
    if not good or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        # What stands before an @ would be a password.
        shown = url if "@" not in url else "with user and password"
        raise ConfigError(f"server URL {shown!r}: expected http://HOST:PORT or https://HOST:PORT, nothing else")
    return url.rstrip("/")


def _message(reply: Any) -> str:
    """The reason in a refusal, whichever of its forms it has."""
    if isinstance(reply, dict):
        for key in ("message", "error", "detail"):
            if reply.get(key):
                return _message(reply[key])
    return "" if reply is None else str(reply)


def _socket(address: Any) -> socket.socket:
    """A socket whose silence is noticed: what stands between may forget a connection while a long response runs."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return made
