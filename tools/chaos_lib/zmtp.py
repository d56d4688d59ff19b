"""Reads along on a ZMTP 3 connection (mechanism NULL): whole messages out of a stream of bytes.

Only what a witness needs: commands are skipped, and of every message only the first KEPT frames are kept.
"""

from __future__ import annotations

from typing import NamedTuple

GREETING = 64
KEPT = 2
_MORE, _LONG, _COMMAND = 1, 2, 4


class Message(NamedTuple):
    """The first frames of a message, and the bytes of all of them."""

    frames: list[bytes]
    num_bytes: int


class Witness:
    """One direction of one connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeted = False
        self._frames: list[bytes] = []
        self._num_bytes = 0

    def feed(self, data: bytes) -> list[Message]:
        """More bytes; returns the messages that they complete."""
        self._buffer += data
        done: list[Message] = []
        if not self._greeted:
            if len(self._buffer) < GREETING:
                return done
            del self._buffer[:GREETING]
            self._greeted = True
        at = 0
        while (frame := self._frame(at)) is not None:
            start, end, flags = frame
            at = end
            if flags & _COMMAND:
                continue
            if len(self._frames) < KEPT:
                self._frames.append(bytes(self._buffer[start:end]))
            self._num_bytes += end - start
            if not flags & _MORE:
                done.append(Message(self._frames, self._num_bytes))
                self._frames, self._num_bytes = [], 0
        del self._buffer[:at]
        return done

    def _frame(self, at: int) -> tuple[int, int, int] | None:
        """Start and end of the body of the frame at `at`, and its flags; None while it is not whole."""
        if len(self._buffer) < at + 2:
            return None
        flags = self._buffer[at]
        head = 9 if flags & _LONG else 2
        if len(self._buffer) < at + head:
            return None
        size = int.from_bytes(self._buffer[at + 1 : at + head])
        start = at + head
        return (start, start + size, flags) if len(self._buffer) >= start + size else None
