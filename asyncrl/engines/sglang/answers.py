"""One reply of /generate -> a Completion, checked. Pure; knows no HTTP.

What a server that works can never say (a missing field, a version that nobody set, a response cut short) is an
EngineError. What is wrong with this sample alone is a TrajectoryError or a RouteError. All name the request.

Axes: P prompt tokens, T response tokens, S = P + T, L MoE layers, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.sglang.routes import RouteDecoder
from asyncrl.errors import EngineError, TrajectoryError
from asyncrl.types import Completion, SamplingParams, Segment, Version


@dataclass(frozen=True, slots=True)
class Asked:
    """What a reply answers: request id, prompt tokens P, sampling, and the version when it was submitted.

    rows: route rows that whoever asked has already.
    """

    rid: str
    num_prompt: int
    sampling: SamplingParams
    version: Version
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Aborted:
    """The server ended a request before its time: its message, and the tokens that it had sampled."""

    message: str
    num_tokens: int


def completion_of(
    reply: Any, asked: Asked, versions: Mapping[str, Version], routes: RouteDecoder | None, overlap: bool = True
) -> Completion | Aborted:
    """The sample of a reply, or how it was aborted.

    versions: by label, every one that the server may have had. routes: decodes those of the model, None when the run
    needs none. overlap: whether the server starts a step before it has the tokens of the last; see `_sampled`. A
    log-prob that is null stays NaN (missing). `extra` has cached_tokens and num_retractions.
    EngineError, TrajectoryError, RouteError: see the module.
    """
    rid = asked.rid
    if not isinstance(reply, dict) or not isinstance(reply.get("meta_info"), dict):
        raise EngineError(f"{rid}: the reply has no meta_info; /generate must answer one object for one request")
    meta = reply["meta_info"]
    if meta.get("id", rid) != rid:
        raise EngineError(f"{rid}: the reply is of request {meta['id']!r}")
    finish = meta.get("finish_reason")
    if not isinstance(finish, dict) or finish.get("type") not in ("stop", "length", "abort"):
        raise EngineError(f"{rid}: finish_reason is {finish!r}, expected an object of type stop, length or abort")
    tokens = _tokens(reply, rid)
    if finish["type"] == "abort":
        return Aborted(str(finish.get("message") or "no reason given"), len(tokens))
    _check_end(finish, tokens, asked)
    segments = _segments(meta, len(tokens), asked, versions)
    cached, retractions = _count(meta, "cached_tokens", rid), _count(meta, "num_retractions", rid)
    done = Completion(
        tokens,
        _logprobs(meta, tokens, rid),
        segments,
        finish["type"],
        extra={"cached_tokens": float(cached), "num_retractions": float(retractions)},
        sampled=_sampled(segments, len(tokens), asked) if overlap else None,
    )
    if routes is not None:
        length = asked.num_prompt + len(tokens)
        done.routes = routes.decode(meta.get("routed_experts"), length, asked.rows, request=rid)
        done.routes_from = _routes_from(done, asked, retractions)
    return done


def has_stale_prefix(done: Completion, asked: Asked) -> bool:
    """True when it began on the KV of a prefix that weights older than its own first token's had computed.

    It was submitted before an update and began after, so the prefix that it found is of the version before.
    """
    return done.extra["cached_tokens"] > 0 and done.segments[0].version != asked.version


def _sampled(segments: tuple[Segment, ...], length: int, asked: Asked) -> NDArray[np.bool_] | None:
    """Bool [T], False for tokens of which nobody knows what weights sampled them; None when there are none.

    A server that overlaps steps has one on its way when it is paused. The token comes from the weights of before, or
    from half of both, but stands in the span of those after: it is the first one there.
    """
    unsure = [segment.start for segment in segments[1:]]
    if segments[0].version != asked.version:
        unsure.append(0)
    if not unsure:
        return None
    sampled = np.ones(length, np.bool_)
    sampled[unsure] = False
    return sampled


def _routes_from(done: Completion, asked: Asked, retractions: int) -> int:
    """First row of the routes that the weights of its own token computed, of all S - 1.

    A retracted request is run again from its first token on, under the weights of then, and the routes of that run
    are all that is left: only those of the last version are known. One that began after an update may have run the
    first chunks of its prompt before it.
    """
    row = asked.num_prompt - 1
    if retractions and len(done.segments) > 1:
        return row + done.segments[-1].start
    return row if done.segments[0].version != asked.version else 0


def _tokens(reply: dict[str, Any], rid: str) -> NDArray[np.int32]:
    ids = reply.get("output_ids")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise EngineError(f"{rid}: output_ids is {_short(ids)}, expected the ids of the sampled tokens")
    try:
        return np.array(ids, np.int32)
    except OverflowError as exc:
        raise EngineError(f"{rid}: output_ids hold a number that is no token id: {exc}") from exc


def _check_end(finish: dict[str, Any], tokens: NDArray[np.int32], asked: Asked) -> None:
    """The response ends where it was asked to end."""
    rid, sampling, length = asked.rid, asked.sampling, len(tokens)
    if not 0 < length <= sampling.max_new_tokens:
        raise EngineError(f"{rid}: {length} tokens, asked for 1 to {sampling.max_new_tokens}")
    if finish["type"] == "length":
        if length < sampling.max_new_tokens:
            raise EngineError(
                f"{rid}: cut at {length} tokens, asked for {sampling.max_new_tokens}; the server's limit is lower: "
                "its --context-length, --max-total-tokens or SGLANG_MAX_NEW_TOKENS_LIMIT"
            )
        return
    matched, last = finish.get("matched"), int(tokens[-1])
    if not isinstance(matched, int):
        # SGLang puts an end token where it sampled none, and says so in a text.
        raise TrajectoryError(f"{rid}: ended with {matched!r}, not with a stop token: the server's logits are broken")
    if matched != last:
        raise EngineError(f"{rid}: ended with token {matched}, but the last of output_ids is {last}; it must be there")
    if last not in sampling.stop_token_ids:
        raise EngineError(
            f"{rid}: ended with token {last}, an end token of the server's own; the run stops at "
            f"{sorted(sampling.stop_token_ids)}. Name {last} in eos_token_id of the model folder's "
            "generation_config.json, or start the server from the run's own folder"
        )


def _segments(meta: dict[str, Any], length: int, asked: Asked, versions: Mapping[str, Version]) -> tuple[Segment, ...]:
    """The versions of its tokens: spans that cover [0, T) in order, of labels that we set, never going back."""
    spans, rid = meta.get("weight_versions"), asked.rid
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise EngineError(f"{rid}: weight_versions is {_short(spans)}; SGLang 0.5.23 and later return the spans")
    found: list[Segment] = []
    for span in spans:
        label, start, end = span.get("version"), span.get("start"), span.get("end")
        version = versions.get(label) if isinstance(label, str) else None
        if version is None:
            raise EngineError(
                f"{rid}: tokens of weights {label!r}, which this run never loaded "
                f"(known: {', '.join(sorted(versions))}); somebody else updates or restarted this server"
            )
        if version < (found[-1].version if found else asked.version):
            raise EngineError(
                f"{rid}: tokens of version {version} though {found[-1].version if found else asked.version} was "
                "loaded before; the server was restarted or updated by somebody else"
            )
        if type(start) is not int or type(end) is not int or start != (found[-1].end if found else 0) or end < start:
            _uncovered(rid, spans, length)
        if end > start:
            found.append(Segment(version, start, end))
    if not found or found[-1].end != length:
        _uncovered(rid, spans, length)
    return tuple(found)


def _uncovered(rid: str, spans: list[Any], length: int) -> NoReturn:
    raise EngineError(f"{rid}: weight_versions {_short(spans)} do not cover the {length} tokens in order")


def _logprobs(meta: dict[str, Any], tokens: NDArray[np.int32], rid: str) -> NDArray[np.float32]:
    """Log-probs [T], NaN where the server has none. They must be of these very tokens."""
    rows = meta.get("output_token_logprobs")
    if not isinstance(rows, list):
        raise EngineError(f"{rid}: output_token_logprobs is {_short(rows)}, expected [log-prob, token id, text] rows")
    if len(rows) != len(tokens):
        raise TrajectoryError(f"{rid}: {len(tokens)} token ids but {len(rows)} log-probs; refused, not cut")
    out = np.empty(len(rows), np.float32)
    for i, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        if not isinstance(row, list) or len(row) < 2 or not isinstance(row[0], int | float | None):
            raise EngineError(
                f"{rid}: output_token_logprobs[{i}] is {_short(row)}, expected [log-prob, token id, text]"
            )
        if row[1] != token:
            raise TrajectoryError(f"{rid}: token {i} is {token}, its log-prob is of token {row[1]}")
        out[i] = np.nan if row[0] is None else row[0]
    return out


def _count(meta: dict[str, Any], key: str, rid: str) -> int:
    """A count that the rules above need; older builds leave it out."""
    value = meta.get(key)
    if type(value) is not int or value < 0:
        raise EngineError(
            f"{rid}: {key} of the reply is {value!r}, expected a count; SGLang 0.5.23 and later return it"
        )
    return value


def _short(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
