"""A re-sync of a real server: the version that it holds by its label is loaded again, and its weights are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang_engine import SglangEngine
from asyncrl.models.names import stream
from asyncrl.types import Version
from asyncrl.weights.disk import Publisher
from asyncrl.weights.folders import Folder
from asyncrl.weights.rollout import for_sglang
from tests.helpers.sglang_server import QUICKSTART, Server
from tests.sglang.test_disk import run, samples_as, served, trained

__all__ = ["served"]

V1, V2 = Version(0, 1), Version(0, 2)

pytestmark = pytest.mark.long


def test_weights_that_are_not_what_they_are_called_are_cured_by_loading_the_version_again(
    served: Server, tmp_path: Path
) -> None:
    config = json.loads((QUICKSTART / "config.json").read_text())
    publisher = Publisher(tmp_path / "weights", QUICKSTART, keep=2, transform=lambda w: for_sglang(w, config))
    old, new = trained(1), trained(2)
    publisher.publish(V1, stream(old))
    source = publisher.publish(V2, stream(new))

    async def job(engine: SglangEngine, client: Client) -> None:
        await engine.load(V2, Folder(source, V2))
        await samples_as(engine, new, V2)
        label = (await client.get(bodies.MODEL_INFO))["weight_version"]
        # Older weights come to stand behind the label: a sync that was missed.
        folder = str(publisher.directory / "v0.1")
        await client.post(bodies.UPDATE_DISK, bodies.update_disk(folder, label), 60.0, admin=True)
        with pytest.raises(AssertionError):
            await samples_as(engine, new, V2)
        await engine.load(V2, Folder(source, V2))
        # Also what is cached under the label of before is not used.
        await samples_as(engine, new, V2)
        assert (await client.get(bodies.MODEL_INFO))["weight_version"] not in ("", label)

    try:
        run(served, job)
    finally:
        publisher.close()
