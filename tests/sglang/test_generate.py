"""Samples of a real server: ids, log-probs, routes, ends, versions, aborts and keys, checked with transformers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.base import Turn
from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client, Refused
from asyncrl.engines.sglang.expects import needs
from asyncrl.engines.sglang.update import Updater
from asyncrl.engines.sglang_engine import SglangEngine
from asyncrl.errors import EngineError
from asyncrl.models.describe import describe
from asyncrl.models.routes import RouteHook
from asyncrl.types import SamplingParams, Version
from tests.engines.support import check, plain_forward
from tests.helpers import sglang_server
from tests.helpers.sglang_models import save_untied_moe
from tests.helpers.sglang_server import Server

# Each of these would change every sample, if a request left it to the server.
TRAPS = {
    "top_k": 1, "top_p": 0.1, "min_p": 0.5, "temperature": 3.0, "repetition_penalty": 1.9, "presence_penalty": 1.5,
    "frequency_penalty": 1.5, "logit_bias": {"3": 50.0}, "max_new_tokens": 3, "stop_token_ids": [2, 3, 4, 5],
    "regex": "[0-9]+",
}  # fmt: skip
LOST = ("regex",)
"""Of TRAPS: what a server without a grammar backend for our tokenizer refuses to start with."""
API, ADMIN = "sesame", "master"
ATOL = 1e-4


@pytest.fixture(scope="module")
def served(can_serve: None, untied_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys, whose preferred sampling is nothing like ours."""
    traps = json.dumps({name: value for name, value in TRAPS.items() if name not in LOST})
    log = tmp_path_factory.mktemp("generate") / "server.log"
    running = sglang_server.start(
        log, untied_moe, ("--preferred-sampling-params", traps, "--weight-version", "base"), API, ADMIN
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def reference(untied_moe: Path) -> tuple[Any, RouteHook]:
    model = AutoModelForCausalLM.from_pretrained(untied_moe, dtype=torch.float32).eval()
    return model, RouteHook(model)


class Folder:
    """A version that lies in a folder (asyncrl.engines.base.Source)."""

    kind = "folder"

    def __init__(self, path: Path) -> None:
        self._path = path

    def folder(self) -> Any:
        return contextlib.nullcontext(self._path)


def run(server: Server, job: Callable[[SglangEngine, Client], Awaitable[None]]) -> None:
    """Run a job with an engine on the server, at most 200 s."""

    async def main() -> None:
        async with asyncio.timeout(200):
            client = Client(server.url, API, ADMIN)
            label = (await client.get(bodies.MODEL_INFO))["weight_version"]
            updater = Updater(client, "g0", 1, 60.0, False, needs(server.model, "float32"))
            engine = await SglangEngine.open(
                client, describe(server.model), num_hidden_layers=3, label=label, max_length=512, name="g0",
                updater=updater,
            )  # fmt: skip
            try:
                await job(engine, client)
            finally:
                engine.close()
                await client.close()

    asyncio.run(main())


def prompts(count: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 16, rng.integers(1, 20)).astype(np.int32) for _ in range(count)]


async def is_idle(client: Client) -> bool:
    """True when the server runs and queues nothing: else it refuses to forget its cache."""
    try:
        await client.post(bodies.FLUSH, bodies.flush(), admin=True)
    except Refused:
        return False
    return True


def test_64_concurrent_requests_at_another_temperature(served, reference):
    sampling = SamplingParams(0.7, 24, ())

    async def job(engine, client):
        asked = prompts(16)
        groups = await asyncio.gather(*(engine.generate(prompt, 4, sampling) for prompt in asked))
        for prompt, group in zip(asked, groups, strict=True):
            assert len(group) == 4 and len({tuple(c.token_ids.tolist()) for c in group}) > 1
            for done in group:
                check(*reference, prompt, done, sampling, ATOL)
                assert done.segments[0].version == Version(0, -1) and done.routes_from == 0
        stats = engine.stats()
        assert stats["tokens"] == 64 * 24 and stats["running"] == 0 and stats["busy_s"] > 0
        assert stats["prompt_tokens"] + stats["cached_tokens"] == 4 * sum(map(len, asked))

    run(served, job)


