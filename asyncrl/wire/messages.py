"""Messages: their structs, and messages to frames and back. Groups are in wire.groups.

A message is `[kind, header, buffer, buffer, ...]`: kind is a short ASCII word, header is msgpack
(array-like msgspec structs) and every buffer is the raw bytes of one array whose dtype and shape
follow from the header. Nothing received is unpickled or evaluated, and no array is copied on decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from asyncrl.arrays import Buffer
from asyncrl.errors import WireError
from asyncrl.types import ModelInfo
from asyncrl.wire.fields import GaugeName, Id, Ids, Name, Number, Parts, Struct, Text, TokenId
from asyncrl.wire.steering import Report, Resync, Settings, Tune, Tuned, TuneReply, Verdict

SCHEMA = 6
"""Raised with every change of a struct below; peers with another number are refused."""


class PromptMsg(Struct):
    """A Prompt without its token ids, which travel as a buffer or as a short list."""

    prompt_id: str
    token_ids: list[TokenId]
    text: str
    answer: str
    source: str
    data_source: str = ""
    extra: str = ""


class LeaseMsg(Struct):
    """One leased prompt. eval_id is empty for training; greedy and sample only matter there."""

    lease_id: str
    group_id: str
    attempt: int
    prompt: PromptMsg
    deadline_s: float
    eval_id: str = ""
    greedy: bool = False
    sample: int = 0


class Hello(Struct, tag="hello"):
    """First message of every peer, and again after silence. role: generator or learner.

    leases: lease ids of the training groups that a generator samples; kept: of those that it finished and
    keeps until they are resolved. It sends them again when replay was started again. settings: values by config
    key that every role of a run must share. heard: seq of the newest Leases that came from the process of replay
    whose Welcome said `replay`; leases of those that are not named here got lost. held: the version that a generator
    holds, or the newest that a learner published (a rank that publishes none: one of its run epoch,
    from its first take on).
    """

    schema: int
    role: Name
    peer_id: Name
    boot_id: Name
    layers: Annotated[list[int], msgspec.Meta(max_length=4096)]
    num_experts: int
    top_k: int
    vocab_size: int
    fingerprint: Name
    held: tuple[int, int] | None = None
    leases: Ids = []
    kept: Ids = []
    settings: Annotated[dict[Name, Text], msgspec.Meta(max_length=256)] = {}
    replay: Name = ""
    heard: int = 0


class Welcome(Struct, tag="welcome"):
    """Reply to Hello. newest is (epoch, update, source) of the newest published version.

    boot changes when replay was started again: what it said before, it may have forgotten. tuned: the newest live
    settings.
    """

    epoch: int
    update: int
    newest: tuple[int, int, str] | None
    boot: str = ""
    tuned: Tuned = Tuned()


class Rejoin(Struct, tag="rejoin"):
    """Replay does not know this peer (it was started again) and did not read its message: say Hello first."""


class Refused(Struct, tag="refused"):
    """Reply to a peer that may not take part, with the reason and remedy."""

    reason: str


class LeaseRequest(Struct, tag="lease"):
    """A generator asks for up to `want` groups, or `rows` evaluation responses, holding a version."""

    held: tuple[int, int]
    want: int
    rows: int = 0


class Leases(Struct, tag="leases"):
    """Leased prompts, and when there are fewer than asked: why (idle). Every LeaseRequest is answered by one.

    seq counts those to one process of a generator, from 1.
    """

    leases: list[LeaseMsg]
    idle: str = ""
    seq: int = 0


class Heartbeat(Struct, tag="heartbeat"):
    """A generator is alive; gauges are floats by name (time, tokens, busy_s, in_flight, ...).

    busy lists the wall-clock intervals (seconds since the epoch) in which it generated.
    """

    held: tuple[int, int]
    gauges: Annotated[dict[GaugeName, float], msgspec.Meta(max_length=64)]
    busy: Annotated[list[tuple[float, float]], msgspec.Meta(max_length=2**14)] = []


class EvalAnswer(Struct):
    """One scored held-out response. extracted: the answer that it gives, as two equal ones are written alike; "" when
    it gives none or the verifier names none. parts: as of a trajectory."""

    prompt_id: Id
    sample: Number
    greedy: bool
    reward: float
    length: Number
    finish_reason: Name
    extracted: Annotated[str, msgspec.Meta(max_length=256)] = ""
    parts: Parts = {}


class EvalResult(Struct, tag="eval_result"):
    """Scored held-out responses of one evaluation, all sampled under `version`."""

    eval_id: Id
    version: tuple[int, int]
    answers: Annotated[list[EvalAnswer], msgspec.Meta(max_length=2**16)]


class Failed(Struct, tag="failed"):
    """A generator gives a lease back with the reason; replay counts and re-leases it."""

    lease_id: Id
    group_id: Id
    reason: Text


class Ack(Struct, tag="ack"):
    """admitted: in the queue (or already known). resolved: committed, evicted or dropped; forget it.

    seq is that of the request of a learner which this answers. void: leases whose results are not wanted, while
    other results of their groups may be.
    """

    admitted: list[str]
    resolved: list[str]
    seq: int = 0
    void: list[str] = []


class Hold(Struct, tag="hold"):
    """There is no room for these groups yet: keep them until replay asks for them."""

    group_ids: list[str]


class Send(Struct, tag="send"):
    """Replay has not got these groups, which the generator keeps: send them now, whether admitted once or not."""

    group_ids: list[str]


class Cancel(Struct, tag="cancel"):
    """These leases can no longer be used; stop sampling them."""

    lease_ids: list[str]


class NewVersion(Struct, tag="new_version"):
    """A complete and verified version may be loaded from source."""

    epoch: int
    update: int
    source: str


class Stop(Struct, tag="stop"):
    """The run is over."""

    reason: str


class Take(Struct, tag="take"):
    """A learner rank asks for its shard of take `take_id`; idempotent. epoch is its run epoch."""

    take_id: Number
    update: Number
    rank: int
    world: int
    epoch: Number = 0


class TakeReply(Struct, tag="take_reply"):
    """Header of a shard. Group frames follow: one header buffer and its arrays per group.

    ready is False while the queue has too little (waiting says what is missing). batch[i] is the
    batch of group i, 0..M-1, or -1 for a probe, which is scored and never trained; bounds[m] is the lowest update
    whose tokens may train in batch m. frames[i] counts the buffers of group i. tuned: the live settings of this take,
    frozen with it; coming: the newest ones, by which versions are published.
    """

    take_id: int
    ready: bool
    waiting: str
    batch: list[int]
    bounds: list[int]
    frames: list[int]
    tuned: Tuned = Tuned()
    coming: Tuned = Tuned()


class Commit(Struct, tag="commit"):
    """Rank 0 resolves the groups of one batch; update is its clock after it. outcome: trained or skipped.

    batch counts the batches that this policy used up, from 0; a learner that resumes goes on counting.
    """

    take_id: Number
    update: Number
    outcome: Name
    group_ids: Ids
    seq: int = 0
    batch: Number = 0
    epoch: Number = 0


class Published(Struct, tag="published"):
    """The learner published a version; replay tells the generators.

    batches: how many batches made these weights. The first version of a new epoch undoes the commits of later ones.
    """

    epoch: Number
    update: Number
    source: Text
    seq: int = 0
    batches: Number = 0


class Status(Struct, tag="status"):
    """Ask for the replay's gauges and counters."""

    reset: bool = False


