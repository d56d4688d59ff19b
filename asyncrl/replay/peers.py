"""Who is connected: the Hello check, and what is known of each generator."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.arrays import Buffer
from asyncrl.types import ModelInfo, Version
from asyncrl.wire import SCHEMA, Hello, model_of

BUSY_INTERVALS = 512

MAX_GENERATORS = 2048
"""Beyond these, the generators that are dead for longest are forgotten; while all of them live, no other may join."""
MAX_ID = 150
"""Characters of a peer's name: names of metrics are made of it, which have 256."""
MAX_LEARNERS = 4096
"""Ranks that are known at a time; one that is forgotten says Hello again."""
MAX_DISPLACED = 1024
"""Processes that are remembered as displaced by a newer one of the same name."""

_FIELDS = {
    "layers": "MoE layers",
    "num_experts": "experts",
    "top_k": "experts per token",
    "vocab_size": "vocabulary size",
    "fingerprint": "fingerprint of config and tokenizer",
}


def objection(hello: Hello, model: ModelInfo | None, settings: Mapping[str, str] | None = None) -> str:
    """Why a peer may not take part, with both values and the remedy, or "". settings: replay's own, by config key."""
    who = f"{hello.role} {hello.peer_id}"
    if hello.schema != SCHEMA:
        return wrong_schema(hello.schema)
    if hello.role not in ("generator", "learner"):
        return f"{hello.peer_id}: unknown role {hello.role!r}, expected generator or learner"
    if not (hello.peer_id.isprintable() and hello.boot_id.isprintable()):
        return f"{hello.role} {hello.peer_id!r}: names are printable"
    if not 0 < len(hello.peer_id) <= MAX_ID:
        return f"{hello.role} {hello.peer_id[:20]!r}: a peer id has 1 to {MAX_ID} characters, not {len(hello.peer_id)}"
    theirs = model_of(hello)
    for name, words in _FIELDS.items():
        a, b = getattr(theirs, name), getattr(model, name, None)
        if model is not None and a != b and not (name == "fingerprint" and "" in (a, b)):
            return (
                f"{who} has {words} {_short(a)}, replay has {_short(b)} from model.path; give model.path and "
                "generator.model the same architecture and tokenizer in every role's config"
            )
    for key, value in (settings or {}).items():
        if hello.settings.get(key, value) != value:
            return (
                f"{who} has {key}={hello.settings[key]}, replay has {key}={value}; start every role of a run with the "
                "same config files and overrides"
            )
    return ""


def displacement(role: str, name: str) -> str:
    """What a process hears whose name was taken over by a newer one."""
    if role == "generator":
        return f"another generator joined as {name}; give each its own --id"
    return f"another learner joined this run as {name}; a run has one learner: end one, or give it its own run.name"


def replaced(epoch: int, newest: int) -> str:
    """What a learner of an older run epoch hears."""
    return f"a newer learner took over as run epoch {newest}, this one is of run epoch {epoch}: end it"


def wrong_schema(schema: int) -> str:
    """Both schema numbers and the remedy."""
    return f"wire schema {schema} against schema {SCHEMA} of replay; install the same asyncrl in every role"


def foreign_schema(frames: Sequence[Buffer]) -> int | None:
    """Schema of a Hello that does not decode because its peer speaks another one, else None.

    Every schema's Hello starts with its tag and its number.
    """
    try:
        head = msgspec.msgpack.decode(frames[1], type=list[Any]) if len(frames) > 1 else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    schema = head[1] if len(head) > 1 and head[0] == "hello" else None
    return schema if isinstance(schema, int) and schema != SCHEMA else None


def _short(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)


@dataclass(slots=True)
class Peer:
    """One connected process. name is its peer id, identity its socket's."""

    identity: bytes
    name: str
    role: str
    boot_id: str


@dataclass(slots=True)
class Generator:
    """State of one generator, kept when it dies. num_leases: Leases sent; busy: wall-clock intervals of generation."""

    identity: bytes
    boot_id: str
    last_seen: float
    alive: bool = True
    held: Version | None = None
    told_at: float = 0.0
    num_leases: int = 0
    failures: int = 0
    """Leases given back with an error, errors of its own and deaths that were seen, over all processes of this name."""
    gauges: dict[str, float] = field(default_factory=dict)
    busy: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=BUSY_INTERVALS))

    def state(self) -> dict[str, Any]:
        """JSON-like form for StatusReply."""
        held = list(self.held) if self.held is not None else None
        gauges = {"gauges": self.gauges, "busy": [list(i) for i in self.busy]}
        return {"held": held, "alive": self.alive, "boot": self.boot_id, "failures": self.failures, **gauges}


