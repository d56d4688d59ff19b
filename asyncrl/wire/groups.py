"""Groups to frames and back: arrays travel as the bytes they are, behind one msgpack header.

Token ids, log-probs and loss mask are as long as the response's segments, so the header has no shapes of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncrl.arrays import ArraySpec, Buffer, dtype_of, num_bytes, pack, spec_of, view
from asyncrl.errors import WireError
from asyncrl.types import Group, Prompt, Segment, Trajectory, Version
from asyncrl.wire.fields import Id, Name, Number, Parts, Struct
from asyncrl.wire.messages import MALFORMED, SCHEMA, PromptMsg, encoder, kind


class TrajectoryHead(Struct):
    """One trajectory without its arrays."""

    trajectory_id: Id
    reward: float
    finish_reason: Name
    segments: list[tuple[Number, Number, int, int]]  # epoch, update, start, end
    route_counts: ArraySpec | None
    routes: ArraySpec | None
    routes_from: int  # first row of routes that is known
    parts: Parts


class _SchemaOnly(Struct):
    schema: int


class _GroupHeader(Struct):
    schema: int
    group_id: Id
    generator_id: Name
    attempt: int
    temperature: float
    seconds: float
    prompt: PromptMsg
    trajectories: list[TrajectoryHead]


class GroupHead(NamedTuple):
    """What can be said of a received group without making its arrays; all of it is checked.

    token_ids, logprobs, loss_masks, routes: their bytes, one buffer per trajectory (routes: None without).
    """

    group_id: str
    generator_id: str
    attempt: int
    temperature: float
    seconds: float
    prompt: PromptMsg
    trajectories: list[TrajectoryHead]
    token_ids: list[Buffer]
    logprobs: list[Buffer]
    loss_masks: list[Buffer]
    routes: list[Buffer | None]


_IDS, _LOGPROBS, _MASK = np.dtype(np.int32), np.dtype(np.float32), np.dtype(bool)
_COUNTS: tuple[np.dtype[Any], ...] = (np.dtype(np.uint16), np.dtype(np.uint32))
_ROUTES: tuple[np.dtype[Any], ...] = (np.dtype(np.uint8), np.dtype(np.uint16))
_group_decoder = msgspec.msgpack.Decoder(_GroupHeader)
_schema_decoder = msgspec.msgpack.Decoder(_SchemaOnly)


def prompt_to_msg(prompt: Prompt) -> PromptMsg:
    """Prompt to its wire form."""
    p = prompt
    return PromptMsg(p.prompt_id, p.token_ids.tolist(), p.text, p.answer, p.source, p.data_source, p.extra)


def prompt_from_msg(msg: PromptMsg) -> Prompt:
    """Wire form to Prompt."""
    ids = np.asarray(msg.token_ids, np.int32)
    return Prompt(msg.prompt_id, ids, msg.text, msg.answer, msg.source, msg.data_source, msg.extra)


def encode_group(group: Group) -> list[Buffer]:
    """Group to `[b"group", header, buffers...]`; arrays are sent as they lie in memory.

    Raises WireError on an array whose dtype or rank the schema does not allow, and unless there is
    one token id, log-prob and mask entry per token of the segments.
    """
    buffers: list[Buffer] = []
    headers = [_encode_trajectory(t, buffers) for t in group.trajectories]
    prompt = prompt_to_msg(group.prompt)
    ids = (group.group_id, group.generator_id, group.attempt)
    header = _GroupHeader(SCHEMA, *ids, group.temperature, group.seconds, prompt, headers)
    return [b"group", encoder.encode(header), *buffers]


def _encode_trajectory(t: Trajectory, buffers: list[Buffer]) -> TrajectoryHead:
    name, n = t.trajectory_id, t.num_tokens
    if len(t.logprobs) != n or len(t.loss_mask) != n:
        counts = f"{n} token ids, {len(t.logprobs)} log-probs, {len(t.loss_mask)} mask entries"
        raise WireError(f"{name}: {counts}; the engine must return one of each per token")
    segments = [(s.version.epoch, s.version.update, s.start, s.end) for s in t.segments]
    if (segments[-1][3] if segments else 0) != n:
        raise WireError(f"{name}: segments {segments} do not cover {n} tokens in order")
    buffers.append(pack(name, "token_ids", t.token_ids, (_IDS,), 1))
    buffers.append(pack(name, "logprobs", t.logprobs, (_LOGPROBS,), 1))
    buffers.append(pack(name, "loss_mask", t.loss_mask, (_MASK,), 1))
    specs: list[ArraySpec | None] = []
    for field, array, allowed in (("route_counts", t.route_counts, _COUNTS), ("routes", t.routes, _ROUTES)):
        if array is not None:
            buffers.append(pack(name, field, array, allowed, 3))
        specs.append(None if array is None else spec_of(array))
    parts = dict(t.parts)
    return TrajectoryHead(name, t.reward, t.finish_reason, segments, specs[0], specs[1], t.routes_from, parts)


def read_group(frames: Sequence[Buffer]) -> GroupHead:
    """Frames to a GroupHead: what replay needs, at a fraction of the time that the arrays take.

    Raises WireError on a foreign schema, wrong byte counts, absurd lengths, segments, rows or
    counts that contradict each other, a reward or temperature that is no number, or any malformed header.
    """
    head = _header(frames)
    where, num_prompt = f"group {head.group_id}", len(head.prompt.token_ids)
    sizes: list[int] = []
    starts = []
    for t in head.trajectories:
        starts.append(len(sizes) + 2)
        sizes += _sizes(t, num_prompt)
    received = list(map(len, frames[2:]))
    if sizes != received:
        raise WireError(_misfit(where, sizes, received))
    masks = [frames[i + 2] for i in starts]
    # Behind ids, log-probs, mask and the counts, if there are some.
    heads = zip(starts, head.trajectories, strict=True)
    routes = [None if t.routes is None else frames[i + 3 + (t.route_counts is not None)] for i, t in heads]
    if not _is_bool(b"".join(masks)):
        raise WireError(f"{where}: loss_mask holds bytes that are no booleans")
    if not (math.isfinite(head.temperature) and head.temperature > 0):
        raise WireError(f"{where}: sampling temperature {head.temperature}")
    return GroupHead(
        head.group_id, head.generator_id, head.attempt, head.temperature, head.seconds, head.prompt,
        head.trajectories, [frames[i] for i in starts], [frames[i + 1] for i in starts], masks, routes,
    )  # fmt: skip


def decode_group(frames: Sequence[Buffer]) -> Group:
    """Frames to a Group whose arrays are read-only views of the frames. Raises WireError as `read_group` does."""
    head = read_group(frames)
    buffers = iter(frames[2:])
    trajectories = tuple(_decode_trajectory(t, buffers) for t in head.trajectories)
    ids = (head.generator_id, head.attempt, head.temperature)
    return Group(head.group_id, prompt_from_msg(head.prompt), *ids, trajectories, head.seconds)


def _header(frames: Sequence[Buffer]) -> _GroupHeader:
    if kind(frames) != "group":
        raise WireError("expected a group")
    try:
        head = _group_decoder.decode(frames[1])
    except MALFORMED as exc:
        _check_schema(_schema_of(frames[1]))
        raise WireError(f"malformed group header of {len(frames[1])} bytes: {exc}") from exc
    _check_schema(head.schema)
    return head


def _check_schema(schema: int) -> None:
    if schema != SCHEMA:
        raise WireError(f"group has schema {schema}, this peer speaks {SCHEMA}")


def _schema_of(header: Buffer) -> int:
    # another schema may have other fields: its number is worth more to the reader than the first misfit
    try:
        return _schema_decoder.decode(header).schema
    except MALFORMED:
        return SCHEMA


def _sizes(t: TrajectoryHead, num_prompt: int) -> list[int]:
    """Bytes of each buffer of a trajectory. Raises WireError when its header contradicts itself."""
    n = 0
    for _, _, start, end in t.segments:
        if start != n or end <= start:
            raise WireError(f"{t.trajectory_id}: segments {t.segments} do not cover its tokens in order")
        n = end
    sizes = [4 * n, 4 * n, n]
    counts, routes = t.route_counts, t.routes
    if counts is not None:
        if counts.shape[0] != len(t.segments):
            raise WireError(f"{t.trajectory_id}: {counts.shape[0]} route counts for {len(t.segments)} segments")
        sizes.append(num_bytes(t.trajectory_id, "route_counts", counts, _COUNTS))
    rows = max(num_prompt + n - 1, 0)  # the last token is never an input
    if not 0 <= t.routes_from <= rows:
        raise WireError(f"{t.trajectory_id}: routes_from={t.routes_from}, {num_prompt} + {n} tokens have {rows} rows")
    if routes is not None:
        if routes.shape[0] != rows:
            raise WireError(f"{t.trajectory_id}: {routes.shape[0]} route rows, {num_prompt} + {n} tokens have {rows}")
        sizes.append(num_bytes(t.trajectory_id, "routes", routes, _ROUTES))
    if not math.isfinite(t.reward):
        raise WireError(f"{t.trajectory_id}: reward {t.reward}")
    if bad := [name for name, value in t.parts.items() if not math.isfinite(value)]:
        raise WireError(f"{t.trajectory_id}: part {bad[0]!r} of the reward is {t.parts[bad[0]]}")
    return sizes


def _misfit(where: str, sizes: list[int], received: list[int]) -> str:
    if len(received) < len(sizes):
        return f"{where}: {len(sizes) - len(received)} buffers are missing"
    if len(received) > len(sizes):
        return f"{where}: {len(received) - len(sizes)} buffers more than its header names"
    i = next(i for i, pair in enumerate(zip(sizes, received, strict=True)) if pair[0] != pair[1])
    return f"{where}: buffer {i} has {received[i]} bytes, by its header {sizes[i]}"


def _is_bool(data: bytes) -> bool:
    """True when every byte is 0 or 1. For a few thousand bytes, numpy's overhead is larger than the work."""
    if len(data) <= 4096:
        return not data.translate(None, b"\0\1")
    return bool(np.frombuffer(data, np.uint8).max() <= 1)


def _decode_trajectory(t: TrajectoryHead, buffers: Iterator[Buffer]) -> Trajectory:
    segments = tuple([Segment(Version(e, u), start, end) for e, u, start, end in t.segments])
    shape = (segments[-1].end if segments else 0,)
    ids, logprobs = view(next(buffers), _IDS, shape), view(next(buffers), _LOGPROBS, shape)
    mask = view(next(buffers), _MASK, shape)
    counts, routes = t.route_counts, t.routes
    rest = (
        None if counts is None else view(next(buffers), dtype_of(counts), counts.shape),
        None if routes is None else view(next(buffers), dtype_of(routes), routes.shape),
    )
    return Trajectory(
        t.trajectory_id, ids, logprobs, mask, segments, t.reward, t.finish_reason, *rest, t.routes_from, t.parts
    )  # fmt: skip
