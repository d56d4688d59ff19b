"""Groups to frames and back: arrays travel as the bytes they are, behind one msgpack header."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.arrays import ArraySpec, Buffer, pack, view
from asyncrl.errors import WireError
from asyncrl.types import Group, Prompt, Segment, Trajectory, Version
from asyncrl.wire.messages import MALFORMED, SCHEMA, PromptMsg, Struct, encoder, kind


class _TrajectoryHeader(Struct):
    trajectory_id: str
    reward: float
    finish_reason: str
    segments: list[tuple[int, int, int, int]]  # epoch, update, start, end
    arrays: list[ArraySpec | None]  # token_ids, logprobs, loss_mask, route_counts, routes


class _SchemaOnly(Struct):
    schema: int


class _GroupHeader(Struct):
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
    return [b"group", encoder.encode(header), *buffers]


def decode_group(frames: Sequence[Buffer]) -> Group:
    """Frames to a Group whose arrays are read-only views of the frames.

    Raises WireError on a foreign schema, wrong byte counts, absurd lengths, segments, rows or
    counts that contradict each other, a reward or temperature that is no number, or any malformed header.
    """
    if kind(frames) != "group":
        raise WireError("expected a group")
    try:
        head = _group_decoder.decode(frames[1])
    except MALFORMED as exc:
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
    except MALFORMED:
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
