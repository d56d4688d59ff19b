"""Records <-> frames. The field list and the schema number live only here.

A message is `[kind, header, buffer, buffer, ...]`: kind is a short ASCII word, header is msgpack
(array-like msgspec structs) and every buffer is the raw bytes of one array whose dtype and shape
stand in the header. Nothing received is unpickled or evaluated, and no array is copied on decode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.arrays import ArraySpec, pack, view
from asyncrl.arrays import Buffer as Buffer
from asyncrl.errors import WireError
from asyncrl.types import Group, ModelInfo, Prompt, Segment, Trajectory, Version

SCHEMA = 1
"""Raised with every change of a struct below; peers with another number are refused."""


class _Struct(msgspec.Struct, array_like=True, gc=False):
    pass


class PromptMsg(_Struct):
    """A Prompt without its token ids, which travel as a buffer or as a short list."""

    prompt_id: str
    token_ids: list[int]
    text: str
    answer: str
    source: str


class LeaseMsg(_Struct):
    """One leased prompt. eval_id is empty for training; greedy and sample only matter there."""

    lease_id: str
    group_id: str
    attempt: int
    prompt: PromptMsg
    deadline_s: float
    eval_id: str = ""
    greedy: bool = False
    sample: int = 0


class Hello(_Struct, tag="hello"):
    """First message of every peer, and again after silence. role: generator or learner."""

    schema: int
    role: str
    peer_id: str
    boot_id: str
    layers: list[int]
    num_experts: int
    top_k: int
    vocab_size: int
    fingerprint: str
    held: tuple[int, int] | None = None


class Welcome(_Struct, tag="welcome"):
    """Reply to Hello. newest is (epoch, update, source) of the newest published version."""

    epoch: int
    update: int
    newest: tuple[int, int, str] | None


class Refused(_Struct, tag="refused"):
    """Reply to a peer that may not take part, with the reason and remedy."""

    reason: str


class LeaseRequest(_Struct, tag="lease"):
    """A generator asks for up to `want` groups, or `rows` evaluation responses, holding a version."""

    held: tuple[int, int]
    want: int
    rows: int = 0


class Leases(_Struct, tag="leases"):
    """Leased prompts, and when there are fewer than asked: why (idle)."""

    leases: list[LeaseMsg]
    idle: str = ""


class Heartbeat(_Struct, tag="heartbeat"):
    """A generator is alive; gauges are floats by name (time, tokens, busy_s, in_flight, ...).

    busy lists the wall-clock intervals (seconds since the epoch) in which it generated.
    """

    held: tuple[int, int]
    gauges: dict[str, float]
    busy: list[tuple[float, float]] = []


class EvalAnswer(_Struct):
    """One scored held-out response."""

    prompt_id: str
    sample: int
    greedy: bool
    reward: float
    length: int
    finish_reason: str


class EvalResult(_Struct, tag="eval_result"):
    """Scored held-out responses of one evaluation, all sampled under `version`."""

    eval_id: str
    version: tuple[int, int]
    answers: list[EvalAnswer]


class Failed(_Struct, tag="failed"):
    """A generator gives a lease back with the reason; replay counts and re-leases it."""

    lease_id: str
    group_id: str
    reason: str


class Ack(_Struct, tag="ack"):
    """admitted: in the queue (or already known). resolved: committed, evicted or dropped; forget it."""

    admitted: list[str]
    resolved: list[str]


class Cancel(_Struct, tag="cancel"):
    """These leases can no longer be used; stop sampling them."""

    lease_ids: list[str]


class NewVersion(_Struct, tag="new_version"):
    """A complete and verified version may be loaded from source."""

    epoch: int
    update: int
    source: str


class Stop(_Struct, tag="stop"):
    """The run is over."""

    reason: str


class Take(_Struct, tag="take"):
    """A learner rank asks for its shard of take `take_id`; idempotent."""

    take_id: int
    update: int
    rank: int
    world: int


class TakeReply(_Struct, tag="take_reply"):
    """Header of a shard. Group frames follow: one header buffer and its arrays per group.

    ready is False while the queue has too little (waiting says what is missing). batch[i] is the
    batch of group i, 0..M-1; bounds[m] is the lowest update whose tokens may train in batch m.
    frames[i] counts the buffers of group i.
    """

    take_id: int
    ready: bool
    waiting: str
    batch: list[int]
    bounds: list[int]
    frames: list[int]


class Commit(_Struct, tag="commit"):
    """Rank 0 resolves the groups of one batch; update is its clock after it. outcome: trained or skipped."""

    take_id: int
    update: int
    outcome: str
    group_ids: list[str]


class Published(_Struct, tag="published"):
    """The learner published a version; replay tells the generators."""

    epoch: int
    update: int
    source: str


class Status(_Struct, tag="status"):
    """Ask for the replay's gauges and counters."""

    reset: bool = False


