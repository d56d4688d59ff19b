"""The collective carrier into a real server: published, announced, joined, loaded, and sampled from."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.expects import needs
from asyncrl.engines.sglang.update import UNKNOWN, Updater
from asyncrl.errors import WeightSyncError
from asyncrl.types import Version
from asyncrl.weights.collective.publisher import Groups, Publisher
from asyncrl.weights.publisher import Engines, open_publisher
from asyncrl.weights.reader import Reader
from tests.helpers.sglang_server import QUICKSTART, Server

PROMPT = [2, 3, 4, 5, 6, 7]
TIMEOUT_S = 60.0


class Run:
    """A learner's publisher and a generator's reader, as a run makes them, for the quickstart's tied model."""

    def __init__(self, folder: Path, bucket_bytes: int) -> None:
        groups = Groups("auto", "cpu", bucket_bytes, TIMEOUT_S)
        made = open_publisher(
            "collective", folder / "weights", 2, bind="tcp://127.0.0.1:*", security="loopback", keys=None,
            with_delta=True, engines=Engines(QUICKSTART, True, "none", groups),
        )  # fmt: skip
        assert isinstance(made, Publisher)
        self.publisher, self.reader, self.update = made, Reader(), -1

    @contextlib.asynccontextmanager
    async def updater(self, server: Server) -> AsyncIterator[Updater]:
        """What a generator keeps of a server."""
        client = Client(server.url)
        try:
            yield Updater(client, "g0", 1, TIMEOUT_S, True, needs(QUICKSTART, "float32"))
        finally:
            await client.close()

    async def load(self, updater: Updater, weights: dict[str, Tensor]) -> Any:
        """Publish weights and bring them into the server; the broadcast that was told to it."""
        self.update += 1
        version = Version(0, self.update)
        source = self.reader.source(self.publisher.publish(version, iter(weights.items())), version)
        told, begin = [], source.broadcast

        def noted(engine: str, ranks: int) -> Any:
            told.append(begin(engine, ranks))
            return told[-1]

        source.broadcast = noted  # type: ignore[method-assign, assignment]
        await updater.update(str(version), source)
        return told[-1]


@pytest.fixture
def begin(tmp_path: Path, can_serve: None) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def run(bucket_bytes: int = 2**29) -> Run:
        made.append(Run(tmp_path, bucket_bytes))
        return made[-1]

    yield run
    for one in made:
        one.publisher.close()


@pytest.fixture(scope="module")
def weights(can_serve: None) -> dict[str, Tensor]:
    """The learner's own tensors: without an output matrix, the model is tied."""
    found = load_file(QUICKSTART / "model.safetensors")
    assert "lm_head.weight" not in found
    return found


def bumped(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Other weights, told apart easily."""
    generator = torch.Generator().manual_seed(seed)
    return {name: w + 0.3 * w.std() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def check_samples(server: Server, weights: dict[str, Tensor], label: str) -> None:
    """The server samples from these weights, and says so."""
    answer = server.generate(PROMPT, 8, extra_key=label)
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(QUICKSTART / "config.json", folder)
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT + answer["output_ids"]])
    with torch.no_grad():
        rows = own(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    found = torch.tensor([value for value, *_ in answer["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(found, rows.gather(1, ids[0, len(PROMPT) :, None])[:, 0], atol=1e-4, rtol=0)
    assert answer["meta_info"]["weight_version"] == label
    assert server.call(bodies.MODEL_INFO)[1]["weight_version"] == label


def play(job: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(job, 240))


def test_every_version_is_what_the_server_samples_from_over_one_group(begin, start_server, weights):
    run, server = begin(2**16), start_server()

    async def job() -> None:
        async with run.updater(server) as updater:
            first = await run.load(updater, weights)
            assert first.is_new and len(first.buckets) > 3
            check_samples(server, weights, "0.0")
            second = await run.load(updater, bumped(weights, 1))
            assert (second.group, second.is_new) == (first.group, False)
            check_samples(server, bumped(weights, 1), "0.1")

    play(job())
    assert run.publisher.counters["failed"] == run.publisher.counters["killed"] == 0


def test_a_server_that_was_killed_and_started_again_joins_again(begin, start_server, weights):
    run, server = begin(), start_server()

    async def before() -> Any:
        async with run.updater(server) as updater:
            told = await run.load(updater, weights)
            server.stop()
            with pytest.raises(WeightSyncError):
                await run.load(updater, bumped(weights, 1))
            first.append(told.group)

    async def after() -> None:
        async with run.updater(again) as updater:
            told = await run.load(updater, bumped(weights, 2))
            assert told.is_new and told.group not in first
            check_samples(again, bumped(weights, 2), "0.2")

    first: list[str] = []
    play(before())
    again = start_server()
    play(after())


def test_a_sender_killed_in_the_middle_frees_the_server_and_the_next_one_mends_it(begin, start_server, weights):
    run, server = begin(2**15), start_server()

    async def job() -> None:
        async with run.updater(server) as updater:
            first = await run.load(updater, weights)
            sender = psutil.Process(run.publisher.pids["g0"])
            sender.suspend()
            # The server waits in the first bucket by then: nothing else is slow.
            threading.Timer(5.0, os.kill, (sender.pid, signal.SIGKILL)).start()
            run.update += 1
            version = Version(0, run.update)
            source = run.reader.source(run.publisher.publish(version, iter(bumped(weights, 1).items())), version)
            # It cannot be asked what comes, but that is as before.
            source.broadcast = lambda engine, ranks: type(first)(**{**vars(first), "is_new": False})  # type: ignore[method-assign, assignment]
            with pytest.raises(WeightSyncError, match="bucket 1 of"):
                await updater.update(str(version), source)
            assert updater.torn and server.call(bodies.MODEL_INFO)[1]["weight_version"] == UNKNOWN
            again = await run.load(updater, bumped(weights, 2))
            assert again.is_new and again.group != first.group
            check_samples(server, bumped(weights, 2), "0.2")

    play(job())
    # Its end was seen by the publisher, or the generator left first.
    assert run.publisher.counters["failed"] + run.publisher.counters["killed"] == 1
