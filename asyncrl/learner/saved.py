"""The weights in a checkpoint, tensor by tensor, read without a process group and without the optimizer's state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.learner.shards import hashing
from asyncrl.learner.stored import STATE, State, read_state
from asyncrl.models.folder import read_header

PREFIX = "model.model."
"""Before the name of a live tensor: of the checkpoint's part, and of the policy around the model."""


class _Part(NamedTuple):
    """A rectangle of a tensor, in a file of its own."""

    file: str
    starts: tuple[int, ...]
    shape: tuple[int, ...]


class SavedModel:
    """What RUN/checkpoints/u<update> holds of the policy. ConfigError naming the file when it is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = _state(folder)
        self._verify()
        self._parts: dict[str, list[_Part]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for name in sorted(self.state.files):
            self._list(name)
        self._open: dict[str, Any] = {}

    def _verify(self) -> None:
        found: dict[str, str] = {}
        try:
            for _ in hashing(self.folder, sorted(self.state.files), found):
                pass
        except OSError as exc:
            raise ConfigError(f"{self.folder} is damaged: a file cannot be read ({exc}); take another step") from exc
        broken = next((name for name, digest in found.items() if digest != self.state.files[name]), None)
        if broken is not None:
            raise ConfigError(f"{self.folder / broken} is damaged (its hash is another one); take another step")

    def _list(self, file: str) -> None:
        tensors, metadata = read_header(self.folder / file)
        places: dict[str, Any] = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
        for name, entry in tensors.items():
            if not name.startswith(PREFIX):
                continue
            starts = places.get(name, {}).get("saved_offsets") or [0] * len(entry.shape)
            live = name.removeprefix(PREFIX)
            self._parts.setdefault(live, []).append(_Part(file, tuple(starts), entry.shape))
            self._dtypes[live] = getattr(torch, entry.dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole live tensor of that name, put together from its parts. ConfigError when they do not give it."""
        whole = torch.empty(shape, dtype=self._dtypes[name])
        filled = 0
        for part in self._parts[name]:
            box = tuple(slice(a, a + n) for a, n in zip(part.starts, part.shape, strict=True))
            if len(part.shape) != len(shape) or any(s.stop > n for s, n in zip(box, shape, strict=True)):
                raise ConfigError(f"{self.folder}: {name} is not of the shape {shape} that the model has")
            if part.file not in self._open:
                self._open[part.file] = safe_open(self.folder / part.file, framework="pt")
            value: Tensor = self._open[part.file].get_tensor(PREFIX + name)
            whole[box] = value
            filled += value.numel()
        if filled != whole.numel():
            raise ConfigError(f"{self.folder}: {name} has {filled} values, but the model has {whole.numel()}")
        return whole


def _state(folder: Path) -> State:
    try:
        return read_state(folder)
    except (OSError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"{folder} is damaged: {STATE} cannot be read ({exc}); take another step") from exc
