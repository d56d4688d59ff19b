"""Which carrier is picked, and what the engines get through it."""

import json
from pathlib import Path

import pytest
import torch

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.types import Version
from asyncrl.weights import disk, folders, shm, zmq
from asyncrl.weights.collective import client
from asyncrl.weights.collective import publisher as collective
from asyncrl.weights.publisher import Engines, open_publisher
from asyncrl.weights.reader import Fetch, Reader

V1 = Version(0, 1)
EMBEDDING = "model.embed_tokens.weight"
WEIGHTS = {EMBEDDING: torch.arange(6.0).view(3, 2)}


@pytest.fixture
def start(tmp_path: Path) -> Path:
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    return folder


def begin(carrier, folder, engines=None):
    return open_publisher(
        carrier, folder, 2, bind="tcp://127.0.0.1:*", security="loopback", keys=None, with_delta=True, engines=engines
    )


@pytest.mark.parametrize(
    ("carrier", "kind", "source"),
    [
        ("shm", shm.Publisher, Fetch),
        ("zmq", zmq.Publisher, Fetch),
        ("collective", collective.Publisher, client.Source),
        ("disk", disk.Publisher, folders.Folder),
    ],
)
def test_every_carrier_has_a_publisher_and_a_source(tmp_path, start, carrier, kind, source):
    made = begin(carrier, tmp_path / "weights", Engines(start, carrier in ("collective", "disk")))
    try:
        assert type(made) is kind
        fetch = Reader().source(made.publish(V1, iter(WEIGHTS.items())), V1)
        assert type(fetch) is source
        if source is not client.Source:
            assert torch.equal(fetch.tensors()[EMBEDDING], WEIGHTS[EMBEDDING])
    finally:
        made.close()


def test_servers_get_the_output_matrix_of_a_tied_model_and_the_embedded_engine_does_not(tmp_path, start):
    for sglang, names in ((True, {EMBEDDING, "lm_head.weight"}), (False, {EMBEDDING})):
        made = begin("disk", tmp_path / f"disk {sglang}", Engines(start, sglang))
        try:
            got = Reader().source(made.publish(V1, iter(WEIGHTS.items())), V1).tensors()
        finally:
            made.close()
        assert set(got) == names
    made = begin("collective", tmp_path / "weights", Engines(start, True))
    try:
        made.publish(V1, iter(WEIGHTS.items()))
        (path,) = made._files.values()
        assert set(shm.read(path, V1)) == {EMBEDDING, "lm_head.weight"}
    finally:
        made.close()


@pytest.mark.parametrize("carrier", ["collective", "disk"])
def test_what_servers_cannot_use_is_refused_before_the_first_version(tmp_path, start, carrier):
    with pytest.raises(ConfigError, match=r"weights\.quantize=fp8_block needs"):
        begin(carrier, tmp_path / "weights", Engines(start, True, "fp8_block"))
    with pytest.raises(ConfigError, match=r"config\.json of the engines' model folder cannot be read"):
        begin(carrier, tmp_path / "weights", Engines(tmp_path / "nothing", True))


def test_a_source_of_no_carrier_is_an_error(tmp_path):
    with pytest.raises(WeightSyncError, match="cannot be read"):
        Reader().source("what://is.this", V1).tensors()
