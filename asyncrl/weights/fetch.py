"""The reading side of the `zmq` carrier: pull a version in chunks, or the difference to one at hand.

Every chunk is verified in its final place, so a base that was not what it claimed to be, and damage on the way, cost
a second request of the chunks concerned and never reach the caller. Replies on one connection come in the
order of the requests: the answer to a probe tells which earlier requests were lost.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import TransportError, VersionGone, WeightSyncError
from asyncrl.transport.keys import ClientKeys
from asyncrl.transport.sockets import Client
from asyncrl.types import Version
from asyncrl.weights import delta
from asyncrl.weights.flat import CHUNK_BYTES, DTYPES, Entry, Flat, chunk, combined, lay_out, num_chunks, pack, size_of
from asyncrl.weights.messages import (
    SCHEME,
    Buffer,
    Chunk,
    Get,
    Head,
    Kept,
    Look,
    Probe,
    Reply,
    Request,
    open_reply,
    seal,
)

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""Longest time without progress."""

ANSWER_S = 5.0
"""The same until the first answer: a publisher that lives answers in milliseconds, one that was killed never."""

CREDIT = 8
"""Chunks asked for and not yet received."""

PROBE_S = 1.0
"""Silence after which a reader asks again, or asks what was lost."""

MAX_DAMAGED = 3
"""Times that one chunk may arrive damaged before the read fails."""


class Base(NamedTuple):
    """A version that the receiver has, as it was read."""

    version: Version
    weights: Mapping[str, Tensor]


def read(
    source: str,
    version: Version,
    base: Base | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    keys: ClientKeys | None = None,
) -> dict[str, Tensor]:
    """The tensors of version by name, in one buffer that belongs to the caller.

    base: the difference to it is fetched where the publisher offers one; it is left as it is. timeout_s:
    longest time without progress. keys: for a publisher with security curve. WeightSyncError, naming the
    phase, when the publisher is silent, does not have the version, drops it or is replaced meanwhile,
    or when bytes stay damaged.
    """
    with closing(_Line(source, timeout_s, keys)) as line:
        head = line.head(version)
        entries = _checked(head, f"version {version} of {source}")
        data = _from_base(line, head, entries, base) if base is not None else None
        if data is None:
            data, missing = _buffer(head.nbytes), list(range(num_chunks(head.nbytes)))
        else:
            found = Flat(entries, data).digests
            missing = [i for i, digest in enumerate(found) if digest != head.digests[i]]
            if missing:
                log.warning(
                    "version %s: %d chunks differ after the delta; they are fetched whole", version, len(missing)
                )
        line.fetch(head, 0, data, head.digests, missing)
    return Flat(entries, data).views()


def newest(source: str, timeout_s: float = TIMEOUT_S, keys: ClientKeys | None = None) -> Version | None:
    """The newest version that the publisher has, None before the first. WeightSyncError after timeout_s of silence."""
    with closing(_Line(source, timeout_s, keys)) as line:
        labels = line.kept()
    return Version(*labels[-1]) if labels else None