class StatusReply(Struct, tag="status_reply"):
    """JSON-like state of the queue: counters since start, gauges now, finished evaluations."""

    state: dict[str, Any]


class Done(Struct, tag="done"):
    """The learner made its last update; replay finishes evaluations, then stops the generators."""

    update: Number
    seq: int = 0
    epoch: Number = 0


Message = (
    Hello | Welcome | Rejoin | Refused | LeaseRequest | Leases | Heartbeat | EvalResult | Failed | Ack | Hold | Send
    | Cancel | NewVersion | Settings | Resync | Stop | Take | TakeReply | Commit | Published | Report | Verdict | Status
    | StatusReply | Tune | TuneReply | Done
)  # fmt: skip

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message, *buffers: Buffer) -> list[Buffer]:
    """Message to frames; buffers follow as they are."""
    return [b"msg", encoder.encode(message), *buffers]


def kind(frames: Sequence[Buffer]) -> str:
    """First frame as a word: "msg" or "group". Raises WireError on anything else."""
    if len(frames) < 2:
        raise WireError(f"a message has at least 2 frames, got {len(frames)}")
    word = bytes(frames[0]) if len(frames[0]) <= 16 else b"?"
    if word not in (b"msg", b"group"):
        raise WireError(f"unknown kind {word!r}; this peer speaks schema {SCHEMA}")
    return word.decode()


def decode(frames: Sequence[Buffer]) -> Message:
    """Frames to a message (trailing buffers are left to the caller). Raises WireError."""
    if kind(frames) != "msg":
        raise WireError(f"expected a message, got {kind(frames)!r}")
    try:
        return _decoder.decode(frames[1])
    except MALFORMED as exc:
        raise WireError(f"malformed header of {len(frames[1])} bytes: {exc}") from exc


def model_of(hello: Hello) -> ModelInfo:
    """The model a peer announced."""
    return ModelInfo(tuple(hello.layers), hello.num_experts, hello.top_k, hello.vocab_size, hello.fingerprint)