def test_a_response_ends_with_its_stop_token(served, reference):
    sampling = SamplingParams(1.0, 30, (1, 7))

    async def job(engine, client):
        (prompt,) = prompts(1, seed=1)
        group = await engine.generate(prompt, 32, sampling)
        for done in group:
            check(*reference, prompt, done, sampling, ATOL)
        ends = {int(done.token_ids[-1]) for done in group if done.finish_reason == "stop"}
        assert ends == {1, 7} and np.isfinite([done.logprobs[-1] for done in group]).all()

    run(served, job)


def test_a_response_of_all_its_tokens_ends_by_length(served):
    async def job(engine, client):
        # Token 1 is the model's own end token: without stop tokens it ends nothing.
        group = await engine.generate(prompts(1)[0], 8, SamplingParams(1.0, 64, ()))
        assert {(c.finish_reason, len(c.token_ids)) for c in group} == {("length", 64)}
        assert any(1 in c.token_ids[:-1] for c in group)

    run(served, job)


def test_greedy_is_the_argmax(served, reference):
    async def job(engine, client):
        sampling = SamplingParams(0.7, 16, (), greedy=True)
        prompt = prompts(1, seed=2)[0]
        first, second = await engine.generate(prompt, 2, sampling)
        assert first.token_ids.tolist() == second.token_ids.tolist()
        # Its log-probs are those at temperature 1.
        check(*reference, prompt, first, SamplingParams(1.0, 16, (), greedy=True), ATOL)

    run(served, job)


def test_greedy_beside_sampled_changes_neither(served, reference):
    async def job(engine, client):
        asked, greedy, sampled = (
            prompts(8, seed=3),
            SamplingParams(0.5, 16, (), greedy=True),
            SamplingParams(0.5, 16, ()),
        )
        jobs = [engine.generate(p, 1, greedy if i % 2 else sampled) for i, p in enumerate(asked)]
        for i, (prompt, (done,)) in enumerate(zip(asked, await asyncio.gather(*jobs), strict=True)):
            wanted = SamplingParams(1.0, 16, (), greedy=True) if i % 2 else sampled
            check(*reference, prompt, done, wanted, ATOL)

    run(served, job)


def test_the_limit_aborts_and_leaves_nothing_running(served):
    async def job(engine, client):
        long = SamplingParams(1.0, 400, ())
        short = SamplingParams(1.0, 2, ())
        slow = asyncio.ensure_future(engine.generate(prompts(1)[0], 16, long, limit_s=1.0))
        assert len(await engine.generate(prompts(1)[0], 2, short)) == 2
        assert len(await slow) < 16
        assert engine.stats()["running"] == 0 and await is_idle(client)

    run(served, job)


def test_cancelling_leaves_nothing_running(served):
    async def job(engine, client):
        work = asyncio.ensure_future(engine.generate(prompts(1)[0], 16, SamplingParams(1.0, 400, ())))
        while engine.stats()["running"] < 16:
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        # The server has 400 tokens to sample for each otherwise, and looks for lost connections by itself now and then.
        while not await is_idle(client):
            await asyncio.sleep(0.05)

    run(served, job)


def test_a_running_server_is_found_healthy(served):
    async def job(engine, client):
        assert await client.get(bodies.HEALTH) == {}

    run(served, job)


def test_keys_are_needed_and_are_not_shown(served):
    async def main() -> None:
        wrong, half = Client(served.url, "wrong-key", "wrong-admin"), Client(served.url, API)
        body = bodies.generate([3], "x", SamplingParams(1.0, 1, ()), routes=False, cache_key="")
        for call in (
            wrong.get(bodies.MODEL_INFO),
            wrong.post(bodies.GENERATE, body),
            wrong.post(bodies.PAUSE, bodies.pause("in_place"), admin=True),
            # The API key is not the admin's.
            half.post(bodies.PAUSE, bodies.pause("in_place"), admin=True),
        ):
            with pytest.raises(Refused, match="was refused with 401") as caught:
                await call
            assert "wrong" not in str(caught.value) and API not in str(caught.value)
        await wrong.close()
        await half.close()

    asyncio.run(main())


def test_a_request_that_the_server_refuses_says_why(served):
    async def job(engine, client):
        body = bodies.generate([3], "x", SamplingParams(1.0, 10**6, ()), routes=False, cache_key="")
        with pytest.raises(EngineError, match=r"/generate was refused with 400: .*maximum context length"):
            await client.post(bodies.GENERATE, body)

    run(served, job)


