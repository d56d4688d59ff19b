"""What no flag of a server tells and one or two small requests do. Lines in comments are of SGLang 0.5.23, srt."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np

from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client, Refused
from asyncrl.errors import EngineError
from asyncrl.types import SamplingParams

_TOP = 16
"""Most probable tokens that are compared."""
_FLAT = 1e-3
"""Spread of their log-probs under which every temperature gives the same ones, as with an output matrix of zeros."""
_NEAR = 0.2
"""Temperatures closer to 1 than this are checked at 0.5: what a server does with one it does with all."""


async def check_temperature(client: Client, temperature: float) -> bool:
    """True when log-probs are those at the sampling temperature, EngineError when they are of another one.

    Asks for the first token of the same prompt at temperature 1 and at this one: differences of log-probs must be
    1 / temperature times as large. False when the server's weights leave no difference to compare; ask again later.
    """
    if temperature == 1.0:
        return True
    if abs(temperature - 1.0) < _NEAR:
        temperature = 0.5
    plain, scaled = [await _top_logprobs(client, t) for t in (1.0, temperature)]
    common = sorted(plain.keys() & scaled.keys())
    if len(common) < 2:
        return False
    a, b = (np.array([top[token] for token in common]) for top in (plain, scaled))
    a, b = a - a.mean(), b - b.mean()
    if np.sqrt((a * a).mean()) < _FLAT:
        return False
    found = float((a @ a) / (a @ b)) if abs(a @ b) > 0 else float("inf")
    if abs(found / temperature - 1.0) > 0.5 * abs(1.0 / temperature - 1.0) * min(1.0, temperature):
        # layers/sampler.py:192, 322
        raise EngineError(
            f"{client.url} gives log-probs at temperature {found:.3g} for samples at temperature {temperature:g}; "
            "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
    return True


async def check_vocabulary(client: Client, vocab_size: int) -> None:
    """EngineError when the server's model has fewer tokens than the run's."""
    # managers/tokenizer_manager.py:1513 compares these ids, and only these, with the vocabulary.
    body = _one_token(1.0) | {"token_ids_logprob": [vocab_size - 1]}
    try:
        await client.post(bodies.GENERATE, body)
    except Refused as exc:
        if "vocabulary" not in exc.message:
            raise
        raise EngineError(
            f"the run's model has {vocab_size} tokens, that of {client.url} fewer: {exc.message}; serve model.path"
        ) from exc


async def _top_logprobs(client: Client, temperature: float) -> dict[int, float]:
    """Log-probs of the most probable first tokens, by id."""
    reply = await client.post(bodies.GENERATE, _one_token(temperature) | {"top_logprobs_num": _TOP})
    try:
        (rows,) = reply["meta_info"]["output_top_logprobs"]
        return {int(token): float(logprob) for logprob, token, *_ in rows}
    except (KeyError, TypeError, ValueError) as exc:
        raise EngineError(
            f"{client.url} gave no output_top_logprobs of one token ({exc!r}); SGLang returns them for top_logprobs_num"
        ) from exc


def _one_token(temperature: float) -> dict[str, Any]:
    """A request for one token, that finds nothing in a cache and leaves nothing that others find."""
    name = f"check-{uuid.uuid4().hex}"
    return bodies.generate([1, 0, 1, 0], name, SamplingParams(temperature, 1, ()), routes=False, cache_key=name)
