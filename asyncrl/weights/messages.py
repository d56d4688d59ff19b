"""Messages of the `zmq` carrier. Knows no socket.

Frames of a message: seal (xxh3 of what follows) + msgpack struct, and after a Chunk the bytes of that chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import xxhash

from asyncrl.weights.flat import Spec

SCHEME = "zmq://"
"""Start of a source string; the address of the publisher follows."""

Buffer = bytes | bytearray | memoryview
Label = tuple[int, int]

_SEAL = struct.Struct("<Q")


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Look(_Message):
    """Request: the Head of this version."""

    version: Label


class Get(_Message):
    """Request: a chunk of one stream of an offer. Stream 0 is the version, i the i-th delta of its chain."""

    serial: int
    stream: int
    chunk: int


class Probe(_Message):
    """Request: the versions that are there. Its answer also says that all earlier requests were handled."""

    token: int


class Link(msgspec.Struct, array_like=True):
    """One delta: from version base to the one that was published after it."""

    base: Label
    nbytes: int
    digests: tuple[int, ...]


class Head(_Message):
    """All of a version but its bytes. Offsets follow from the specs; digests are xxh3 of the chunks."""

    boot: str
    serial: int
    version: Label
    specs: tuple[Spec, ...]
    nbytes: int
    digests: tuple[int, ...]
    checksum: int
    chain: tuple[Link, ...]


class Chunk(_Message):
    """Goes before the bytes of one chunk."""

    boot: str
    serial: int
    stream: int
    chunk: int


class Kept(_Message):
    """Answer to a Probe; token None: what was asked for is not there. Versions in order of publication."""

    boot: str
    token: int | None
    versions: tuple[Label, ...]


Request = Look | Get | Probe
Reply = Head | Chunk | Kept

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def seal(message: msgspec.Struct) -> bytes:
    """The frame of a message."""
    body = _encoder.encode(message)
    return _SEAL.pack(xxhash.xxh3_64_intdigest(body)) + body


def open_request(frames: Sequence[Buffer]) -> Request | None:
    """The request, None for anything else that came in."""
    body = unsealed(frames[0]) if len(frames) == 1 else None
    try:
        return _requests.decode(body) if body is not None else None
    except msgspec.MsgspecError:
        return None


def open_reply(frames: Sequence[Buffer]) -> Reply | None:
    """The reply, None for damaged or unknown frames. Only a Chunk has a second frame."""
    body = unsealed(frames[0]) if frames else None
    try:
        reply = _replies.decode(body) if body is not None else None
    except msgspec.MsgspecError:
        return None
    return reply if len(frames) == (2 if isinstance(reply, Chunk) else 1) else None


def unsealed(frame: Buffer) -> memoryview | None:
    """The encoded message in a frame, None when it is damaged or no such frame."""
    view = memoryview(frame)
    if len(view) < _SEAL.size:
        return None
    (want,) = _SEAL.unpack_from(view)
    body = view[_SEAL.size :]
    return body if xxhash.xxh3_64_intdigest(body) == want else None