class StatusReply(_Struct, tag="status_reply"):
    """JSON-like state of the queue: counters since start, gauges now, finished evaluations."""

    state: dict[str, Any]


class Done(_Struct, tag="done"):
    """The learner made its last update; replay finishes evaluations, then stops the generators."""

    update: int


Message = (
    Hello | Welcome | Refused | LeaseRequest | Leases | Heartbeat | EvalResult | Failed | Ack | Cancel
    | NewVersion | Stop | Take | TakeReply | Commit | Published | Status | StatusReply | Done
)  # fmt: skip

_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message, *buffers: Buffer) -> list[Buffer]:
    """Message to frames; buffers follow as they are."""
    return [b"msg", _encoder.encode(message), *buffers]


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
    except _MALFORMED as exc:
        raise WireError(f"malformed header of {len(frames[1])} bytes: {exc}") from exc


# --- groups -------------------------------------------------------------------------------------


class _TrajectoryHeader(_Struct):
    trajectory_id: str
    reward: float
    finish_reason: str
    segments: list[tuple[int, int, int, int]]  # epoch, update, start, end
    arrays: list[ArraySpec | None]  # token_ids, logprobs, loss_mask, route_counts, routes


class _SchemaOnly(_Struct):
    schema: int


class _GroupHeader(_Struct):
    schema: int
    group_id: str
    generator_id: str
    attempt: int
    temperature: float
    seconds: float
    prompt: PromptMsg
    trajectories: list[_TrajectoryHeader]


_ARRAYS = ("token_ids", "logprobs", "loss_mask", "route_counts", "routes")
_ALLOWED = ({"int32"}, {"float32"}, {"bool"}, {"uint16", "uint32"}, {"uint8", "uint16"})
_NDIM = (1, 1, 1, 3, 3)
_group_decoder = msgspec.msgpack.Decoder(_GroupHeader)
_schema_decoder = msgspec.msgpack.Decoder(_SchemaOnly)


def prompt_to_msg(prompt: Prompt) -> PromptMsg:
    """Prompt to its wire form."""
    return PromptMsg(prompt.prompt_id, prompt.token_ids.tolist(), prompt.text, prompt.answer, prompt.source)


def prompt_from_msg(msg: PromptMsg) -> Prompt:
    """Wire form to Prompt."""
    try:
        token_ids = np.asarray(msg.token_ids, np.int32)
    except OverflowError as exc:
        raise WireError(f"prompt {msg.prompt_id}: a token id does not fit int32") from exc
    return Prompt(msg.prompt_id, token_ids, msg.text, msg.answer, msg.source)


def encode_group(group: Group) -> list[Buffer]:
    """Group to `[b"group", header, buffers...]`; arrays are sent as they lie in memory.

    Raises WireError on an array whose dtype or rank the schema does not allow.
    """
    buffers: list[Buffer] = []
    headers = []
    for t in group.trajectories:
        specs: list[ArraySpec | None] = []
        for name, allowed, ndim in zip(_ARRAYS, _ALLOWED, _NDIM, strict=True):
            array: NDArray[Any] | None = getattr(t, name)
            if array is None:
                specs.append(None)
                continue
            spec, buffer = pack(t.trajectory_id, name, array, allowed, ndim)
            specs.append(spec)
            buffers.append(buffer)
        segments = [(s.version.epoch, s.version.update, s.start, s.end) for s in t.segments]
        headers.append(_TrajectoryHeader(t.trajectory_id, t.reward, t.finish_reason, segments, specs))
    prompt = prompt_to_msg(group.prompt)
    ids = (group.group_id, group.generator_id, group.attempt)
    header = _GroupHeader(SCHEMA, *ids, group.temperature, group.seconds, prompt, headers)
    return [b"group", _encoder.encode(header), *buffers]


