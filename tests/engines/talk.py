"""Conversations with a batch that is stepped by hand, and what their turns are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.engines.base import Turn
from asyncrl.engines.flat import FlatDecoder
from asyncrl.engines.module_decoder import CachedDecoder, RecomputeDecoder
from asyncrl.types import Completion, SamplingParams
from tests.engines.support import LOUD, Stepper
from tests.helpers import tiny_models

DECODERS = [FlatDecoder, CachedDecoder, RecomputeDecoder]


def sampling(new: int, seed: int | None = None, stop: tuple[int, ...] = ()) -> SamplingParams:
    """Greedy without a seed."""
    return SamplingParams(0.8, new, stop, greedy=seed is None, seed=seed)


class Talk:
    """One conversation with a stepper: what came before, and the route rows that its caller has."""

    def __init__(self, stepper: Stepper, name: str = "c", seed: int = 0) -> None:
        self.stepper, self.name = stepper, name
        self.rng = np.random.default_rng(seed)
        self.ids: list[int] = self.rng.integers(0, 64, self.rng.integers(1, 30)).tolist()
        self.rows: list[Any] = []
        self.request: Any = None

    def ask(self, params: SamplingParams) -> None:
        """Submit the next turn."""
        turn = Turn(self.name, sum(len(part) for part in self.rows))
        self.request = self.stepper.submit(self.ids, 1, params, turn)

    def hear(self) -> Completion:
        """The finished turn; its tokens and rows become part of the conversation."""
        assert self.request.error is None
        (done,) = self.request.completions
        self.ids = self.ids + done.token_ids.tolist()
        if done.routes is not None:
            self.rows.append(done.routes)
        return done

    def observe(self, most: int = 12) -> None:
        """Other tokens follow: 1 to most."""
        self.ids = self.ids + self.rng.integers(0, 64, self.rng.integers(1, most + 1)).tolist()

    def turn(self, params: SamplingParams) -> Completion:
        """Ask, run everything, hear."""
        self.ask(params)
        self.stepper.finish()
        return self.hear()


def model_of(dense: bool, **fields: Any) -> Any:
    return tiny_models.qwen3_dense(**LOUD, **fields) if dense else tiny_models.qwen3_moe(**LOUD, **fields)


def assert_same(ours: Completion, fresh: Completion, rows: int) -> None:
    """Tokens and segments equal, log-probs close, routes those of the fresh request from `rows` on."""
    np.testing.assert_array_equal(ours.token_ids, fresh.token_ids)
    np.testing.assert_allclose(ours.logprobs, fresh.logprobs, rtol=0, atol=1e-5)
    assert (ours.segments, ours.finish_reason) == (fresh.segments, fresh.finish_reason)
    if fresh.routes is None:
        assert ours.routes is None
    else:
        np.testing.assert_array_equal(np.sort(ours.routes, -1), np.sort(fresh.routes[rows:], -1))
