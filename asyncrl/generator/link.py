"""A generator's connection to replay: says Hello, notices silence, follows replay to a new address.

Knows messages as records and nothing of leases or engines. One task receives; any task may send.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl import wire
from asyncrl.arrays import Buffer
from asyncrl.errors import TransportError, WireError
from asyncrl.transport.rendezvous import wait_for_address
from asyncrl.transport.sockets import AsyncClient

log = logging.getLogger(__name__)

POLL_S = 1.0
PING_S = 3.0
"""Replay is asked for nothing, which it answers, after this much silence."""
SILENCE_S = 10.0
"""Replay counts as gone after this much silence; Hello is said until it is back."""


class Link:
    """Connects at once; waits for replay's address file at most limit_s.

    limit_s also bounds how long replay may be silent: TransportError after.
    """

    def __init__(self, file: Path, identity: bytes, hello: Callable[[], wire.Hello], limit_s: float) -> None:
        self._file, self._identity, self._hello, self._limit_s = file, identity, hello, limit_s
        self._address = wait_for_address(file, limit_s)
        self._client = AsyncClient(self._address, identity)
        self._heard_at = time.monotonic()
        self.welcomed = False

    async def send(self, frames: list[Buffer]) -> None:
        """Hand frames to the socket; TransportError when there is no room for 10 s."""
        await self._client.send(frames)

    async def hello(self) -> None:
        """Announce this generator; replay answers with the newest version."""
        await self.send(wire.encode(self._hello()))

    async def next(self) -> wire.Message | None:
        """The next message, None after a second without one. Tends the connection meanwhile."""
        frames = await self._client.recv(POLL_S)
        if frames is None:
            await self._tend(time.monotonic())
            return None
        self._heard_at = time.monotonic()
        try:
            message = wire.decode(frames)
        except WireError as exc:
            log.warning("refused a message: %s", exc)
            return None
        self.welcomed = self.welcomed or isinstance(message, wire.Welcome)
        return message

    async def _tend(self, now: float) -> None:
        silent = now - self._heard_at
        if silent > self._limit_s:
            raise TransportError(
                f"replay at {self._address} was silent for {silent:.0f} s (run.start_timeout_s={self._limit_s:g}); "
                "is it running?"
            )
        if self.welcomed and silent > SILENCE_S:
            log.warning("replay at %s is silent for %.0f s; saying Hello until it is back", self._address, silent)
            self.welcomed = False
        if not self.welcomed:
            self._follow()
            await self.hello()
        elif silent > PING_S:
            held = self._hello().held
            await self.send(wire.encode(wire.LeaseRequest(held or (0, 0), 0, 0)))

    def _follow(self) -> None:
        """A replay that was started again publishes another address."""
        address = self._file.read_text().strip() if self._file.is_file() else ""
        if address and address != self._address:
            log.info("replay moved from %s to %s", self._address, address)
            self._client.close()
            self._address, self._client = address, AsyncClient(address, self._identity)

    def close(self) -> None:
        """Close the socket; unsent frames get a bounded time to leave."""
        self._client.close()
