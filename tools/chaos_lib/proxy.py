"""A TCP proxy that is a bad network: latency, a narrow link, partitions in one or both directions, resets.

Bytes are late or held, never lost or changed, as on a real TCP connection. It listens in a thread of its own; its
weather may be changed from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chaos_lib.zmtp import Message, Witness

READ = 2**16
HELD_BYTES = 2**23
"""What a direction may hold before the sender feels it."""
TICK_S = 0.02

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Weather:
    """One direction. held_until is a time.monotonic(); rate is in bytes/s, 0 for no limit."""

    latency_s: float = 0.0
    rate: float = 0.0
    held_until: float = 0.0


@dataclass(slots=True)
class Pipe:
    """Bytes under way in one direction, with the time at which they arrive; None is the end."""

    weather: Weather
    parts: deque[tuple[float, bytes | None]] = field(default_factory=deque)
    num_bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, data: bytes | None) -> None:
        """Bytes set out."""
        self.parts.append((time.monotonic() + self.weather.latency_s, data))
        self.num_bytes += len(data or b"")
        self.changed.set()

    async def get(self) -> bytes | None:
        """The next bytes once they may arrive."""
        while not self.parts:
            self.changed.clear()
            await self.changed.wait()
        at, data = self.parts[0]
        while (wait := max(at, self.weather.held_until) - time.monotonic()) > 0:
            await asyncio.sleep(min(wait, TICK_S))
        self.parts.popleft()
        self.num_bytes -= len(data or b"")
        return data


class Network:
    """The event loop of all proxies, in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def call(self, coroutine, timeout_s: float = 10.0):
        """Run a coroutine there and wait for it, at most timeout_s."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        """End the loop; the proxies must be closed before."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class Proxy:
    """Listens on `port` of loopback and passes everything to `target`, a port there.

    witness(tag, message) hears of every whole ZMTP message when it was read from its sender, before it is
    delivered. tag() is asked once per connection, when the far side has accepted it.
    """

    def __init__(
        self,
        network: Network,
        target: int,
        *,
        tag: Callable[[], tuple[int, int]] = lambda: (0, 0),
        witness: Callable[[tuple[int, int], Message], None] | None = None,
    ) -> None:
        self.up, self.down = Weather(), Weather()
        self._network, self._target, self._tag, self._witness = network, target, tag, witness
        self._open: set[asyncio.Task[None]] = set()
        self._sockets: set[asyncio.StreamWriter] = set()
        self._server = network.call(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=READ))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._open)

    def reset(self) -> None:
        """Reset every connection, as a firewall does that forgot them."""
        self._network.loop.call_soon_threadsafe(self._abort)

    def calm(self) -> None:
        """Good weather in both directions."""
        for weather in (self.up, self.down):
            weather.latency_s = weather.rate = weather.held_until = 0.0

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._network.call(self._close())

    async def _close(self) -> None:
        self._server.close()
        self._abort()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _abort(self) -> None:
        for writer in list(self._sockets):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            far = await asyncio.open_connection("127.0.0.1", self._target, limit=READ)
            await self._bridge((reader, writer), far)
        except (OSError, asyncio.CancelledError):
            # Nobody listens there, or the proxy is closed; asyncio would log either.
            _reset(writer)
        finally:
            self._open.discard(task)

    async def _bridge(self, near: Stream, far: Stream) -> None:
        (reader, writer), (far_reader, far_writer) = near, far
        pair = {writer, far_writer}
        self._sockets |= pair
        tag = self._tag()
        up, down = Pipe(self.up), Pipe(self.down)
        jobs = [
            asyncio.ensure_future(job)
            for job in (
                self._read(reader, up, tag), _write(up, far_writer),
                self._read(far_reader, down, tag), _write(down, writer),
            )
        ]  # fmt: skip
        try:
            # A side that ended is heard of by the other one when its last bytes have arrived there.
            await asyncio.wait({jobs[1], jobs[3]}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            self._sockets -= pair
            # close sends what is still buffered, where anybody listens
            for end in pair:
                with contextlib.suppress(OSError):
                    end.close()

    async def _read(self, reader: asyncio.StreamReader, pipe: Pipe, tag: tuple[int, int]) -> None:
        witness = Witness()
        with contextlib.suppress(ConnectionError, OSError):
            while data := await reader.read(READ):
                for message in witness.feed(data):
                    if self._witness is not None:
                        self._witness(tag, message)
                pipe.put(data)
                while pipe.num_bytes > HELD_BYTES:
                    await asyncio.sleep(TICK_S)
        pipe.put(None)


async def _write(pipe: Pipe, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, OSError):
        while (data := await pipe.get()) is not None:
            writer.write(data)
            await writer.drain()
            if pipe.weather.rate:
                await asyncio.sleep(len(data) / pipe.weather.rate)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
