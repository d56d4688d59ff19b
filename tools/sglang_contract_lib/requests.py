"""Checks of a server that sampling shows: fields, routes, log-probs, stops, cache keys, aborts and pauses, keys."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.probe import OVERLAP, probe
from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.answers import Aborted
from asyncrl.engines.sglang.checks import check_temperature, check_vocabulary
from asyncrl.engines.sglang.client import Client, Refused
from asyncrl.engines.sglang.flags import Facts
from asyncrl.errors import EngineError, RouteError
from asyncrl.types import SamplingParams
from sglang_contract_lib.asking import Asker, new_name
from sglang_contract_lib.report import OK, SKIPPED, WRONG, Report

TEMPERATURE = 0.6
LONG = 2048
"""Tokens of a response that is to be interrupted, or what fits."""
_PAUSE_S = 1.0
"""How long a paused server is watched."""


async def check_requests(report: Report, asker: Asker, facts: Facts, open_client: Client, has_keys: bool) -> None:
    """All of them. open_client has no key; has_keys: whether one was given for this server."""
    with report.check("keys"):
        await _keys(report, open_client, has_keys)
    with report.check("generate"):
        done = await probe(asker, SamplingParams(TEMPERATURE, 1, ()), 10 * asker.client.answer_s)
        rows = "no routes (a dense model)" if done.routes is None else f"routes {list(done.routes.shape)}"
        report.add(OK, "generate", f"32 + 32 tokens: {rows}, finite log-probs, versions, the same prompt rows again")
    with report.check("vocabulary"):
        await check_vocabulary(asker.client, asker.info.vocab_size)
        report.add(OK, "vocabulary", f"token {asker.info.vocab_size - 1} is known")
    with report.check("temperature"):
        if await check_temperature(asker.client, TEMPERATURE):
            report.add(OK, "temperature", f"log-probs at temperature {TEMPERATURE} are those of {TEMPERATURE}")
        else:
            report.add(SKIPPED, "temperature", "every token is equally probable: send weights, then check again")
    for name, check in (("start_len", _start_len), ("stop token", _stop), ("extra_key", _cache_key)):
        with report.check(name):
            await check(report, asker)
    with report.check("abort"):
        await _abort(report, asker, facts)
    with report.check("pause"):
        await _pause(report, asker, facts)


def _prompt(asker: Asker, tokens: int, seed: int = 1) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, asker.info.vocab_size, tokens).tolist()
    return ids


def _long(facts: Facts, prompt: int) -> SamplingParams:
    return SamplingParams(1.0, min(LONG, facts.max_length - prompt), ())


async def _keys(report: Report, open_client: Client, has_keys: bool) -> None:
    """Without a key the server refuses, when it has one."""
    reached = []
    for path, call in (
        (bodies.MODEL_INFO, open_client.get(bodies.MODEL_INFO)),
        (bodies.ABORT, open_client.post(bodies.ABORT, bodies.abort(new_name()), admin=True)),
    ):
        try:
            await call
            reached.append(path)
        except Refused as exc:
            if exc.status not in (401, 403):
                raise
    if has_keys and reached:
        report.add(WRONG, "keys", f"{' and '.join(reached)} answer without a key; start it with --api-key")
    elif has_keys:
        report.add(OK, "keys", "they are asked for, and these are the right ones")
    else:
        report.add(OK, "keys", "none is asked for: whoever reaches the port can change the weights")


async def _start_len(report: Report, asker: Asker) -> None:
    """Routes of a second turn, from where those of the first end, are those of the whole conversation."""
    if asker.decoder is None:
        report.add(SKIPPED, "start_len", "a dense model has no routes")
        return
    sampling, key = SamplingParams(1.0, 8, ()), new_name()
    tokens, sent, parts, start = _prompt(asker, 12), list[int](), [], 0
    for turn in range(2):
        rid, start = new_name(), len(tokens) - 1 if turn else 0
        reply = await asker.raw(tokens, sampling, key, rid, start)
        meta, ids = reply.get("meta_info"), reply.get("output_ids")
        if not isinstance(meta, dict) or not isinstance(ids, list):
            raise EngineError(f"{rid}: meta_info or output_ids of the reply is missing")
        tokens, blob = tokens + ids, meta.get("routed_experts")
        parts.append(asker.decoder.decode(blob, len(tokens), start, request=rid))
        sent.append(len(base64.b64decode(str(blob))))
    merged, last = np.concatenate(parts), len(tokens) - 1
    whole = (await asker.sample(tokens, replace(sampling, max_new_tokens=1))).routes
    assert whole is not None
    if _overlap(merged, whole[:last]) < OVERLAP:
        raise RouteError(f"rows of two turns, the second from row {start} on, are not those of the whole conversation")
    # The first turn, from row 0 on, says how many bytes a row has.
    form = "all rows again" if sent[1] * start == sent[0] * last else "the rows asked for"
    report.add(OK, "start_len", f"two turns merge to {len(merged)} rows; the server sends {form}")


def _overlap(a: NDArray[np.unsignedinteger], b: NDArray[np.unsignedinteger]) -> float:
    return float((a[..., :, None] == b[..., None, :]).any(axis=-1).mean())


async def _stop(report: Report, asker: Asker) -> None:
    """A stop token ends a response, and stands at its end with its log-prob."""
    prompt = _prompt(asker, 8)
    greedy = SamplingParams(1.0, 4, (), greedy=True)
    (token, *_) = (await asker.sample(prompt, greedy)).token_ids.tolist()
    done = await asker.sample(prompt, replace(greedy, stop_token_ids=(token,)))
    if done.finish_reason != "stop" or token not in done.token_ids:
        raise EngineError(
            f"with stop_token_ids=[{token}] the response {done.token_ids.tolist()} ended with {done.finish_reason!r}"
        )
    report.add(OK, "stop token", f"it ends a response of {len(done.token_ids)}, in its ids and with its log-prob")


async def _cache_key(report: Report, asker: Asker) -> None:
    """Requests of one extra_key share the KV of a prefix, those of two never: versions must not."""
    prompt, one, key = _prompt(asker, 24, seed=2), SamplingParams(1.0, 1, ()), new_name()
    first, same, other = [int((await asker.sample(prompt, one, k)).extra["cached_tokens"]) for k in (key, key, None)]
    if first or other:
        raise EngineError(
            f"a request with an extra_key of its own found {first or other} tokens in the cache: prompts sampled after "
            "an update would begin on older weights; update SGLang, or start it with --disable-radix-cache"
        )
    report.add(OK, "extra_key", f"{same} of 24 tokens come from the cache with the same one, none with another")


async def _abort(report: Report, asker: Asker, facts: Facts) -> None:
    """A running request ends by its id, in its own call."""
    prompt, rid = _prompt(asker, 8), new_name()
    task = asyncio.create_task(asker.answer(prompt, _long(facts, 8), rid=rid))
    try:
        while not task.done():
            await asker.client.post(bodies.ABORT, bodies.abort(rid), admin=True)
            await asyncio.wait({task}, timeout=0.1)
        done = task.result()
    finally:
        task.cancel()
    if not isinstance(done, Aborted):
        raise EngineError(f"a request that was aborted by id ran to its end of {len(done.token_ids)} tokens")
    report.add(OK, "abort", f"a request ends by its id, after {done.num_tokens} tokens")


async def _pause(report: Report, asker: Asker, facts: Facts) -> None:
    """in_place: what runs stops, what comes waits, and both go on as if nothing had been."""
    client, tasks = asker.client, list[asyncio.Task[object]]()
    tasks.append(asyncio.create_task(asker.sample(_prompt(asker, 8), _long(facts, 8))))
    await asyncio.sleep(0.05)
    await client.post(bodies.PAUSE, bodies.pause("in_place"), admin=True)
    try:
        tasks.append(asyncio.create_task(asker.sample(_prompt(asker, 8), SamplingParams(1.0, 1, ()))))
        await asyncio.wait({tasks[1]}, timeout=_PAUSE_S)
        leaked = tasks[1].done() and tasks[1].exception() is None
    finally:
        await client.post(bodies.CONTINUE, bodies.resume(), admin=True)
    await asyncio.gather(*tasks)
    if leaked:
        raise EngineError("a paused server answered a request: weights would change in the middle of a step")
    report.add(OK, "pause", "in place: requests wait, and go on with all their tokens")
