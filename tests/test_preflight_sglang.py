"""Checks of what SGLang servers need, before any of them is started."""

import json
import shutil
import sys

import pytest

from asyncrl import preflight_sglang
from asyncrl.config import validate
from asyncrl.engines.sglang.key_files import read_key
from asyncrl.errors import ConfigError
from asyncrl.models.describe import max_length
from asyncrl.preflight import preflight
from tests.helpers.tiny_models import qwen3_moe


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    qwen3_moe(layers=2, experts=8).save_pretrained(folder / "moe")
    qwen3_moe(layers=1, max_position_embeddings=64).save_pretrained(folder / "short")
    qwen3_moe(layers=1, max_position_embeddings=8192).save_pretrained(folder / "long")
    for name, block in (("fp8", [128, 128]), ("other", None)):
        shutil.copytree(folder / "moe", folder / name)
        file = folder / name / "config.json"
        kind = {"quant_method": "fp8", **({"weight_block_size": block} if block else {})}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": kind}))
    return folder


def config(path, sglang=None, generator=None, **sections):
    sections["weights"] = {"carrier": "collective"} | sections.get("weights", {})
    sections["model"] = {"path": str(path)} | sections.get("model", {})
    sglang = {"command": ["/bin/true"]} | (sglang or {})
    return validate({**sections, "generator": {"engine": "sglang", "sglang": sglang} | (generator or {})})


def key_file(tmp_path, text="sesame\n", mode=0o600):
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_sound_config_passes_everywhere(models, tmp_path):
    found = config(models / "moe", {"key_file": str(key_file(tmp_path))})
    for generates in (False, True):
        assert preflight(found, generates=generates).num_experts == 8


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["python", "-m", "no_such_package.launch"], r"Python has no no_such_package; .*install asyncrl\[sglang\]"),
        ([sys.executable, "-m", "no_such_package"], r"this Python has no no_such_package; .*docs/sglang\.md"),
        (["no-such-program"], r"'no-such-program' is not on the PATH; .*generator\.sglang\.command"),
        (["/nowhere/serve"], r"'/nowhere/serve' is not there, or not executable"),
        (["{tmp}/serve"], r"is not there, or not executable"),
    ],
)  # fmt: skip
def test_a_command_that_cannot_run_is_refused_where_generators_start(models, tmp_path, command, says):
    (tmp_path / "serve").write_text("#!/bin/sh\n")
    found = config(models / "moe", {"command": [word.format(tmp=tmp_path) for word in command]})
    with pytest.raises(ConfigError, match=rf"^generator\.sglang\.command=\[.*{says}") as caught:
        preflight(found, generates=True)
    assert len(str(caught.value).splitlines()) == 1
    assert preflight(found)  # other hosts need not have it


def test_a_command_that_is_there_passes(models, tmp_path, monkeypatch):
    (tmp_path / "serve").write_text("#!/bin/sh\n")
    (tmp_path / "serve").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for command in (["./serve"], ["python", "-m", "asyncrl"], ["sh", "serve"], [str(tmp_path / "serve")]):
        assert preflight(config(models / "moe", {"command": command}), generates=True)
    urls = {"urls": ["http://127.0.0.1:1"], "command": ["python", "-m", "sglang.launch_server"]}
    assert preflight(config(models / "moe", urls), generates=True)  # starts none


