"""What replay says to peers that it does not serve: refused, unknown, malformed. Counted, and logged once per kind."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from asyncrl import wire
from asyncrl.arrays import Buffer
from asyncrl.errors import WireError
from asyncrl.replay.peers import foreign_schema, wrong_schema
from asyncrl.replay.tally import Tally
from asyncrl.transport.sockets import Server

log = logging.getLogger(__name__)

MAX_LOGGED = 256


class Refusals:
    """Refusals of one server. tally: where they are counted."""

    def __init__(self, socket: Server, tally: Tally) -> None:
        self._socket, self._tally = socket, tally
        self._logged: set[str] = set()

    def refuse(self, identity: bytes, counter: str, why: str) -> None:
        """Tell a peer why not."""
        self._tally.count(counter)
        self._log_once(f"{counter}: {why}")
        self._socket.send(identity, wire.encode(wire.Refused(why)))

    def rejoin(self, identity: bytes) -> None:
        """A stranger: most often one that knew an earlier process of this replay."""
        self._tally.count("no_hello")
        self._socket.send(identity, wire.encode(wire.Rejoin()))

    def malformed(self, identity: bytes, frames: Sequence[Buffer], exc: WireError) -> None:
        """Bytes that do not decode; a Hello of another schema is told so."""
        self._tally.count("malformed")
        self._log_once(f"malformed: {exc}")
        schema = foreign_schema(frames)
        if schema is not None:
            self._socket.send(identity, wire.encode(wire.Refused(wrong_schema(schema))))

    def _log_once(self, text: str) -> None:
        """Log each kind of text once: a broken peer repeats itself."""
        key = re.sub(r"b'.*?'|b\".*?\"|\d+", "#", text)[:80]
        if key not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(key)
            log.warning("%s (this kind is logged once and counted)", text[:500])
