"""Worker processes that run foreign code: a fresh interpreter each, and our end of its socket pair.

A frame is a 4-byte little-endian length and that many bytes of JSON. The standard library only, since workers import
this as well. Knows nothing of rewards or environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import subprocess
import sys
from typing import Any

from asyncrl.errors import TaskError

_LENGTH = struct.Struct("<I")


def encode(message: Any) -> bytes:
    """JSON value to one frame."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Any:
    """JSON value of a frame's bytes. Half of a surrogate pair, which no message to replay can carry, becomes `?`."""
    message = json.loads(body)
    if b"\\ud" in body:
        message = json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))
    return message


def limit_memory(num_bytes: int) -> None:
    """Of this process: its address space from now on. Beyond it, foreign code gets a MemoryError."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes if hard < 0 else min(num_bytes, hard), hard))


class Channel:
    """Frames over one end of a socket pair, within an event loop. Whoever waits sets the timeout."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._buffer = bytearray()

    async def send(self, message: Any) -> None:
        """Send one frame; one task at a time. Waits for buffer space."""
        await asyncio.get_running_loop().sock_sendall(self.sock, encode(message))

    async def receive(self) -> Any:
        """The next frame; one task at a time. ConnectionError when the other end is closed."""
        while True:
            if len(self._buffer) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
                if len(self._buffer) >= end:
                    body = bytes(self._buffer[_LENGTH.size : end])
                    del self._buffer[:end]
                    return decode(body)
            data = await asyncio.get_running_loop().sock_recv(self.sock, 2**16)
            if not data:
                raise ConnectionResetError("the other end closed its socket")
            self._buffer += data


class Child:
    """One process `python -m MODULE FD PARENT_PID ARGUMENTS...`. It dies with the thread that started it."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Start it. Raises TaskError when the system starts no process."""
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        # The parent's import path, and the folder that asyncrl was started in: users' modules lie there.
        path = os.pathsep.join(dict.fromkeys([*(entry or os.getcwd() for entry in sys.path), os.getcwd()]))
        fd = theirs.fileno()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(fd), str(os.getpid()), *arguments],
                    pass_fds=(fd,),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path},
                )
            except OSError as exc:
                ours.close()
                raise TaskError(f"a worker process cannot be started: {exc}") from exc

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL and reap. The socket stays, so that a call that waits on it sees its end."""
        if self.process.poll() is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5.0)  # unblocked by the kernel; longer only in disk wait

    def close(self) -> None:
        """Kill and close the socket. Nobody may be waiting on it."""
        self.kill()
        self.channel.sock.close()


def first_word(child: Child, key: str, memory_bytes: int, timeout_s: float) -> dict[str, Any]:
    """What a worker says once it has imported the user's code; ends the worker. Waits at most timeout_s.

    key: the setting with its value. memory_bytes: its generator.reward_memory_bytes. Raises TaskError with the remedy
    when it says nothing in time, or dies.
    """
    try:
        return asyncio.run(_first_word(child, timeout_s))
    except TimeoutError as exc:
        raise TaskError(
            f"{key}: importing it took more than {timeout_s:g} s; import less, or later. It may also need more than "
            f"generator.reward_memory_bytes={memory_bytes}"
        ) from exc
    except ConnectionError as exc:
        child.kill()
        raise TaskError(
            f"{key}: the process that imported it died (exit status {child.process.returncode}); its output is above. "
            f"It may have needed more than generator.reward_memory_bytes={memory_bytes}"
        ) from exc
    finally:
        child.close()


async def _first_word(child: Child, timeout_s: float) -> dict[str, Any]:
    async with asyncio.timeout(timeout_s):
        first: dict[str, Any] = await child.channel.receive()
        return first