def test_keys_are_read_alone_from_a_file_of_their_owner(tmp_path):
    assert read_key(key_file(tmp_path), "k") == "sesame"
    for text, mode, says in (
        ("", 0o600, "is empty"),
        (" \n", 0o600, "is empty"),
        ("two words", 0o600, "must be one word"),
        ("a\nb\n", 0o600, "must be one word"),
        ("schl\u00fcssel", 0o600, "must be one word"),
        ("x" * 5000, 0o600, "must be one word"),
        ("sesame", 0o640, "can be read by other users; chmod 600"),
    ):
        with pytest.raises(ConfigError, match=rf"^k='.*key' .*{says}") as caught:
            read_key(key_file(tmp_path, text, mode), "k")
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("key", ["key_file", "admin_key_file"])
def test_key_files_are_checked_where_generators_start(models, tmp_path, key):
    found = config(models / "moe", {key: str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=rf"generator\.sglang\.{key}='.*none' cannot be read: No such file"):
        preflight(found, generates=True)
    assert preflight(found)


# --- models --------------------------------------------------------------------------------------


def test_servers_start_from_a_checkpoint_of_the_kind_that_is_sent(models):
    fp8, bfloat16 = {"quantize": "fp8_block"}, {"dtype": "bfloat16"}
    good = config(models / "moe", generator={"model": str(models / "fp8")}, weights=fp8, model=bfloat16)
    assert preflight(good, generates=True).num_experts == 8
    with pytest.raises(ConfigError, match=r"generator\.model='.*fp8' is quantised \(fp8 in blocks of \[128, 128\]\)"):
        preflight(config(models / "moe", generator={"model": str(models / "fp8")}, model=bfloat16))
    for name, kind in (("other", "fp8"), ("moe", "not quantised")):
        wrong = config(models / "moe", generator={"model": str(models / name)}, weights=fp8, model=bfloat16)
        with pytest.raises(ConfigError, match=rf"generator\.model='.*{name}' is {kind}, .*weights\.quantize=none"):
            preflight(wrong)


def test_a_learner_does_not_train_what_is_quantised(models):
    with pytest.raises(ConfigError, match=r"model\.path='.*fp8': .*its weights are quantised \(fp8\)"):
        preflight(config(models / "fp8"))


def test_a_server_needs_weights_to_start_from(models, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copy(models / "moe" / "config.json", tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"generator\.model='.*empty' holds no model\.safetensors .*servers start"):
        preflight(config(models / "moe", generator={"model": str(tmp_path / "empty")}))


# --- length --------------------------------------------------------------------------------------


def test_a_server_holds_as_much_as_model_and_flags_allow(models):
    assert max_length(models / "long", at_most=None) == 8192
    assert preflight_sglang.longest(config(models / "long")) == 8190
    flags = {"args": {"context-length": 100, "max_total_tokens": 90}}
    assert preflight_sglang.longest(config(models / "long", flags)) == 88
    assert preflight(config(models / "long", sampling={"max_new_tokens": 8000}))
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens=60 .* the 62 tokens that .* and its server"):
        preflight(config(models / "short", sampling={"max_new_tokens": 60}))


# --- network and folders ---------------------------------------------------------------------------


def test_the_learner_of_a_group_binds_as_one_of_zmq(models, caplog):
    wrong = config(models / "moe", weights={"bind": "tcp://*:5556"})
    with pytest.raises(ConfigError, match=r"weights\.bind='tcp://\*:5556'.*weights\.security=none"):
        preflight(wrong)
    assert preflight(config(models / "moe", weights={"bind": "tcp://*:*", "security": "none"}))
    assert "anyone on the network who reaches weights.bind" in caplog.text


def test_folders_of_weights_need_no_network(models, tmp_path, caplog):
    replay = {"bind": "tcp://*:*", "security": "none"}
    disk = {"carrier": "disk", "dir": str(tmp_path / "versions")}
    assert preflight(config(models / "moe", replay=replay, weights=disk))
    assert "weights.carrier=shm" not in caplog.text and "weights.bind" not in caplog.text
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"weights\.dir='.*file/x': '.*file' is not a folder; set weights\.dir"):
        preflight(config(models / "moe", weights={"carrier": "disk", "dir": f"{tmp_path}/file/x"}))


@pytest.mark.parametrize(
    ("args", "wrong"), [({"tp-size": 4}, True), ({"tp_size": 2}, False), ({"tp-size": 4, "ep-size": 4}, False)]
)
def test_experts_in_blocks_must_divide_over_the_gpus(tmp_path, args, wrong):
    qwen3_moe(layers=2, experts=8).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantised | {"moe_intermediate_size": 768}))
    made = config(
        tmp_path,
        {"args": args},
        {"model": str(tmp_path)},
        weights={"quantize": "fp8_block"},
        model={"dtype": "bfloat16"},
    )
    found = preflight_sglang.faults(made, weights=True, starts=False)
    assert bool(found) is wrong, found
    assert not found or "tp-size=4: experts of 768 rows" in found[0]


@pytest.mark.parametrize("fields", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_dense_layers_that_sglang_would_make_mixtures_are_refused(tmp_path, fields):
    qwen3_moe(layers=2, experts=8).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    found = preflight_sglang.faults(config(tmp_path), weights=True, starts=False)
    assert len(found) == 1 and "qwen3_moe with dense layers" in found[0] and "generator.engine=torch" in found[0]
