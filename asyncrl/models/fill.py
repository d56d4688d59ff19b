"""Weights from a model folder into a sharded model, tensor by tensor. Knows no process group.

The model is made by `skeleton`, without memory for its weights; whoever shards it does so between the two. Each rank
then reads what it holds itself: no rank ever has more than its shard and one tensor, and nothing is sent.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.models.folder import Stored, weights_of
from asyncrl.models.load import load_model
from asyncrl.models.names import Piece, layout

log = logging.getLogger(__name__)

_OPEN_FILES = 2
"""Files of a folder that are mapped at a time: what was read of the others is given back."""


def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Give every meta tensor of module memory of its own on device; its values are undefined until `fill_sharded`.

    Unlike `to_empty`, this leaves what is real as it is (rope frequencies are in no checkpoint, and to_empty makes them
    garbage), and tied weights tied. For FSDP2, module is the root.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((child, name))
    made: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return made.setdefault(id(tensor), torch.empty_like(tensor, device=device))

    module._apply(real)
    for (owner, name), *others in places.values():
        for other, its_name in others:
            other.register_parameter(its_name, getattr(owner, name))


def fill_sharded(model: PreTrainedModel, path: str | Path) -> None:
    """Copy the weights of the folder at path into model, cast to its dtypes; each rank fills its own shard.

    model: of `skeleton` for the same folder, sharded or not, materialized. DTensors and plain tensors may be mixed; no
    collective. Raises ConfigError naming what is missing or of another shape; a folder whose names transformers
    understands but would not write itself is loaded whole instead, with a warning.
    """
    stored = weights_of(path)
    pieces = layout(model)
    if any(piece.hf_name not in stored for parts in pieces.values() for piece in parts):
        _fill_whole(model, path)
        return
    wrong = [
        f"{piece.hf_name} {stored[piece.hf_name].shape} for {piece.size}"
        for parts in pieces.values()
        for piece in parts
        if stored[piece.hf_name].shape != piece.size
    ]
    if wrong:
        raise ConfigError(
            f"model.path {str(path)!r}: its weights have another shape than config.json says: {wrong[:5]}"
        )
    live, reader = model.state_dict(), _Reader(Path(path), stored)
    with torch.no_grad():
        for name, parts in pieces.items():
            _fill(_Share.of(live[name]), parts, reader)


class _Share(NamedTuple):
    """What this rank holds of one live tensor: its own memory, and which box of the whole tensor [shape] that is."""

    local: Tensor
    shape: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Share:
        """tensor: of the live model, a DTensor or a plain one."""
        shape = tuple(tensor.shape)
        # The protocol by which torch.distributed.checkpoint asks a DTensor where its shard lies.
        ask: Any = getattr(tensor, "__create_chunk_list__", None)
        if ask is None:
            return cls(tensor.detach(), shape, (0,) * len(shape))
        (chunk,) = ask()
        return cls(cast(Any, tensor.detach()).to_local(), shape, tuple(chunk.offsets))

    @property
    def first(self) -> int | None:
        """Flat index of its first element in the whole tensor, None when it is no contiguous part of that."""
        if tuple(self.local.shape[1:]) != self.shape[1:] or not self.local.is_contiguous():
            return None
        rest = torch.Size(self.shape[1:]).numel()
        return self.starts[0] * rest if self.shape else 0


def _fill(share: _Share, parts: list[Piece], reader: _Reader) -> None:
    """Write the parts into a share; reads only those that lie in it where that can be told."""
    if not share.local.numel():
        return
    first = share.first
    if first is None or any(_straddles(piece, first, share.local.numel()) for piece in parts):
        whole = torch.empty(share.shape, dtype=share.local.dtype)
        for piece in parts:
            piece.write(whole, reader.get(piece.hf_name))
        box = tuple(slice(a, a + n) for a, n in zip(share.starts, share.local.shape, strict=True))
        share.local.copy_(whole[box])
        return
    flat = share.local.view(-1)
    for piece in parts:
        low, high = piece.span
        a, b = max(low, first), min(high, first + len(flat))
        if a >= b:
            continue
        value = reader.get(piece.hf_name)
        if (a, b) == (low, high):
            piece.write(flat, value, first)
        else:
            flat[a - first : b - first].copy_(value.reshape(-1)[a - low : b - low])


def _straddles(piece: Piece, first: int, size: int) -> bool:
    """True when a part lies in [first, first + size) only partly and is no run of elements of which a part is one."""
    low, high = piece.span
    apart = high <= first or low >= first + size
    inside = low >= first and high <= first + size
    return not apart and not inside and not piece.is_dense


class _Reader:
    """Tensors of a folder by name, memory-mapped: only what is used of them is read."""

    def __init__(self, folder: Path, stored: dict[str, Stored]) -> None:
        self._folder, self._stored = folder, stored
        self._open: dict[str, Any] = {}

    def get(self, name: str) -> Tensor:
        """The tensor as stored; it may share the memory of the file."""
        file = self._stored[name].file
        if file not in self._open:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[file] = safe_open(self._folder / file, framework="pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


def _fill_whole(model: PreTrainedModel, path: str | Path) -> None:
    log.warning(
        "model.path=%s names its weights in a way that transformers reads but does not write, so every rank loads the "
        "whole model before it keeps its shard; from_pretrained and save_pretrained into a new folder once saves that "
        "memory", path,
    )  # fmt: skip
    dtype = next(model.parameters()).dtype
    whole = load_model(path, str(dtype).removeprefix("torch."), model.config._attn_implementation)
    values = whole.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            share = _Share.of(tensor)
            box = tuple(slice(a, a + n) for a, n in zip(share.starts, share.local.shape, strict=True))
            share.local.copy_(values[name][box])
