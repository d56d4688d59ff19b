"""The turns of one episode -> one completion: ids, log-probs, routes and versions stay aligned. Pure functions.

Axes: P prompt tokens, T response tokens (observations included), S = P + T, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import RouteError, TrajectoryError
from asyncrl.generator.collect import check_tokens, logprobs_of, loss_mask_of
from asyncrl.types import Completion, ModelInfo, Segment


class Played(NamedTuple):
    """One turn: the prompt ids that the engine was given, int32 [P_k], the route rows that were there before it, and
    the completion, whose routes begin with row `rows`."""

    prompt_ids: NDArray[np.int32]
    rows: int
    completion: Completion


def check_turn(turn: Played, info: ModelInfo, stop_token_ids: Collection[int] | None, owner: str) -> None:
    """Raises TrajectoryError or RouteError for a turn that cannot be trained, or that nothing can follow."""
    done = turn.completion
    check_tokens(done, owner, info.vocab_size, stop_token_ids)
    ends = [s.end for s in done.segments]
    if [s.start for s in done.segments] != [0, *ends][:-1] or (ends or [0])[-1] != len(done.token_ids):
        raise TrajectoryError(f"{owner}: segments {list(done.segments)} do not cover its {len(done.token_ids)} tokens")
    want = len(turn.prompt_ids) + len(done.token_ids) - 1 - turn.rows
    if info.is_moe and (done.routes is None or len(done.routes) != want):
        got = None if done.routes is None else len(done.routes)
        raise RouteError(f"{owner}: expected {want} route rows from row {turn.rows} on, received {got}")


def merge(turns: Sequence[Played], finish_reason: str, owner: str) -> Completion:
    """One completion of checked turns: its prompt is that of the first, its response all that follows.

    What stands between two turns was not sampled: no log-prob (NaN), no loss. Route rows are those of the turn that
    computed them first, so the rows of old tokens are those that sampled them. Segments cover [0, T); an observation
    belongs to that of the turn after it. Raises TrajectoryError unless every prompt begins with all that came before
    it, token for token, and versions never decrease.
    """
    first, last = turns[0], turns[-1]
    num_prompt = len(first.prompt_ids)
    whole = np.concatenate([last.prompt_ids, last.completion.token_ids]).astype(np.int32)
    logprobs = np.full(len(whole) - num_prompt, np.nan, np.float32)
    sampled = np.zeros(len(whole) - num_prompt, bool)
    segments: list[Segment] = []
    routes_from, extra = 0, Counter[str]()
    for i, turn in enumerate(turns):
        done, start = turn.completion, len(turn.prompt_ids)
        end = start + len(done.token_ids)
        following = whole if turn is last else turns[i + 1].prompt_ids
        if not np.array_equal(following[:end], np.concatenate([turn.prompt_ids, done.token_ids])):
            raise TrajectoryError(f"{owner}: turn {i + 1} is not what the turns after it began with, token for token")
        mask = loss_mask_of(done, owner)
        sampled[start - num_prompt : end - num_prompt] = mask
        logprobs[start - num_prompt : end - num_prompt] = logprobs_of(done, mask, owner)
        _extend(segments, done.segments, start - num_prompt, owner)
        # Rows before turn.rows are those of earlier turns, whatever the engine knows of them now.
        routes_from = max(routes_from, done.routes_from if done.routes_from > turn.rows else 0)
        extra.update(done.extra)
    return Completion(
        whole[num_prompt:], logprobs, tuple(segments), finish_reason, _routes(turns), dict(extra), sampled, routes_from
    )


def _extend(segments: list[Segment], added: Sequence[Segment], offset: int, owner: str) -> None:
    """Append the segments of a turn whose first token is response token `offset`."""
    for segment in added:
        if segment.start == segment.end:
            continue
        start, end = (segments[-1].end if segments else 0), offset + segment.end
        if segments and segment.version < segments[-1].version:
            raise TrajectoryError(f"{owner}: version {segment.version} comes after {segments[-1].version}")
        if segments and segment.version == segments[-1].version:
            segments[-1] = segments[-1]._replace(end=end)
        else:
            segments.append(Segment(segment.version, start, end))


def _routes(turns: Sequence[Played]) -> NDArray[np.unsignedinteger] | None:
    parts = [turn.completion.routes for turn in turns]
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None
