"""One reward worker process: `python -m asyncrl.tasks.worker FD PARENT_PID MODULE:FUNCTION`.

Reads batches of [source, text, answer] from the socket FD and sends one reply per item, in order,
so that the pool can time every item by itself. Imports the standard library and the verifier only.
A frame is a 4-byte little-endian length and that many bytes of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from asyncrl.parent import serve_only

LENGTH = struct.Struct("<I")


def encode(message: Any) -> bytes:
    """JSON value to one frame."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def main(argv: list[str]) -> int:
    """Serve until the pool closes its end or dies. Returns the exit status."""
    fd, parent, scorer = int(argv[1]), int(argv[2]), argv[3]
    # Where the kernel does not see to it, only an idle worker notices the end of the pool, by its socket.
    serve_only(parent)
    module, _, function = scorer.partition(":")
    score: Callable[[str, str, str], float] = getattr(importlib.import_module(module), function)
    with socket.socket(fileno=fd) as sock:
        sock.sendall(encode({"ready": os.getpid()}))
        # Waits for the next batch; unblocked by the pool closing its end (also when it is killed).
        while (items := _receive(sock)) is not None:
            for source, text, answer in items:
                sock.sendall(encode(_reply(score, source, text, answer)))
    return 0


def _reply(score: Callable[[str, str, str], float], source: str, text: str, answer: str) -> dict[str, Any]:
    try:
        return {"reward": float(score(source, text, answer))}
    except Exception as exc:  # verifiers are foreign code; the pool counts it and never sees a 0
        return {"error": f"{type(exc).__name__}: {str(exc)[:500]}"}


def _receive(sock: socket.socket) -> Any:
    head = _read(sock, LENGTH.size)
    if head is None:
        return None
    body = _read(sock, LENGTH.unpack(head)[0])
    return None if body is None else json.loads(body)


def _read(sock: socket.socket, count: int) -> bytes | None:
    """Exactly `count` bytes, or None when the pool closed its end."""
    data = bytearray()
    while len(data) < count:
        try:
            part = sock.recv(min(count - len(data), 2**20))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
