"""Messages of the `collective` carrier: between generators and the learner, and between the learner and its senders.

Generators and the learner exchange one sealed msgpack frame each (weights.messages.seal), the learner and its senders
lines of JSON. Knows no socket and no process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from asyncrl.types import Version
from asyncrl.weights.flat import Spec
from asyncrl.weights.messages import Buffer, Label, unsealed

SCHEME = "collective://"
"""Start of a source string; HOST:PORT of the publisher follow."""

MAX_RANKS = 4096
"""Processes of one engine."""

ENGINE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
"""Names of engines."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Join(_Message):
    """Request: send a version to the `ranks` processes of an engine. token: the same when it is asked again.

    held: name of the group that the engine is in, "" for none; the publisher makes a new one unless it has the same.
    """

    token: str
    engine: str
    ranks: int
    version: Label
    held: str = ""


class Leave(_Message):
    """Request: end what the Join of that token began, unless a newer one came."""

    token: str
    engine: str


class Hash(_Message):
    """Request: what the engine's checksums of these tensors may be."""

    token: str
    engine: str
    version: Label
    names: tuple[str, ...]
    ranks: int


class Wait(_Message):
    """Answer: the request is here and being worked on."""

    token: str


class Joined(_Message):
    """Answer to a Join: sending begins, as soon as the engine is in the group."""

    token: str
    group: str
    port: int
    backend: str
    is_new: bool
    buckets: tuple[tuple[Spec, ...], ...]


class Hashes(_Message):
    """Answer to a Hash."""

    token: str
    sums: dict[str, tuple[str, ...]]


class Gone(_Message):
    """Answer: that version is not there. versions: those that are, in the order of their publication."""

    token: str
    versions: tuple[Label, ...]


class Failed(_Message):
    """Answer: it went wrong, and the group of that engine is gone."""

    token: str
    why: str


class Left(_Message):
    """Answer to a Leave."""

    token: str


Request = Join | Leave | Hash
Reply = Wait | Joined | Hashes | Gone | Failed | Left


class _Line(msgspec.Struct, tag=True):
    pass


class Setup(_Line):
    """Order, the first: whom to send to. host: numeric, the address to listen at. device: where nccl stages."""

    host: str
    group: str
    ranks: int
    backend: str
    device: str
    bucket_bytes: int
    timeout_s: float


class Send(_Line):
    """Order: send the version that lies at path."""

    version: Label
    path: str


class Sum(_Line):
    """Order: what an engine's checksums of the version sent last may be. It is read again after a Release."""

    names: tuple[str, ...]
    ranks: int


class Release(_Line):
    """Order: let go of the memory of the version sent last."""


class Planned(_Line):
    """Report: the version is mapped and will be sent like this. port: of the group's store."""

    port: int
    buckets: tuple[tuple[Spec, ...], ...]


class Progress(_Line):
    """Report: what is waited for now."""

    phase: str


class Sent(_Line):
    """Report: all buckets are on their way."""


class Summed(_Line):
    """Report: the answer to a Sum."""

    sums: dict[str, tuple[str, ...]]


class Refused(_Line):
    """Report: the order was not carried out, the group is as it was. gone: the version is not there any more."""

    why: str
    gone: bool


class Broken(_Line):
    """Report, the last: the group is unusable."""

    why: str


Order = Setup | Send | Sum | Release
Report = Planned | Progress | Sent | Summed | Refused | Broken

_json = msgspec.json.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_orders = msgspec.json.Decoder(Order)
_reports = msgspec.json.Decoder(Report)
_T = TypeVar("_T")


def label(version: Version) -> Label:
    """A version as it travels."""
    return version.epoch, version.update


def line(message: Order | Report) -> bytes:
    """One line for or from a sender."""
    return _json.encode(message) + b"\n"


def order(text: bytes) -> Order:
    """The order of a line. msgspec.MsgspecError for anything else."""
    return _orders.decode(text)


def report(text: bytes) -> Report:
    """The report of a line. msgspec.MsgspecError for anything else."""
    return _reports.decode(text)


def open_request(frames: Sequence[Buffer]) -> Request | None:
    """The request, None for anything else that came in."""
    request = _open(frames, _requests)
    if request is None or not ENGINE.fullmatch(request.engine):
        return None
    return None if isinstance(request, Join | Hash) and not 1 <= request.ranks <= MAX_RANKS else request


def open_reply(frames: Sequence[Buffer]) -> Reply | None:
    """The reply, None for damaged or unknown frames."""
    return _open(frames, _replies)


def _open(frames: Sequence[Buffer], decoder: msgspec.msgpack.Decoder[_T]) -> _T | None:
    body = unsealed(frames[0]) if len(frames) == 1 else None
    try:
        return decoder.decode(body) if body is not None else None
    except msgspec.MsgspecError:
        return None
