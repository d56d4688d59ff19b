"""Writes a model folder tensor by tensor, as save_pretrained lays it out. Holds no weights. Knows no model class.

Names, dtypes and shapes are known before the first value is, so every file gets its header and its full size at
once; a tensor is then written at its place, in whatever order they come.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.errors import WeightSyncError
from asyncrl.models.finite import is_finite
from asyncrl.models.folder import DTYPES, INDEX, INTEGERS, SINGLE
from asyncrl.models.names import layout

SHARD_BYTES = 50_000_000_000
"""Largest file of save_pretrained, unless one tensor is larger."""

WORDS = {getattr(torch, name): word for word, name in (DTYPES | INTEGERS).items()} | {torch.float8_e4m3fn: "F8_E4M3"}
"""Names of dtypes in a safetensors header."""

WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt", ".pth")
"""Ends of the names of files that hold weights, or say where they lie."""


NOTES = ("best.json",)
"""Files that say of the weights beside them how they were chosen: not true of others."""


class Plan(NamedTuple):
    """One tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return prod(self.shape) * self.dtype.itemsize


def planned(model: nn.Module) -> list[Plan]:
    """What `stream` gives of a live model, in its order and with its dtypes."""
    live = model.state_dict()
    return [Plan(p.hf_name, live[name].dtype, p.size) for name, pieces in layout(model).items() for p in pieces]


def header_bytes(entries: Mapping[str, object]) -> bytes:
    """The beginning of a safetensors file: length and JSON, padded so that the values after it are aligned."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class FolderWriter:
    """Collects the tensors of a plan in `directory`.part, which becomes `directory` when all of them are there.

    Raises OSError where the disk fails, WeightSyncError for a tensor that is not of the plan, or not finite.
    """

    def __init__(self, directory: Path, plan: Iterable[Plan], shard_bytes: int = SHARD_BYTES) -> None:
        self._final, self._aside = directory, directory.with_name(directory.name + ".part")
        self._plan = {tensor.name: tensor for tensor in plan}
        self._places: dict[str, tuple[Path, int]] = {}
        self._left = set(self._plan)
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        shards = split(self._plan.values(), shard_bytes)
        names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            self._begin(self._aside / name, shard)
        if len(shards) > 1:
            self._write_index()

    def _begin(self, file: Path, shard: list[Plan]) -> None:
        """Header and size of one file. Wide values lie first, so that all are aligned."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end, starts = 0, {}
        for tensor in sorted(shard, key=lambda t: -t.dtype.itemsize):
            starts[tensor.name] = end
            end += tensor.nbytes
            entries[tensor.name] = {
                "dtype": WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end - tensor.nbytes, end],
            }  # fmt: skip
        head = header_bytes(entries)
        with file.open("wb") as out:
            out.write(head)
            out.truncate(len(head) + end)
        self._places |= {name: (file, len(head) + start) for name, start in starts.items()}

    def _write_index(self) -> None:
        plan = self._plan.values()
        index = {
            "metadata": {
                "total_parameters": sum(prod(t.shape) for t in plan), "total_size": sum(t.nbytes for t in plan),
            },
            "weight_map": {name: file.name for name, (file, _) in self._places.items()},
        }  # fmt: skip
        (self._aside / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor: contiguous, on the CPU, of the dtype and shape of its plan. Finite, or WeightSyncError."""
        plan = self._plan.get(name)
        if plan is None or name not in self._left or (tensor.dtype, tuple(tensor.shape)) != plan[1:]:
            raise WeightSyncError(f"{name} {tensor.dtype} {tuple(tensor.shape)} is not what was planned: {plan}")
        if not is_finite(tensor):
            raise WeightSyncError(f"{self._final} is not written: {name} is not finite")
        self._left.remove(name)
        file, start = self._places[name]
        if tensor.numel():
            with file.open("r+b") as out:
                out.seek(start)
                out.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)

    def copy_rest(self, start: Path, dtype: str | None = None) -> None:
        """Copy config, tokenizer and all else that is no weight from the folder `start`.

        dtype: what config.json then says the weights are stored in; None leaves it.
        """
        for file in sorted(start.iterdir()):
            if file.is_file() and not file.name.endswith((*WEIGHT_FILES, *NOTES)):
                shutil.copy2(file, self._aside / file.name)
        if dtype is not None:
            file = self._aside / "config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
            config.pop("torch_dtype", None)
            file.write_text(json.dumps(config | {"dtype": dtype}, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def finish(self) -> None:
        """Give the folder its name, in place of an older one. WeightSyncError when a tensor has not come."""
        if self._left:
            raise WeightSyncError(f"{self._final} is not written: {len(self._left)} weights never came")
        shutil.rmtree(self._final, ignore_errors=True)
        self._aside.rename(self._final)

    def give_up(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._aside, ignore_errors=True)


def split(plan: Iterable[Plan], shard_bytes: int) -> list[list[Plan]]:
    """Tensors in files of at most shard_bytes, in order, divided as save_pretrained does; a larger one lies alone."""
    shards: list[list[Plan]] = []
    current: list[Plan] = []
    size = 0
    for tensor in plan:
        if tensor.nbytes > shard_bytes:
            shards.append([tensor])
            continue
        if size + tensor.nbytes > shard_bytes:
            shards.append(current)
            current, size = [], 0
        current.append(tensor)
        size += tensor.nbytes
    return [*shards, current] if current or not shards else shards


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"
