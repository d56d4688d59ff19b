"""What the proxies saw, one JSON line per message that matters to the proof: RUN/chaos/tap.jsonl."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl import wire
from asyncrl.errors import WireError
from chaos_lib.zmtp import Message

FILE = "tap.jsonl"


class Tap:
    """Appends events to a file. Any thread may record."""

    def __init__(self, file: Path) -> None:
        self._lines = file.open("a")
        self._lock = threading.Lock()
        self.commits, self.update = 0, 0
        """Batches committed so far, and the learner's clock after the last one."""
        self._last: dict[tuple[str, int, str], dict[str, Any]] = {}

    def record(self, link: str, client: int, replay: int, message: Message) -> None:
        """Note a message on the connection of a client's process to one process of replay (numbers from 1)."""
        try:
            events = list(read(message))
        except (WireError, msgspec.MsgspecError, ValueError, IndexError, TypeError) as exc:
            events = [{"kind": "unreadable", "error": str(exc)[:200]}]
        with self._lock:
            events = [e for e in events if self._is_news(link, client, e)]
        if not events:
            return
        where = {"t": round(time.time(), 4), "link": link, "client": client, "replay": replay}
        text = "".join(json.dumps(where | event) + "\n" for event in events)
        with self._lock:
            if not self._lines.closed:
                self._lines.write(text)
            for event in events:
                if event["kind"] == "commit":
                    self.commits, self.update = self.commits + 1, int(event["update"])

    def _is_news(self, link: str, client: int, event: dict[str, Any]) -> bool:
        """False for what a process says again and again: what it holds, and a commit without an answer."""
        if event["kind"] not in ("held", "commit"):
            return True
        who = (link, client, event["kind"])
        old, self._last[who] = self._last.get(who), event
        return event != old

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._lines.close()


def read(message: Message) -> Iterable[dict[str, Any]]:
    """The events of a message; none for those that prove nothing. Raises what a foreign message raises."""
    if wire.kind(message.frames) == "group":
        yield _group(message)
        return
    match wire.decode(message.frames):
        case wire.Hello(role=role, peer_id=peer, boot_id=boot, kept=kept):
            yield {"kind": "hello", "role": role, "peer": peer, "boot": boot, "kept": len(kept)}
        case wire.Welcome(epoch=epoch, update=update, boot=boot):
            yield {"kind": "welcome", "epoch": epoch, "update": update, "boot": boot}
        case wire.Leases(leases=leases):
            given = [[x.group_id, x.attempt] for x in leases if not x.eval_id]
            if given:
                yield {"kind": "leases", "given": given}
        case wire.LeaseRequest(held=held) | wire.Heartbeat(held=held):
            yield {"kind": "held", "version": list(held)}
        case wire.Ack(admitted=admitted, resolved=resolved) if admitted or resolved:
            yield {"kind": "ack", "admitted": admitted, "resolved": resolved}
        case wire.Hold(group_ids=ids):
            yield {"kind": "hold", "ids": ids}
        case wire.Commit(update=update, outcome=outcome, group_ids=ids, take_id=take):
            yield {"kind": "commit", "update": update, "outcome": outcome, "ids": ids, "take": take}
        case wire.Published(epoch=epoch, update=update, batches=batches):
            yield {"kind": "published", "version": [epoch, update], "batches": batches}
        case wire.Refused(reason=reason):
            yield {"kind": "refused", "reason": reason}
        case wire.Done(update=update):
            yield {"kind": "done", "update": update}
        case _:
            return


def _group(message: Message) -> dict[str, Any]:
    """By position, as asyncrl.wire.groups writes it: this must not depend on the reader that is tested."""
    head = msgspec.msgpack.decode(message.frames[1], type=list[Any])
    group_id, generator_id, attempt, trajectories = str(head[1]), str(head[2]), int(head[3]), head[7]
    versions = sorted({(int(s[0]), int(s[1])) for t in trajectories for s in t[3]})
    event = {"kind": "group", "id": group_id, "generator": generator_id, "attempt": attempt}
    return event | {"versions": versions, "bytes": message.num_bytes}
