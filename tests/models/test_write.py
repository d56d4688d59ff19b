"""FolderWriter: files as save_pretrained lays them out, written tensor by tensor in any order."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.models.folder import INDEX, SINGLE
from asyncrl.models.names import stream
from asyncrl.models.write import FolderWriter, Plan
from tests.helpers.tiny_models import FAMILIES, qwen3_dense


def plan_of(tensors):
    return [Plan(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def write(tensors, folder: Path, **rest) -> Path:
    writer = FolderWriter(folder, plan_of(tensors), **rest)
    for name, tensor in reversed(tensors.items()):
        writer.add(name, tensor)
    writer.finish()
    return folder


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "tied"])
@pytest.mark.parametrize("size", [None, 30_000])
def test_files_are_those_of_save_pretrained(kind: str, size: int | None, tmp_path: Path) -> None:
    model = qwen3_dense(tie_word_embeddings=True) if kind == "tied" else FAMILIES[kind]()
    model.save_pretrained(tmp_path / "theirs", **({} if size is None else {"max_shard_size": size}))
    ours = write(dict(stream(model)), tmp_path / "ours", **({} if size is None else {"shard_bytes": size}))
    a, b = everything(ours), everything(tmp_path / "theirs")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    files = sorted(file.name for file in ours.iterdir())
    if size is None:
        assert files == [SINGLE]
        return
    index = json.loads((ours / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in a.values())
    assert index["weight_map"] == {n: f for f in files if f != INDEX for n in load_file(ours / f)}
    if kind in ("gpt_oss", "tied"):
        # Where experts are split on disk, save_pretrained keeps the views of one storage in one file, however large.
        assert index["weight_map"] == json.loads((tmp_path / "theirs" / INDEX).read_text())["weight_map"]
    assert all((ours / f).stat().st_size < size + 9_000 or len(load_file(ours / f)) == 1 for f in files if f != INDEX)


def everything(folder: Path) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as data:
            assert data.metadata() == {"format": "pt"}
        out |= load_file(file)
    return out


def test_mixed_dtypes_are_aligned_and_kept(tmp_path: Path) -> None:
    tensors = {
        "a": torch.tensor([1, 2, 3], dtype=torch.bfloat16),
        "b": torch.tensor([4.5], dtype=torch.float64),
        "c": torch.tensor(True),
        "d": torch.empty(0, 3),
        "e": torch.tensor([[1.5, 2.5]]),
    }
    read = load_file(write(tensors, tmp_path / "out") / SINGLE)
    assert all(torch.equal(read[n], t) and read[n].dtype == t.dtype for n, t in tensors.items())


def test_what_is_not_planned_is_refused(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "out", [Plan("a", torch.float32, (2,)), Plan("b", torch.float32, (1,))])
    with pytest.raises(WeightSyncError, match=r"x torch.float32 \(2,\) is not what was planned: None"):
        writer.add("x", torch.zeros(2))
    with pytest.raises(WeightSyncError, match="not what was planned"):
        writer.add("a", torch.zeros(2, dtype=torch.bfloat16))
    writer.add("a", torch.zeros(2))
    with pytest.raises(WeightSyncError, match="not what was planned"):
        writer.add("a", torch.zeros(2))
    with pytest.raises(WeightSyncError, match="b is not finite"):
        writer.add("b", torch.tensor([torch.nan]))
    with pytest.raises(WeightSyncError, match="1 weights never came"):
        writer.finish()
    assert not (tmp_path / "out").exists()
    writer.give_up()
    assert list(tmp_path.iterdir()) == []


def test_an_older_folder_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    folder = write({"a": torch.zeros(1)}, tmp_path / "out")
    writer = FolderWriter(folder, [Plan("b", torch.float32, (1,))])
    assert list(load_file(folder / SINGLE)) == ["a"]
    writer.add("b", torch.ones(1))
    writer.finish()
    assert list(load_file(folder / SINGLE)) == ["b"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_the_rest_of_the_start_folder_comes_along(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    kept = {
        "config.json": '{"torch_dtype": "bfloat16", "a": 1}',
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ x }}",
    }
    left = ("model-00001-of-00002.safetensors", INDEX, "pytorch_model.bin", "model.gguf")
    for name in (*kept, *left):
        (start / name).write_text(kept.get(name, "weights"))
    writer = FolderWriter(tmp_path / "out", [Plan("a", torch.float32, (1,))])
    writer.add("a", torch.zeros(1))
    writer.copy_rest(start, "float32")
    writer.finish()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {SINGLE, *kept}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"a": 1, "dtype": "float32"}
