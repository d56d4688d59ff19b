"""The start-up probe against engines that are wrong in known ways, and one that is right."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.engines.probe import probe
from asyncrl.errors import EngineError
from asyncrl.types import Completion, ModelInfo, SamplingParams, Segment, Version

INFO = ModelInfo(layers=(0, 1, 3), num_experts=8, top_k=2, vocab_size=50)


def good(rows: int = 63) -> Completion:
    """32 tokens after 32; expert ids (t + l) mod 8 and the next one."""
    t, layer = np.arange(rows)[:, None], np.arange(3)[None]
    routes = np.stack(((t + layer) % 8, (t + layer + 1) % 8), axis=-1).astype(np.uint8)
    tokens, logprobs = np.arange(32, dtype=np.int32), np.full(32, -1.5, dtype=np.float32)
    return Completion(tokens, logprobs, (Segment(Version(0, 0), 0, 32),), "length", routes)


class Fake:
    """An engine that answers every request with the same completions."""

    def __init__(self, *completions: Completion, info: ModelInfo = INFO, delay_s: float = 0.0) -> None:
        self.completions = list(completions)
        self.info = info
        self.delay_s = delay_s
        self.asked: list[tuple[int, int, SamplingParams]] = []

    @property
    def version(self) -> Version:
        return Version(0, 0)

    def describe(self) -> ModelInfo:
        return self.info

    async def generate(self, prompt_ids, n, sampling):
        self.asked.append((len(prompt_ids), n, sampling))
        assert prompt_ids.min() >= 0 and prompt_ids.max() < self.info.vocab_size
        await asyncio.sleep(self.delay_s)
        return self.completions

    async def load(self, version, source):
        raise NotImplementedError

    def stats(self):
        return {}

    def close(self):
        pass


def with_routes(change: Callable[[np.ndarray], np.ndarray]) -> Completion:
    done = good()
    assert done.routes is not None
    return replace(done, routes=change(done.routes))


def with_logprob(value: float) -> Completion:
    done = good()
    done.logprobs[7] = value
    return done


def one_repeated_row(routes: np.ndarray) -> np.ndarray:
    routes = routes.copy()
    routes[32:] = routes[32]
    return routes


def same_rows_in_another_order(routes: np.ndarray) -> np.ndarray:
    routes = one_repeated_row(routes)
    routes[40:] = routes[40:, :, ::-1]
    return routes


def id_8(routes: np.ndarray) -> np.ndarray:
    routes = routes.copy()
    routes[50, 2, 1] = 8
    return routes


BROKEN = {
    "zeros": (with_routes(np.zeros_like), "distinct experts"),
    "one repeated row": (with_routes(one_repeated_row), "distinct rows"),
    "one row in two orders": (with_routes(same_rows_in_another_order), "distinct rows"),
    "an id that is no expert": (with_routes(id_8), "expert range"),
    "a row for the last token": (good(rows=64), "row count"),
    "a row too few": (good(rows=62), "row count"),
    "only generated rows": (with_routes(lambda routes: routes[32:]), "row count"),
    "a layer missing": (with_routes(lambda routes: routes[:, :2]), "row count"),
    "no routes": (replace(good(), routes=None), "routes"),
    "NaN": (with_logprob(float("nan")), "log-probs finite"),
    "-inf": (with_logprob(float("-inf")), "log-probs finite"),
    "a positive log-prob": (with_logprob(0.01), "log-probs <= 0"),
    "a log-prob too few": (replace(good(), logprobs=good().logprobs[:-1]), "log-prob count"),
    "a token too few": (replace(good(), token_ids=good().token_ids[:-1]), "token count"),
    "stopped without a stop token": (replace(good(), finish_reason="stop"), "token count"),
    "a token outside the vocabulary": (replace(good(), token_ids=good().token_ids + 19), "token range"),
    "a version gap": (replace(good(), segments=(Segment(Version(0, 0), 0, 31),)), "version segments"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_engine_is_refused_and_the_check_is_named(case):
    done, check = BROKEN[case]
    with pytest.raises(EngineError, match=f"check '{check}'"):
        asyncio.run(probe(Fake(done)))


def test_two_answers_to_one_question_are_refused():
    with pytest.raises(EngineError, match="check 'sample count'"):
        asyncio.run(probe(Fake(good(), good())))


def test_an_engine_that_does_not_answer_is_refused():
    with pytest.raises(EngineError, match="check 'answer'"):
        asyncio.run(probe(Fake(good(), delay_s=30), timeout_s=0.05))


def test_a_good_engine_is_asked_once_as_the_run_samples_but_without_stop_tokens():
    engine = Fake(good())
    done = asyncio.run(probe(engine, SamplingParams(0.6, 500, (3,), greedy=True)))
    assert engine.asked == [(32, 1, SamplingParams(0.6, 32, ()))]
    assert len(done.token_ids) == 32


def test_a_log_prob_of_exactly_zero_passes():
    done = with_logprob(1e-7)
    asyncio.run(probe(Fake(done)))


def test_a_dense_engine_needs_no_routes():
    info = ModelInfo((), 0, 0, 50)
    asyncio.run(probe(Fake(replace(good(), routes=None), info=info)))
