"""Conversations under random events: loads, cancels, cuts, forgets, rows that move, ordinary requests between."""

from typing import Any

import numpy as np
import pytest

from asyncrl.engines.module_decoder import RecomputeDecoder
from asyncrl.models.names import stream
from asyncrl.models.routes import RouteHook
from asyncrl.types import SamplingParams, Version
from tests.engines.support import Stepper, check, plain_forward
from tests.engines.talk import DECODERS, Talk, model_of


class Chaos:
    """Random turns, ordinary requests, cancels, cuts, forgets and loads over few rows, each answer checked."""

    KINDS = ("new", "turn", "turn", "ask", "cancel", "cut", "forget", "load", *["step"] * 6)

    def __init__(self, make: Any, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.models = [model_of(False, seed=i) for i in range(2)]
        self.hooks = [RouteHook(model) for model in self.models]
        self.weights = [[(name, tensor.clone()) for name, tensor in stream(model)] for model in self.models]
        self.stepper = Stepper(model_of(False), rows=4, make=make)
        self.talks: list[Talk] = []
        self.busy: dict[str, int] = {}
        """Conversations with a turn, and the loads there were when it was asked for."""
        self.mixed: set[str] = set()
        """Conversations whose last turn ran through a load, and since when there was none."""
        self.ordinary: list[tuple[int, Any]] = []
        self.loads = self.checks = self.dropped = 0

    def event(self) -> None:
        kind = str(self.rng.choice(self.KINDS))
        idle = [talk for talk in self.talks if talk.name not in self.busy and len(talk.ids) < 150]
        asked = [talk for talk in self.talks if talk.name in self.busy]
        batch, often = self.stepper.batch, self.rng.random()
        if kind == "new" and len(self.talks) < 7:
            self.talks.append(Talk(self.stepper, f"c{len(self.talks)}", seed=int(self.rng.integers(1000))))
        elif kind == "turn" and idle:
            talk = idle[self.rng.integers(len(idle))]
            talk.ask(SamplingParams(0.9, int(self.rng.integers(1, 15)), (9,), greedy=often < 0.5))
            self.busy[talk.name] = self.loads
        elif kind == "ask":
            prompt = self.rng.integers(0, 64, self.rng.integers(1, 20))
            params = SamplingParams(1.0, int(self.rng.integers(1, 12)), ())
            self.ordinary.append((self.loads, self.stepper.submit(prompt, int(self.rng.integers(1, 4)), params)))
        elif kind in ("cancel", "cut") and asked and often < 0.3:
            getattr(batch, kind)(asked[self.rng.integers(len(asked))].request)
        elif kind == "forget" and self.talks and often < 0.3:
            batch.forget(self.talks[self.rng.integers(len(self.talks))].name)
        elif kind == "load" and often < 0.3:
            self.loads, self.mixed = self.loads + 1, set()
            self.dropped += len(batch.conversations) > 0
            self.stepper.load(Version(0, self.loads), self.weights[self.loads % 2])
        else:
            batch.step()
        assert len(batch.conversations) <= 4
        self.settle()

    def settle(self) -> None:
        for talk in self.talks:
            if talk.name in self.busy and talk.request.ended:
                began = self.busy.pop(talk.name)
                if talk.request.error is None and talk.request.completions:
                    self.heard(talk, began)

    def heard(self, talk: Talk, began: int) -> None:
        rows, done = sum(len(part) for part in talk.rows), talk.hear()
        if len(done.segments) > 1:
            self.mixed.add(talk.name)
        elif began == self.loads and talk.name not in self.mixed:
            model, hook = self.models[began % 2], self.hooks[began % 2]
            _, native = plain_forward(model, hook, np.array(talk.ids, np.int32))
            done.routes = np.concatenate((native[:rows].astype(np.uint8), done.routes))
            check(model, hook, talk.request.prompt_ids, done, talk.request.sampling, 2e-5)
            self.checks += 1
        assert sum(len(part) for part in talk.rows) == len(talk.ids) - 1
        talk.observe(6)

    def end(self) -> None:
        self.stepper.finish()
        self.settle()
        for began, request in self.ordinary:
            for done in request.completions if began == self.loads else ():
                check(self.models[began % 2], self.hooks[began % 2], request.prompt_ids, done, request.sampling, 2e-5)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", DECODERS)
def test_whatever_happens_every_answer_is_that_of_a_fresh_request(make, seed):
    chaos = Chaos(make, seed)
    for _ in range(350):
        chaos.event()
    chaos.end()
    assert chaos.checks >= 8 and chaos.loads >= 2
    saves = make is not RecomputeDecoder
    assert (chaos.stepper.batch.conversations.reused_tokens > 0) == (chaos.dropped > 0) == saves