def test_every_token_carries_the_version_that_sampled_it(served, reference, tmp_path):
    """The one that was on its way when the server paused is not trained on: it stands in the wrong span.

    From here on the server has other weights than it started with.
    """
    other = save_untied_moe(tmp_path / "other", seed=5)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    sampling, prompt = SamplingParams(1.0, 200, ()), prompts(1, seed=4)[0]

    async def job(engine, client):
        work = asyncio.ensure_future(engine.generate(prompt, 16, sampling))
        while engine.stats()["running"] < 16:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        await engine.load(Version(0, 4), Folder(other))
        group = await work
        first, astray = len(prompt) - 1, 0
        changed = [done for done in group if len(done.segments) > 1]
        assert changed, "all were finished before the load"
        for done in changed:
            assert [s.version for s in done.segments] == [Version(0, -1), Version(0, 4)]
            switch, ids = done.segments[1].start, np.concatenate((prompt, done.token_ids)).astype(np.int32)
            logits, routes = plain_forward(*reference, ids)
            logp = torch.log_softmax(logits[first:-1].double(), dim=-1)
            old = logp.gather(1, torch.from_numpy(done.token_ids).long()[:, None])[:, 0].numpy()
            np.testing.assert_allclose(done.logprobs[:switch], old[:switch], rtol=0, atol=ATOL)
            assert done.sampled is not None and np.flatnonzero(~done.sampled).tolist() == [switch]
            astray += abs(done.logprobs[switch] - old[switch]) < ATOL
            assert (abs(done.logprobs - old)[switch + 1 : switch + 8] > ATOL).any()
            # Routes of old tokens are those of the weights that sampled them.
            rows = first + switch
            assert routes is not None and done.routes is not None
            np.testing.assert_array_equal(np.sort(done.routes[:rows]), np.sort(routes[:rows]))
        # SGLang 0.5.23 does it to all of a batch; when it no longer does, nothing has to be left out.
        assert astray > 0 and engine.stats()["unsure_tokens"] == len(changed)
        (fresh,) = await engine.generate(prompt, 1, sampling)
        assert fresh.sampled is None
        assert {s.version for s in fresh.segments} == {Version(0, 4)}
        check(model, RouteHook(model), prompt, fresh, sampling, ATOL)

    run(served, job)


def test_turns_of_a_conversation_over_a_load(served, untied_moe, tmp_path):
    """Each asks for the rows that are missing; what is cached is used again within a version, and never after it."""
    sampling, rng = SamplingParams(1.0, 9, ()), np.random.default_rng(5)
    folders = {1: untied_moe, 2: save_untied_moe(tmp_path / "newer", seed=6)}
    models = {v: AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for v, f in folders.items()}
    hooks = {v: RouteHook(model) for v, model in models.items()}

    async def job(engine, client):
        prompt, rows, cached = prompts(1, seed=6)[0], [], []
        for turn in range(4):
            version = 1 + turn // 2
            if turn % 2 == 0:
                await engine.load(Version(0, version), Folder(folders[version]))
            known = sum(map(len, rows))
            (done,) = await engine.generate(prompt, 1, sampling, turn=Turn("c", known))
            assert {s.version for s in done.segments} == {Version(0, version)} and done.routes_from == 0
            rows.append(done.routes)
            cached.append((done.extra["cached_tokens"], known))
            ids = np.concatenate((prompt, done.token_ids)).astype(np.int32)
            assert sum(map(len, rows)) == len(ids) - 1
            # The rows of this turn are those of this version; for the ones before the caller keeps what it has.
            _, native = plain_forward(models[version], hooks[version], ids)
            done.routes = np.concatenate((native[:known].astype(np.uint8), done.routes))
            check(models[version], hooks[version], prompt, done, sampling, ATOL)
            prompt = np.concatenate((ids, rng.integers(2, 16, 1 + 3 * turn))).astype(np.int32)
        engine.forget("c")
        assert cached[1] == (cached[1][1],) * 2 and cached[3] == (cached[3][1],) * 2 and cached[3][0] > cached[1][0]
        assert cached[0][0] == cached[2][0] == 0

    run(served, job)
