"""How a generator's engine is opened: the parts that fit together, and what becomes of it at the end."""

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config import validate
from asyncrl.engines.gate import Gate
from asyncrl.engines.sglang.flags import Facts
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.errors import ConfigError, EngineError
from asyncrl.generator import open_engine as opening
from asyncrl.generator.open_engine import hash_seed, open_engine
from asyncrl.models.describe import describe
from asyncrl.types import SamplingParams, Version
from tests.helpers.tiny_models import qwen3_dense, qwen3_moe

SAMPLING = SamplingParams(1.0, 4, ())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    qwen3_moe(layers=2, experts=8).save_pretrained(folder)
    return folder


def config(path, sglang=None, **sections):
    if sglang is not None:
        sections["generator"] = {"engine": "sglang", "sglang": sglang} | sections.get("generator", {})
        sections["weights"] = {"carrier": "collective"} | sections.get("weights", {})
    return validate({**sections, "model": {"path": str(path)} | sections.get("model", {})})


def opened(config, run_dir, use, name="g0"):
    async def run():
        info = describe(config.generator.model or config.model.path)
        async with open_engine(config, run_dir, name, info, SAMPLING) as engine:
            return await use(engine)

    return asyncio.run(run())


@pytest.mark.parametrize(("on_load", "kind"), [("keep", TorchEngine), ("abort", Gate), ("drain", Gate)])
def test_the_embedded_engine_is_probed_gated_and_closed(model, tmp_path, on_load, kind):
    seen = []

    async def use(engine):
        assert isinstance(engine, kind) and engine.version == Version(0, -1)
        assert engine.stats()["tokens"] > 32  # the probe's
        seen.append(engine)
        return await engine.generate(np.array([1, 2], np.int32), 2, SAMPLING)

    assert len(opened(config(model, weights={"on_load": on_load}), tmp_path, use)) == 2
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(seen[0].generate(np.array([1], np.int32), 1, SAMPLING))


def test_generators_sample_differently_and_one_repeats():
    assert hash_seed(0, "g0") == hash_seed(0, "g0") != hash_seed(0, "g1") != hash_seed(1, "g1")
    assert 0 <= hash_seed(7, "g0") < 2**31


# --- a server of our own ---------------------------------------------------------------------------


def launch(path, tmp_path, monkeypatch, name="g1", sglang=None, environ=None, **sections):
    monkeypatch.delenv(opening.LOCAL_INDEX, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for key, value in (environ or {}).items():
        monkeypatch.setenv(key, value)
    return opening._launch(config(path, sglang or {}, **sections), tmp_path, name, describe(path), {})


def test_what_a_server_is_started_with(model, tmp_path, monkeypatch):
    found = launch(
        model, tmp_path, monkeypatch,
        sglang={"command": ["serve", "it"], "port": 30000, "gpus": 2, "first_gpu": 4, "args": {"tp-size": 2}},
    )  # fmt: skip
    assert found.command == [
        "serve", "it", "--model-path", str(model), "--random-seed", str(hash_seed(0, "g1")), "--dtype", "float32",
        "--enable-return-routed-experts", "--disable-overlap-schedule", "--tp-size", "2",
    ]  # fmt: skip
    assert (found.port, found.env["CUDA_VISIBLE_DEVICES"], found.name) == (30001, "6,7", "g1")
    assert found.log == tmp_path / "logs" / "sglang-g1.log"
    assert found.env["GLOO_SOCKET_IFNAME"] == "lo" and found.env["PATH"] == os.environ["PATH"]
    # With what the others need it fits into run.shutdown_s, which is 6 s.
    assert found.grace_s == 1.0


def test_only_under_keep_steps_do_not_overlap_and_a_user_decides(model, tmp_path, monkeypatch):
    flag = "--disable-overlap-schedule"
    for mode, on in (("keep", True), ("abort", False), ("drain", False)):
        found = launch(model, tmp_path, monkeypatch, weights={"on_load": mode})
        assert (flag in found.command) is on
    for key in ("disable-overlap-schedule", "disable_overlap_schedule"):
        assert flag not in launch(model, tmp_path, monkeypatch, sglang={"args": {key: False}}).command


def test_the_place_on_the_host_comes_from_the_launcher_before_the_id(model, tmp_path, monkeypatch, caplog):
    sglang = {"port": 30000, "gpus": 1}
    found = launch(model, tmp_path, monkeypatch, "g9", sglang, {opening.LOCAL_INDEX: "0"})
    assert (found.port, found.env["CUDA_VISIBLE_DEVICES"]) == (30000, "0")
    assert not caplog.records
    assert launch(model, tmp_path, monkeypatch, "host-31337", sglang).port == 30000
    assert "generator id 'host-31337' has no number" in caplog.text


def test_a_dense_model_has_no_routes_and_other_hosts_no_loopback(tmp_path, monkeypatch):
    qwen3_dense().save_pretrained(tmp_path)
    found = launch(
        tmp_path, tmp_path, monkeypatch, weights={"bind": "tcp://*:*", "security": "none"},
        model={"dtype": "bfloat16"}, run={"shutdown_s": 20},
        algorithm={"rdc": {"mode": "off"}},
    )  # fmt: skip
    assert "--enable-return-routed-experts" not in found.command and "GLOO_SOCKET_IFNAME" not in found.env
    assert found.command[found.command.index("--dtype") + 1] == "bfloat16" and found.grace_s == 15.0


def folder_with(tmp_path, **fields):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "vocab_size": 8} | fields))
    return tmp_path


