"""A model folder as files: what can be loaded is listed, what cannot is refused with file and remedy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.models.folder import INDEX, SINGLE, weights_of
from asyncrl.preflight import preflight
from tests.helpers.tiny_models import qwen3_moe


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    qwen3_moe(hidden=16, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def many_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    qwen3_moe(hidden=16).save_pretrained(folder, max_shard_size=20_000)
    return folder


@pytest.fixture
def copy(tmp_path):
    """Copies a folder, so that it may be damaged."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        weights_of(folder)
    settings = {"model": {"path": str(folder)}}
    with pytest.raises(ConfigError, match=rf"(?s)model\.path='{folder}'.*{words}"):
        preflight(validate(settings))
    assert preflight(validate(settings), weights=False).is_moe


def test_every_tensor_is_listed_with_dtype_and_shape(one_file: Path) -> None:
    tensors = load_file(one_file / SINGLE)
    listed = weights_of(one_file)
    assert {n: (s.file, s.dtype, s.shape) for n, s in listed.items()} == {
        n: (SINGLE, "bfloat16", tuple(t.shape)) for n, t in tensors.items()
    }


def test_an_index_leads_to_every_file(many_files: Path) -> None:
    index = json.loads((many_files / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 3
    assert {n: s.file for n, s in weights_of(many_files).items()} == index


def test_pickled_weights_are_refused_and_never_opened(copy, one_file: Path) -> None:
    folder = copy(one_file)
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle either")
    refused(folder, r"pickled, and asyncrl never unpickles .*pytorch_model\.bin.*save_pretrained into a new folder")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-Q4.gguf", "in GGUF, which cannot be trained .*save_pretrained"),
        ("tf_model.h5", "of another framework"),
        ("weights.safetensors", f"holds no {SINGLE} and no {INDEX}; one of another name must be renamed"),
        ("adapter_config.json", "is an adapter; merge it"),
        ("notes.txt", f"holds no {SINGLE} and no {INDEX}; save the model"),
    ],
)
def test_other_kinds_of_weights_are_refused(copy, one_file: Path, name: str, words: str) -> None:
    folder = copy(one_file)
    (folder / SINGLE).unlink()
    (folder / name).write_bytes(b"x")
    refused(folder, words)


def test_quantised_weights_are_refused(copy, one_file: Path) -> None:
    folder = copy(one_file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    refused(folder, r"quantised \(fp8\); save the model in bfloat16 or float32")


def test_a_dtype_that_is_no_weight_s_is_refused(copy, one_file: Path) -> None:
    folder = copy(one_file)
    tensors = load_file(folder / SINGLE)
    name = "model.norm.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / SINGLE)
    refused(folder, rf"{name} is stored as F8_E4M3, which is quantised")


def test_a_file_of_the_index_that_is_missing_is_named(copy, many_files: Path) -> None:
    folder = copy(many_files)
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    refused(folder, rf"{file.name} of {INDEX} is missing; copy the whole folder")


def test_a_tensor_of_the_index_that_no_file_holds_is_named(copy, many_files: Path) -> None:
    folder = copy(many_files)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra"] = next(iter(index["weight_map"].values()))
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, r"names model\.extra, which the files do not hold")


def test_a_file_outside_of_the_folder_is_refused(copy, many_files: Path) -> None:
    folder = copy(many_files)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra"] = "../other.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "outside of the folder")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda data: data[:-10], "is cut off: it lacks 10 bytes"),
        (lambda data: data[:100], "is no safetensors file, or cut off"),
        (lambda data: b"", "is no safetensors file, or cut off"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        (lambda data: (5).to_bytes(8, "little") + b"[1,2]", "is no safetensors file"),
    ],
)
def test_a_damaged_file_is_named(copy, one_file: Path, content, words: str) -> None:
    folder = copy(one_file)
    (folder / SINGLE).write_bytes(content((folder / SINGLE).read_bytes()))
    refused(folder, rf"{SINGLE} {words}" if "pointer" not in words else words)


def test_generator_model_is_checked_too(copy, one_file: Path) -> None:
    folder = copy(one_file)
    (folder / SINGLE).unlink()
    settings = {"model": {"path": str(one_file)}, "generator": {"model": str(folder)}}
    with pytest.raises(ConfigError, match=r"generator\.model=.*holds no"):
        preflight(validate(settings))


def test_the_check_imports_no_torch() -> None:
    code = "import sys, asyncrl.preflight; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