def decode_group(frames: Sequence[Buffer]) -> Group:
    """Frames to a Group whose arrays are read-only views of the frames.

    Raises WireError on a foreign schema, wrong byte counts, absurd lengths, segments, rows or
    counts that contradict each other, a reward or temperature that is no number, or any malformed header.
    """
    if kind(frames) != "group":
        raise WireError("expected a group")
    try:
        head = _group_decoder.decode(frames[1])
    except _MALFORMED as exc:
        _check_schema(_schema_of(frames[1]))
        raise WireError(f"malformed group header of {len(frames[1])} bytes: {exc}") from exc
    _check_schema(head.schema)
    buffers = iter(frames[2:])
    prompt = prompt_from_msg(head.prompt)
    trajectories = tuple(_decode_trajectory(t, len(prompt.token_ids), buffers) for t in head.trajectories)
    extra = sum(1 for _ in buffers)
    if extra:
        raise WireError(f"group {head.group_id}: {extra} buffers more than its header names")
    if not (math.isfinite(head.temperature) and head.temperature > 0):
        raise WireError(f"group {head.group_id}: sampling temperature {head.temperature}")
    ids = (head.generator_id, head.attempt, head.temperature)
    return Group(head.group_id, prompt, *ids, trajectories, head.seconds)


def _check_schema(schema: int) -> None:
    if schema != SCHEMA:
        raise WireError(f"group has schema {schema}, this peer speaks {SCHEMA}")


def _schema_of(header: Buffer) -> int:
    # another schema may have other fields: its number is worth more to the reader than the first misfit
    try:
        return _schema_decoder.decode(header).schema
    except _MALFORMED:
        return SCHEMA


def _decode_trajectory(head: _TrajectoryHeader, num_prompt: int, buffers: Iterator[Buffer]) -> Trajectory:
    if len(head.arrays) != len(_ARRAYS):
        raise WireError(f"{head.trajectory_id}: {len(head.arrays)} arrays named, schema has {len(_ARRAYS)}")
    arrays = [
        None if spec is None else view(head.trajectory_id, name, spec, buffers, allowed, ndim)
        for name, spec, allowed, ndim in zip(_ARRAYS, head.arrays, _ALLOWED, _NDIM, strict=True)
    ]
    token_ids, logprobs, loss_mask, route_counts, routes = arrays
    if token_ids is None or logprobs is None or loss_mask is None:
        raise WireError(f"{head.trajectory_id}: token_ids, logprobs and loss_mask are required")
    n = len(token_ids)
    if len(logprobs) != n or len(loss_mask) != n:
        counts = f"{n} token ids, {len(logprobs)} log-probs, {len(loss_mask)} mask entries"
        raise WireError(f"{head.trajectory_id}: {counts}; the engine must return one of each per token")
    segments = tuple(Segment(Version(e, u), a, b) for e, u, a, b in head.segments)
    edges = [0, *[s.end for s in segments]]
    if any(s.start != edge or s.end <= s.start for s, edge in zip(segments, edges, strict=False)) or edges[-1] != n:
        raise WireError(f"{head.trajectory_id}: segments {head.segments} do not cover {n} tokens in order")
    if route_counts is not None and len(route_counts) != len(segments):
        raise WireError(f"{head.trajectory_id}: {len(route_counts)} route counts for {len(segments)} segments")
    rows = max(num_prompt + n - 1, 0)  # the last token is never an input
    if routes is not None and len(routes) != rows:
        raise WireError(f"{head.trajectory_id}: {len(routes)} route rows, {num_prompt} + {n} tokens have {rows}")
    if not math.isfinite(head.reward):
        raise WireError(f"{head.trajectory_id}: reward {head.reward}")
    tail = (segments, head.reward, head.finish_reason, route_counts, routes)
    return Trajectory(head.trajectory_id, token_ids, logprobs, loss_mask, *tail)


def model_of(hello: Hello) -> ModelInfo:
    """The model a peer announced."""
    return ModelInfo(tuple(hello.layers), hello.num_experts, hello.top_k, hello.vocab_size, hello.fingerprint)
