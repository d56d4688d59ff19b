"""The disk carrier into a real server: what it samples then, what is kept while it loads, what is refused.

The model is tied, and SGLang does not tie it: without the output matrix that is sent every log-prob would be -ln V.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.engines.gate import Gate
from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.expects import needs
from asyncrl.engines.sglang.update import Updater
from asyncrl.engines.sglang_engine import SglangEngine
from asyncrl.errors import VersionGone, WeightSyncError
from asyncrl.models.describe import describe
from asyncrl.models.names import stream
from asyncrl.models.routes import RouteHook
from asyncrl.types import SamplingParams, Version
from asyncrl.weights.disk import Publisher
from asyncrl.weights.folders import Folder
from asyncrl.weights.rollout import for_sglang
from tests.engines.support import check
from tests.helpers import sglang_server
from tests.helpers.sglang_server import QUICKSTART, Server

V1, V2, V3 = (Version(0, update) for update in (1, 2, 3))
PROMPT = np.array([5, 6, 7, 3, 9], dtype=np.int32)
SAMPLING = SamplingParams(1.0, 24, ())
ATOL = 1e-4


@pytest.fixture(scope="module")
def served(can_serve: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = sglang_server.start(tmp_path_factory.mktemp("disk") / "server.log", QUICKSTART)
    yield running
    running.stop()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    """Keeps one version, in several files."""
    config = json.loads((QUICKSTART / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    made = Publisher(
        tmp_path / "weights", QUICKSTART, keep=1, transform=lambda w: for_sglang(w, config), shard_bytes=100_000
    )
    yield made
    made.close()


def trained(seed: int) -> PreTrainedModel:
    """The model some updates later."""
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return model


def run(server: Server, job: Callable[[SglangEngine, Client], Awaitable[None]]) -> None:
    """Run a job with an engine that compares checksums, at most 200 s."""

    async def main() -> None:
        async with asyncio.timeout(200):
            client = Client(server.url)
            info = await client.get(bodies.MODEL_INFO)
            updater = Updater(client, "g0", 1, 60.0, True, needs(server.model, "float32"))
            layers = json.loads((server.model / "config.json").read_text())["num_hidden_layers"]
            engine = await SglangEngine.open(
                client, describe(server.model), num_hidden_layers=layers, label=info["weight_version"],
                max_length=128, name="g0", updater=updater,
            )  # fmt: skip
            try:
                await job(engine, client)
            finally:
                engine.close()
                await client.close()

    asyncio.run(main())


async def samples_as(engine: Any, model: PreTrainedModel, version: Version) -> None:
    hook = RouteHook(model)
    for done in await engine.generate(PROMPT, 4, SAMPLING):
        check(model, hook, PROMPT, done, SAMPLING, ATOL)
        assert [s.version for s in done.segments] == [version]


def test_a_server_loads_what_was_published(served: Server, publisher: Publisher) -> None:
    models = {V1: trained(1), V2: trained(2)}

    async def job(engine: SglangEngine, client: Client) -> None:
        for version, model in models.items():
            source = publisher.publish(version, stream(model))
            await engine.load(version, Folder(source, version))
            assert engine.version == version
            # With a name of this engine behind it.
            assert (await client.get(bodies.MODEL_INFO))["weight_version"].startswith(f"{version}+")
            await samples_as(engine, model, version)
        assert [folder.name for folder in publisher.directory.iterdir()] == ["v0.2"]

    run(served, job)
    # More than what is tied in one file.
    assert len(list((publisher.directory / "v0.2").glob("*.safetensors"))) > 2


class Overtaken(Folder):
    """Newer versions come, and the cleaner with them, when the reader has chosen this one."""

    def __init__(self, source: str, version: Version, publish: Callable[[], None]) -> None:
        super().__init__(source, version)
        self._publish = publish

    @contextmanager
    def folder(self) -> Iterator[Path]:
        with super().folder() as path:
            self._publish()
            yield path


@pytest.mark.parametrize("gated", [False, True])
def test_a_folder_is_removed_only_after_its_load(served: Server, publisher: Publisher, gated: bool) -> None:
    model = trained(3)
    source = publisher.publish(V1, stream(model))

    def overtake() -> None:
        for version in (V2, V3):
            publisher.publish(version, stream(trained(version.update)))
        assert sorted(p.name for p in publisher.directory.iterdir()) == ["v0.1", "v0.3"]

    async def job(bare: SglangEngine, client: Client) -> None:
        engine = Gate(bare, "drain") if gated else bare
        # Checksums of the tensors included.
        await engine.load(V1, Overtaken(source, V1, overtake))
        await samples_as(engine, model, V1)
        publisher.publish(Version(0, 4), stream(model))
        assert [p.name for p in publisher.directory.iterdir()] == ["v0.4"]
        with pytest.raises(VersionGone):
            await engine.load(V2, Folder(f"disk://{publisher.directory}/v0.2", V2))
        await samples_as(engine, model, V1)

    run(served, job)


def test_damaged_values_never_get_the_label(served: Server, publisher: Publisher) -> None:
    model = trained(5)

    async def job(engine: SglangEngine, client: Client) -> None:
        source = publisher.publish(V1, stream(model))
        await engine.load(V1, Folder(source, V1))
        bad = publisher.publish(V2, stream(trained(6)))
        file = sorted(Path(bad.removeprefix("disk://")).glob("*.safetensors"))[0]
        with file.open("r+b") as out:
            out.seek(-2, os.SEEK_END)
            out.write(b"\x7f")
        with pytest.raises(WeightSyncError, match="does not match, bytes are damaged"):
            await engine.load(V2, Folder(bad, V2))
        assert engine.version == V1 and engine.torn
        waiting = asyncio.create_task(engine.generate(PROMPT, 1, SAMPLING))
        good = publisher.publish(V3, stream(model))
        await engine.load(V3, Folder(good, V3))
        assert not engine.torn
        assert [s.version for s in (await waiting)[0].segments] == [V3]
        await samples_as(engine, model, V3)

    run(served, job)


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_running_responses_have_one_version_behind_a_gate(served: Server, publisher: Publisher, mode: Any) -> None:
    before, after = trained(7), trained(8)
    long = SamplingParams(1.0, 110, ())

    async def job(bare: SglangEngine, client: Client) -> None:
        engine = bare if mode == "keep" else Gate(bare, mode)
        await engine.load(V1, Folder(publisher.publish(V1, stream(before)), V1))
        source = publisher.publish(V2, stream(after))
        for update in range(2, 12):
            held, version = engine.version, Version(0, update)
            source = publisher.publish(version, stream(after))
            # Enough of them to run for seconds: a load takes a part of one.
            groups = [asyncio.create_task(engine.generate(PROMPT, 4, long)) for _ in range(16)]
            while not engine.stats()["running"]:
                await asyncio.sleep(0.005)
            await engine.load(version, Folder(source, version))
            done = [c for group in await asyncio.gather(*groups) for c in group]
            assert len(done) == 64 and all(len(c.token_ids) == 110 for c in done)
            kinds = {tuple(s.version for s in c.segments) for c in done}
            if mode == "keep":
                assert kinds <= {(held,), (held, version), (version,)}
            else:
                assert kinds <= {(held,), (version,)}
            # A fast server may have ended them before the load came.
            if kinds & {"keep": {(held, version)}, "abort": {(version,)}, "drain": {(held,)}}[mode]:
                break
        else:
            raise AssertionError("no load met a running response")
        await samples_as(engine, after, version)

    run(served, job)
