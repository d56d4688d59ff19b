"""A real server behind a proxy that corrupts its replies: refused by name at the start, and never trained later (B05).

What an engine returned once and a prompt from its cache must be the same thing (B07).
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from warm_start import EOS

from asyncrl.engines.probe import probe
from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.checks import check_temperature, check_vocabulary
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.flags import check
from asyncrl.engines.sglang_engine import SglangEngine
from asyncrl.errors import EngineError, RouteError, TrajectoryError
from asyncrl.generator.collect import to_trajectory
from asyncrl.generator.loop import Generator
from asyncrl.models.describe import describe, read_config
from asyncrl.replay.ledger import State
from asyncrl.types import SamplingParams, Version
from tests.generator.test_timeouts import Rig
from tests.helpers import sglang_server
from tests.helpers.corrupting_proxy import CorruptingProxy
from tests.helpers.sglang_server import Server

SAMPLING = SamplingParams(0.6, 16, ())
PROMPT = np.arange(2, 12, dtype=np.int32)


@pytest.fixture(scope="module")
def moe_server(can_serve, untied_moe, tmp_path_factory) -> Iterator[Server]:
    running = sglang_server.start(tmp_path_factory.mktemp("probe") / "server.log", untied_moe)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def shared_proxy(moe_server) -> Iterator[CorruptingProxy]:
    with CorruptingProxy(moe_server.url, num_experts=8) as made:
        yield made


@pytest.fixture
def proxy(shared_proxy):
    yield shared_proxy
    shared_proxy.honest()


@dataclass
class Relabel:
    """An updater of weights that never change; their label does."""

    client: Client
    torn: bool = field(default=False)

    async def update(self, label, source):
        await self.client.post(bodies.MARK_VERSION, bodies.mark_version(label), admin=True)

    async def reset(self):
        return None


@asynccontextmanager
async def opened(url: str, model, answer_s: float = 20.0) -> AsyncIterator[SglangEngine]:
    """An engine as a generator opens it, without its probe."""
    client, info = Client(url, answer_s=answer_s), describe(model)
    config = read_config(model)
    facts = check(
        await client.get(bodies.SERVER_INFO),
        await client.get(bodies.MODEL_INFO),
        info,
        routes=True,
        carrier="collective",
        num_hidden_layers=config["num_hidden_layers"],
        architectures=config["architectures"],
    )
    engine = await SglangEngine.open(
        client,
        info,
        num_hidden_layers=facts.num_hidden_layers,
        label=facts.label,
        max_length=facts.max_length,
        name="g0",
        updater=Relabel(client),
        answer_s=answer_s,
    )
    try:
        yield engine
    finally:
        await client.close()
        await asyncio.to_thread(engine.close)


def run(url: str, model, job, answer_s: float = 20.0):
    """What job(engine) returns."""

    async def main():
        async with opened(url, model, answer_s) as engine:
            return await job(engine)

    return asyncio.run(main())


def test_an_honest_server_passes(proxy, moe_server):
    done = run(proxy.url, moe_server.model, lambda engine: probe(engine, SAMPLING))
    assert done.routes.shape == (63, 3, 2) and len(done.token_ids) == 32
    assert proxy.corrupted.total() == 0


REFUSED = {
    "zeros": ("routes", "stands there twice"),
    "repeated_row": ("distinct rows", "the same routes"),
    "row_too_many": ("routes", "expected 63 rows"),
    "row_missing": ("routes", "expected 63 rows"),
    "id_too_large": ("routes", "expert id 8"),
    "negative_id": ("routes", "expert id -1"),
    "no_routes_field": ("routes", "received none"),
    "stale_prefix": ("same prompt again", "of its experts"),
    "nan_logprobs": ("log-probs finite", "1 of 32"),
    "null_logprobs": ("log-probs finite", "1 of 32"),
    "positive_logprobs": ("log-probs <= 0", "0.5"),
    "logprob_missing": ("tokens and log-probs", "31 log-probs"),
    "logprobs_shifted": ("tokens and log-probs", "its log-prob is of token"),
    "no_logprobs": ("answer", "output_token_logprobs is missing"),
    "no_output_ids": ("answer", "output_ids is missing"),
    "no_weight_versions": ("answer", "weight_versions is missing"),
    "swapped_version": ("answer", "'somebody-elses'"),
    "version_gap": ("answer", "do not cover"),
    "cut_short": ("answer", "cut at 31 tokens"),
    "http_500": ("answer", "refused with 500"),
    "no_json": ("answer", "not JSON"),
    "cut_connection": ("answer", "failed, waiting for its answer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_corruption_is_refused_at_the_start_by_the_name_of_the_check(proxy, moe_server, name):
    wanted, words = REFUSED[name]
    proxy.corrupt(name)
    with pytest.raises(EngineError, match="start-up probe") as caught:
        run(proxy.url, moe_server.model, lambda engine: probe(engine, SAMPLING))
    assert f"check {wanted!r}" in str(caught.value) and words in str(caught.value)
    assert proxy.corrupted[name]


def test_a_server_that_hangs_is_refused(moe_server):
    with CorruptingProxy(moe_server.url) as proxy:
        proxy.corrupt("hang")
        with pytest.raises(EngineError, match=r"check 'answer'.*nothing within"):
            run(proxy.url, moe_server.model, lambda engine: probe(engine, SAMPLING, timeout_s=3.0), answer_s=5.0)


def test_log_probs_of_another_temperature_are_refused(proxy):
    async def main(expected):
        client = Client(proxy.url)
        try:
            return await check_temperature(client, expected)
        finally:
            await client.close()

    assert asyncio.run(main(0.6)) and asyncio.run(main(1.4)) and asyncio.run(main(0.95))
    proxy.corrupt("ignores_temperature")
    assert asyncio.run(main(1.0))  # nothing to tell apart
    for temperature in (0.3, 0.95, 2.0):
        with pytest.raises(EngineError, match=r"gives log-probs at temperature 1 .*SGLANG_RETURN_ORIGINAL_LOGPROB"):
            asyncio.run(main(temperature))


def test_a_smaller_vocabulary_is_refused(moe_server):
    async def main(tokens):
        client = Client(moe_server.url)
        try:
            await check_vocabulary(client, tokens)
        finally:
            await client.close()

    asyncio.run(main(16))
    with pytest.raises(EngineError, match=r"has 17 tokens.*fewer.*serve model.path"):
        asyncio.run(main(17))


LATER = {
    "zeros": RouteError,
    "row_too_many": RouteError,
    "row_missing": RouteError,
    "id_too_large": RouteError,
    "negative_id": RouteError,
    "no_routes_field": RouteError,
    "logprob_missing": TrajectoryError,
    "logprobs_shifted": TrajectoryError,
    "positive_logprobs": TrajectoryError,
    "swapped_version": EngineError,
    "no_weight_versions": EngineError,
    "cut_short": EngineError,
    "http_500": EngineError,
    "cut_connection": EngineError,
}


@pytest.mark.parametrize("name", LATER)
def test_after_a_good_start_a_corrupted_sample_fails_its_group_and_no_other(proxy, moe_server, name):
    async def job(engine):
        await probe(engine, SAMPLING)
        # One of four replies is bad: nothing of its group may be used.
        proxy.corrupt(name, times=1)
        with pytest.raises(LATER[name]) as caught:
            group = await engine.generate(PROMPT, 4, SAMPLING)
            for i, done in enumerate(group):
                to_trajectory(done, f"p#{i}", len(PROMPT), 0.0, engine.describe(), True, ())
        assert proxy.corrupted[name]
        again = await engine.generate(PROMPT, 4, SAMPLING)
        return str(caught.value), [len(done.token_ids) for done in again]

    proxy.corrupted.clear()
    message, lengths = run(proxy.url, moe_server.model, job)
    assert "g0-" in message or "p#" in message or proxy.url in message
    assert lengths == [16] * 4


def test_null_log_probs_after_the_start_are_missing_and_not_made_up(proxy, moe_server):
    async def job(engine):
        await probe(engine, SAMPLING)
        proxy.corrupt("null_logprobs", times=1)
        (done,) = await engine.generate(PROMPT, 1, SAMPLING)
        return to_trajectory(done, "p#0", len(PROMPT), 0.0, engine.describe(), True, ())

    trajectory = run(proxy.url, moe_server.model, job)
    assert np.isnan(trajectory.logprobs).tolist() == [i == 2 for i in range(16)]


def test_the_same_prompt_from_the_cache_has_the_same_rows(proxy, moe_server):
    """B07 (a): the rows of a prefix that was not run again are those of when it was."""

    async def job(engine):
        return [await engine.generate(PROMPT, 2, SAMPLING) for _ in range(2)]

    first, second = run(proxy.url, moe_server.model, job)
    assert second[0].extra["cached_tokens"] > 0
    rows = [np.sort(done.routes[: len(PROMPT) - 1], -1) for done in (*first, *second)]
    assert all(np.array_equal(rows[0], other) for other in rows[1:])


class ServerRig(Rig):
    """Replay and a generator whose engine is the server behind the proxy."""

    def __init__(self, folder, tmp_path, engine: SglangEngine) -> None:
        changes = {"replay": {"lease_timeout_s": 60}, "algorithm": {"group_size": 4}}
        super().__init__(folder, tmp_path, **changes)
        self.engine.close()
        self.engine = engine
        self.sampler = replace(self.sampler, engine=engine)

    def close(self) -> None:
        self.pool.close()
        self.server.socket.close()


@pytest.mark.parametrize("name", ["zeros", "row_missing", "id_too_large", "no_routes_field", "logprobs_shifted"])
def test_a_corrupted_group_goes_back_with_its_reason_and_never_reaches_the_queue(
    proxy, moe_server, tmp_path, caplog, name
):
    """B05 while training: the lease fails, is given out again, and only the good attempt is queued."""
    proxy.corrupted.clear()
    # The random model names no end token, which a task needs.
    folder = shutil.copytree(moe_server.model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))

    async def job(engine):
        await engine.load(Version(0, 0), None)
        rig = ServerRig(folder, tmp_path, engine)

        async def scenario(rig: Rig, generator: Generator) -> None:
            await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) == 1)
            assert rig.queue.take(0, 0) is not None
            ((entry,),) = [[e for _, e in rig.queue.shard(0, 0, 1)]]
            assert entry.attempt == 2 and len(entry.digest.responses) == 4
            assert (generator.counters["failed"], generator.counters["groups"]) == (1, 1)

        try:
            proxy.corrupt(name, times=1)
            await rig.run(scenario)
        finally:
            rig.close()

    try:
        run(proxy.url, moe_server.model, job)
    finally:
        moe_server.call("/update_weight_version", bodies.mark_version("default"))
    assert proxy.corrupted == {name: 1}
    (failed,) = [r.message for r in caplog.records if "failed: " in r.message and "lease" in r.message]
    assert ("TrajectoryError: g0-" if name == "logprobs_shifted" else "RouteError: g0-") in failed
