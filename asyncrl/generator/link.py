"""A generator's connection to replay: says Hello, notices silence, follows replay to a new address.

Knows messages as records and nothing of leases or engines. One task receives; any task may send.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from asyncrl import wire
from asyncrl.arrays import Buffer
from asyncrl.errors import TransportError, WireError
from asyncrl.transport.keys import ClientKeys
from asyncrl.transport.rendezvous import Place, address_at, wait_for_address
from asyncrl.transport.sockets import AsyncClient

log = logging.getLogger(__name__)

POLL_S = 1.0
PING_S = 3.0
"""Replay is asked for nothing, which it answers, after this much silence."""
SILENCE_S = 10.0
"""Replay counts as gone after this much silence; Hello is said until it is back."""
SEND_S = 10.0
"""Longest wait for room for a message; it is dropped then."""
REMIND_S = 60.0
"""Hello is said this often in any case: it heals whatever answers of replay got lost unnoticed."""


class Link:
    """Connects at once; waits for replay's address file, when `place` is one, at most limit_s.

    limit_s also bounds how long replay may be silent: TransportError after.
    """

    def __init__(
        self,
        place: Place,
        identity: bytes,
        hello: Callable[[], wire.Hello],
        limit_s: float,
        keys: ClientKeys | None = None,
    ) -> None:
        self._place, self._identity, self._hello, self._limit_s, self._keys = place, identity, hello, limit_s, keys
        self._address = wait_for_address(place, limit_s)
        self._client = AsyncClient(self._address, identity, keys)
        self._heard_at, self._rejoined_at = time.monotonic(), 0.0
        self._tended_at = self._introduced_at = self._heard_at
        self.welcomed = False

    async def send(self, frames: list[Buffer]) -> None:
        """Hand frames to the socket. Dropped when there is no room for SEND_S: what matters is said again."""
        client = self._client
        try:
            await client.send(frames, SEND_S)
        except TransportError as exc:
            # How long replay may be out of reach is decided by its silence.
            log.warning("a message to replay was dropped: %s", exc)
        except asyncio.CancelledError:
            # Following replay closes the old socket, which cancels the sends that wait there; those are lost.
            task = asyncio.current_task()
            if client is self._client or (task is not None and task.cancelling()):
                raise

    async def hello(self) -> None:
        """Announce this generator; replay answers with the newest version."""
        self._introduced_at = time.monotonic()
        await self.send(wire.encode(self._hello()))

    async def next(self) -> wire.Message | None:
        """The next message, None after a second without one. Tends the connection meanwhile."""
        frames = await self._client.recv(POLL_S)
        now = time.monotonic()
        if frames is not None:
            self._heard_at = now
        if frames is None or now - self._tended_at >= POLL_S:
            self._tended_at = now
            await self._tend(now)
        if frames is None:
            return None
        try:
            message = wire.decode(frames)
        except WireError as exc:
            log.warning("refused a message: %s", exc)
            return None
        if isinstance(message, wire.Rejoin):
            await self._rejoin(time.monotonic())
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
        new = self._follow()
        # What was on its way when a connection broke is lost on both sides.
        if self._client.reconnected() or new or not self.welcomed or now - self._introduced_at > REMIND_S:
            await self.hello()
        elif silent > PING_S:
            held = self._hello().held
            await self.send(wire.encode(wire.LeaseRequest(held or (0, 0), 0, 0)))

    async def _rejoin(self, now: float) -> None:
        """A replay that was started again at the same address asks for it, once for every message that it gets."""
        if now - self._rejoined_at > POLL_S:
            self._rejoined_at, self.welcomed = now, False
            await self.hello()

    def _follow(self) -> bool:
        """A replay that was started again publishes another address. True when this one is new."""
        address = address_at(self._place)
        if address and address != self._address:
            log.info("replay moved from %s to %s", self._address, address)
            old, self.welcomed = self._client, False
            self._address, self._client = address, AsyncClient(address, self._identity, self._keys)
            old.leave()  # at once: what was meant for the old replay is sent again to the new one
            return True
        return False

    def leave(self) -> None:
        """Close without waiting for a replay that does not answer."""
        self._client.leave()

    async def close(self) -> None:
        """Close the socket; unsent frames get a bounded time to leave."""
        await self._client.close()