class Peers:
    """Peers by socket identity, generators by name. Of two living processes of one name the newer one stays."""

    def __init__(self) -> None:
        self.known: dict[bytes, Peer] = {}
        self.generators: dict[str, Generator] = {}
        self.learner_seen: float | None = None
        """When any rank of the learner was heard last."""
        self.num_rises = 0
        """Heartbeats that told of tokens sampled since the one before, or of weights being loaded."""
        self._displaced: deque[tuple[str, str]] = deque(maxlen=MAX_DISPLACED)

    def refusal(self, identity: bytes, hello: Hello, epoch: int = 0) -> str:
        """Why a process may not join or come back: displaced, under another name before, one too many. Else "".

        epoch: replay's run epoch. A learner of an older one stays out also when a replay that was started again does
        not know any more whom it displaced.
        """
        if hello.role == "learner" and hello.held is not None and hello.held[0] < epoch:
            return replaced(hello.held[0], epoch)
        if (hello.peer_id, hello.boot_id) in self._displaced:
            return displacement(hello.role, hello.peer_id)
        old = self.known.get(identity)
        if old is not None and (old.role, old.name) != (hello.role, hello.peer_id):
            return f"{hello.peer_id} says Hello on the connection of {old.role} {old.name}; connect anew"
        new = hello.role == "generator" and hello.peer_id not in self.generators
        if new and self.num_alive >= MAX_GENERATORS:
            return f"{hello.peer_id} is one generator too many: {MAX_GENERATORS} are alive"
        return ""

    def displace(self, identity: bytes, hello: Hello) -> list[Peer]:
        """Forget other processes of that name; those that may still live at an address of their own."""
        old = [p for p in self.known.values() if p.name == hello.peer_id and p.boot_id != hello.boot_id]
        self._displaced.extend((p.name, p.boot_id) for p in old)
        return [p for p in old if p.identity != identity]

    def join(self, identity: bytes, hello: Hello, now: float) -> bool:
        """Record a peer. True when a generator of this name was known from another boot: it restarted."""
        self.known = {i: p for i, p in self.known.items() if p.name != hello.peer_id}
        self.known[identity] = Peer(identity, hello.peer_id, hello.role, hello.boot_id)
        if hello.role != "generator":
            ranks = [i for i, p in self.known.items() if p.role != "generator"]
            for i in ranks[:-MAX_LEARNERS]:
                del self.known[i]
            self.learner_seen = now
            return False
        old = self.generators.get(hello.peer_id)
        restarted = old is not None and old.boot_id != hello.boot_id
        if old is None or restarted:
            failures = old.failures + old.alive if old is not None else 0
            self.generators[hello.peer_id] = old = Generator(identity, hello.boot_id, now, failures=failures)
            self._forget_dead()
        old.identity, old.last_seen, old.alive = identity, now, True
        old.held = Version(*hello.held) if hello.held is not None else old.held
        return restarted

    def take_over(self, identity: bytes) -> None:
        """A new run epoch began with that rank 0. Ranks of before are forgotten, and those of now say Hello again."""
        self.known = {i: p for i, p in self.known.items() if p.role == "generator" or i == identity}

    def _forget_dead(self) -> None:
        """A fleet that starts its generators under ever new names must not fill the memory."""
        dead = sorted((g.last_seen, name) for name, g in self.generators.items() if not g.alive)
        for _, name in dead[: max(0, len(self.generators) - MAX_GENERATORS)]:
            identity = self.generators.pop(name).identity
            self.known.pop(identity, None)

    def beat(self, name: str, gauges: dict[str, float], busy: Sequence[tuple[float, float]]) -> None:
        """A heartbeat of a generator. Only tokens between two of one process count: a start samples some, too."""
        generator = self.generators[name]
        sampled = "tokens" in generator.gauges and gauges.get("tokens", 0.0) > generator.gauges["tokens"]
        self.num_rises += sampled or bool(gauges.get("loading"))
        generator.gauges = gauges
        generator.busy.extend(busy)

    def seen(self, identity: bytes, now: float) -> Peer | None:
        """Note a sign of life; None for a peer that never said Hello."""
        peer = self.known.get(identity)
        if peer is not None and peer.role == "generator":
            generator = self.generators[peer.name]
            generator.last_seen, generator.alive = now, True
        elif peer is not None:
            self.learner_seen = now
        return peer

    def silent(self, now: float, timeout_s: float) -> list[str]:
        """Mark generators that are silent for too long as dead; their names."""
        dead = [n for n, g in self.generators.items() if g.alive and now - g.last_seen > timeout_s]
        for name in dead:
            self.generators[name].alive = False
            self.generators[name].failures += 1
        return dead

    def held(self, but: Collection[str] = ()) -> set[Version]:
        """Versions that living generators hold, but for some."""
        return {g.held for n, g in self.generators.items() if g.alive and g.held is not None and n not in but}

    @property
    def num_alive(self) -> int:
        """Living generators."""
        return sum(g.alive for g in self.generators.values())