class _Line:
    """One connection to a publisher, for one read."""

    def __init__(self, source: str, timeout_s: float, keys: ClientKeys | None) -> None:
        if not source.startswith(SCHEME):
            raise WeightSyncError(f"{source!r} is not a source of the zmq carrier")
        self._source, self._timeout_s = source, timeout_s
        self._boot: str | None = None
        self._clock = 0
        self._progress = time.monotonic()
        try:
            # A name of its own: what is still on its way to an earlier read must not arrive here.
            self._client = Client(source.removeprefix(SCHEME), b"w" + uuid.uuid4().bytes, keys)
        except TransportError as exc:
            raise WeightSyncError(f"cannot connect to {source}: {exc}") from exc

    def close(self) -> None:
        self._client.close()

    def kept(self) -> tuple[tuple[int, int], ...]:
        """Labels of the versions that can be read."""
        self._ask(Probe(0))
        while True:
            match self._next("the list of versions"):
                case None:
                    self._ask(Probe(0))
                case Kept(token=0, versions=versions), _:
                    return versions

    def head(self, version: Version) -> Head:
        """What the version consists of."""
        wanted = (version.epoch, version.update)
        self._ask(Look(wanted))
        while True:
            match self._next(f"the header of version {version}"):
                case None:
                    self._ask(Look(wanted))
                case Kept(token=None) as kept, _:
                    raise VersionGone(f"version {version} is not offered by {self._source}; {_list(kept)}")
                case Head() as head, _ if head.version == wanted:
                    self._boot, self._progress = head.boot, time.monotonic()
                    return head

    def fetch(
        self, head: Head, stream: int, out: NDArray[np.uint8], digests: tuple[int, ...], missing: Iterable[int]
    ) -> None:
        """Fill the missing chunks of out; returns when all of them match their digests."""
        todo, flying, damaged = deque(missing), dict[int, int](), Counter[int]()
        total, self._progress = len(todo), time.monotonic()
        while todo or flying:
            while todo and len(flying) < CREDIT:
                self._clock += 1
                flying[todo[0]] = self._clock
                self._ask(Get(head.serial, stream, todo.popleft()))
            of = f"{'delta ' if stream else ''}version {Version(*head.version)}"
            done = f"{total - len(todo) - len(flying)} of {total} chunks of {of}"
            match self._next(done):
                case None:
                    self._clock += 1
                    self._ask(Probe(self._clock))
                case Kept(token=None) as kept, _:
                    raise VersionGone(f"version dropped by {self._source} after {done}; {_list(kept)}")
                case Kept(token=int(token)), _:
                    lost = [i for i, asked in flying.items() if asked < token]
                    todo.extendleft(lost)
                    flying = {i: asked for i, asked in flying.items() if i not in lost}
                case Chunk(chunk=i) as reply, data if (reply.serial, reply.stream) == (
                    head.serial,
                    stream,
                ) and i in flying:
                    del flying[i]
                    if _place(data, chunk(out, i), digests[i]):
                        self._progress = time.monotonic()
                        continue
                    damaged[i] += 1
                    if damaged[i] == MAX_DAMAGED:
                        raise WeightSyncError(f"chunk {i} of {of} from {self._source} is damaged, {MAX_DAMAGED} times")
                    log.warning("chunk %d of %s from %s is damaged; asked for again", i, of, self._source)
                    todo.appendleft(i)

    def _ask(self, request: Request) -> None:
        try:
            self._client.send([seal(request)], self._timeout_s)
        except TransportError as exc:
            raise WeightSyncError(f"cannot ask {self._source}: {exc}") from exc

    def _next(self, what: str) -> tuple[Reply, Buffer] | None:
        """The next valid reply and its bytes, None after PROBE_S. what: what is waited for, or how far it got."""
        limit_s = min(ANSWER_S, self._timeout_s) if self._boot is None else self._timeout_s
        deadline = min(time.monotonic() + PROBE_S, self._progress + limit_s)
        while (left := deadline - time.monotonic()) > 0:
            frames = self._client.recv(left)
            reply = open_reply(frames) if frames else None
            if reply is None or frames is None:
                continue
            if self._boot is not None and reply.boot != self._boot:
                raise VersionGone(
                    f"the publisher {self._source} was replaced after {what}; look for its newest version"
                )
            return reply, frames[-1]
        if time.monotonic() - self._progress >= limit_s:
            raise VersionGone(f"{self._source}: no progress for {limit_s:g} s at {what}")
        return None


def _place(data: Buffer, out: NDArray[np.uint8], digest: int) -> bool:
    """Copy a chunk where it belongs and hash it there; False when it is not the one."""
    if len(data) != out.nbytes:
        return False
    out[:] = np.frombuffer(data, np.uint8)
    return bool(xxhash.xxh3_64_intdigest(out.data) == digest)


def _from_base(line: _Line, head: Head, entries: tuple[Entry, ...], base: Base) -> NDArray[np.uint8] | None:
    """What the deltas make of base, not verified yet; None where there are none for it."""
    known = [i for i, link in enumerate(head.chain) if link.base == (base.version.epoch, base.version.update)]
    if not known or not _fits(entries, base.weights):
        return None
    # First all that the publisher must hold the version for.
    deltas = []
    for number in range(known[0], len(head.chain)):
        link = head.chain[number]
        deltas.append(_buffer(link.nbytes))
        line.fetch(head, number + 1, deltas[-1], link.digests, range(len(link.digests)))
    flat = pack((entry.name, base.weights[entry.name]) for entry in entries)
    try:
        for encoded in deltas:
            delta.patch(entries, flat.data, encoded.data)
    except WeightSyncError as exc:
        log.warning("version %s is fetched whole: %s", Version(*head.version), exc)
        return None
    return flat.data


def _fits(entries: tuple[Entry, ...], weights: Mapping[str, Tensor]) -> bool:
    return len(entries) == len(weights) and all(
        e.name in weights and weights[e.name].dtype == DTYPES[e.dtype] and tuple(weights[e.name].shape) == e.shape
        for e in entries
    )


def _checked(head: Head, what: str) -> tuple[Entry, ...]:
    """The layout of a version whose header agrees with itself."""
    entries = lay_out(head.specs)
    streams = [(head.nbytes, head.digests), *((link.nbytes, link.digests) for link in head.chain)]
    if (
        size_of(entries) != head.nbytes
        or any(num_chunks(nbytes) != len(digests) for nbytes, digests in streams)
        or combined(entries, head.nbytes, head.digests) != head.checksum
    ):
        raise WeightSyncError(f"{what}: the header contradicts itself")
    return entries


def _buffer(nbytes: int) -> NDArray[np.uint8]:
    try:
        return np.empty(nbytes, np.uint8)
    except (MemoryError, ValueError) as exc:
        raise WeightSyncError(f"no memory for {nbytes / CHUNK_BYTES:.0f} chunks") from exc


def _list(kept: Kept) -> str:
    return f"it has {', '.join(str(Version(*v)) for v in kept.versions) or 'none yet'}"
