"""The start-up probe against engines that are wrong in known ways (B05, B07), and one that is right."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.engines.probe import probe
from asyncrl.errors import EngineError, RouteError, TrajectoryError
from asyncrl.types import Completion, ModelInfo, SamplingParams, Segment, Version

INFO = ModelInfo(layers=(0, 1, 3), num_experts=8, top_k=2, vocab_size=50)


def good(rows: int = 63, tokens: int = 32) -> Completion:
    """Tokens after 32; expert ids (t + l) mod 8 and the next one."""
    t, layer = np.arange(rows)[:, None], np.arange(3)[None]
    routes = np.stack(((t + layer) % 8, (t + layer + 1) % 8), axis=-1).astype(np.uint8)
    ids, logprobs = np.arange(tokens, dtype=np.int32), np.full(tokens, -1.5, dtype=np.float32)
    return Completion(ids, logprobs, (Segment(Version(0, 0), 0, tokens),), "length", routes)


def second() -> Completion:
    """One token after the same 32."""
    return good(rows=32, tokens=1)


class Fake:
    """An engine that answers the first request with these completions, and any other one with `again` or raises it."""

    def __init__(
        self,
        *completions: Completion,
        info: ModelInfo = INFO,
        delay_s: float = 0.0,
        again: Completion | None = None,
        error: Exception | None = None,
    ) -> None:
        self.completions = list(completions)
        self.info = info
        self.delay_s = delay_s
        self.again = again or second()
        self.error = error
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
        if self.error is not None:
            raise self.error
        return self.completions if len(self.asked) == 1 else [self.again]

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


ERRORS = {
    "answer": EngineError("POST http://host:1/generate was refused with 500: Internal Server Error"),
    "routes": RouteError("p#0: routes lost: expected 63 rows, received none"),
    "tokens and log-probs": TrajectoryError("p#0: 32 token ids but 31 log-probs"),
}


@pytest.mark.parametrize("check", ERRORS)
def test_what_the_engine_says_itself_is_passed_on_with_the_name_of_the_check(check):
    with pytest.raises(EngineError, match=f"check '{check}': .*") as caught:
        asyncio.run(probe(Fake(error=ERRORS[check])))
    assert str(ERRORS[check]) in str(caught.value)


def test_a_good_engine_is_asked_twice_as_the_run_samples_but_without_stop_tokens():
    engine = Fake(good())
    done = asyncio.run(probe(engine, SamplingParams(0.6, 500, (3,), greedy=True)))
    assert engine.asked == [(32, 1, SamplingParams(0.6, 32, ())), (32, 1, SamplingParams(0.6, 1, ()))]
    assert len(done.token_ids) == 32


def rows_of_another_prompt(routes: np.ndarray) -> np.ndarray:
    return (routes + 4) % 8


def rows_lost(routes: np.ndarray) -> np.ndarray:
    return routes[16:]


CACHED = {
    "another request's rows (B07)": (rows_of_another_prompt, "same prompt again"),
    "no rows for what is in the cache": (rows_lost, "row count"),
    "zeros for what is in the cache": (np.zeros_like, "distinct experts"),
}


@pytest.mark.parametrize("case", CACHED)
def test_wrong_rows_for_a_prompt_from_the_cache_are_refused(case):
    change, check = CACHED[case]
    done = second()
    with pytest.raises(EngineError, match=f"check '{check}'"):
        asyncio.run(probe(Fake(good(), again=replace(done, routes=change(done.routes)))))


def test_a_few_near_ties_that_flip_are_no_fault():
    done = second()
    assert done.routes is not None
    routes = done.routes.copy()
    routes[3:6, 0, 1] = (routes[3:6, 0, 1] + 3) % 8
    asyncio.run(probe(Fake(good(), again=replace(done, routes=routes))))


def test_a_log_prob_of_exactly_zero_passes():
    done = with_logprob(1e-7)
    asyncio.run(probe(Fake(done)))


def test_a_dense_engine_needs_no_routes():
    info = ModelInfo((), 0, 0, 50)
    asyncio.run(probe(Fake(replace(good(), routes=None), info=info, again=replace(second(), routes=None))))