def test_a_quantised_folder_keeps_its_dtype(tmp_path, monkeypatch):
    folder_with(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    weights = {"quantize": "fp8_block"}
    found = launch(
        tmp_path, tmp_path, monkeypatch, weights=weights, model={"dtype": "bfloat16"},
        generator={"model": str(tmp_path)},
    )  # fmt: skip
    assert "--dtype" not in found.command


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 0),
        ({"n_shared_experts": 2}, 2),
        ({"n_shared_experts": None}, 0),
        ({"shared_expert_intermediate_size": 64}, 1),
    ],
)
def test_shared_experts_are_not_fused(tmp_path, monkeypatch, fields, number):
    folder_with(tmp_path, **fields)
    assert opening._shared_experts(tmp_path) == number
    found = launch(tmp_path, tmp_path, monkeypatch)
    assert ("--disable-shared-experts-fusion" in found.command) == (number > 0)


@pytest.mark.parametrize(
    ("says", "fields", "is_"),
    [
        ("bfloat16", {"dtype": "float32"}, "bfloat16"),
        ("auto", {"torch_dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"dtype": "float32"}, "float16"),
        ("auto", {}, "bfloat16"),
    ],
)
def test_the_dtype_that_a_server_holds(tmp_path, says, fields, is_):
    folder_with(tmp_path, **fields)
    facts = Facts("0.5.23", "default", "", "cpu", says, 1, 3, 100, 90, 0, 0, False, True)
    assert opening._served_as(facts, tmp_path) == is_


FAKE = Path(__file__).parents[1] / "engines" / "sglang" / "fake_server.py"


def test_keys_that_cannot_be_used_are_refused_before_anything_starts(model, tmp_path):
    sglang = {"command": ["/nowhere"], "key_file": str(tmp_path / "key")}
    with pytest.raises(ConfigError, match=r"generator\.sglang\.key_file='.*key' cannot be read"):
        opened(config(model, sglang), tmp_path, None)


def test_a_generator_without_a_url_is_refused(model, tmp_path):
    sglang = {"urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}
    with pytest.raises(ConfigError, match=r"'g2' has no server: .*add the url"):
        opened(config(model, sglang), tmp_path, None, "g2")


def test_a_start_that_fails_says_why_and_leaves_nothing(model, tmp_path):
    sglang = {"command": ["python", str(FAKE), "raises"], "env": {"FAKE_OUT": str(tmp_path / "seen")}}
    with pytest.raises(EngineError, match=r"the server of g0 ended with status 1: .*ValueError: no such flag"):
        opened(config(model, sglang), tmp_path, None)
