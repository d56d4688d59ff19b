"""Weights by their Hugging Face checkpoint names: out of a live model, and into one.

transformers fuses and renames parameters on load; `revert_weight_conversion` says how they are called
on disk. It runs once per parameter on an empty stand-in, which tells for every checkpoint tensor which
slice of the live parameter it is; after that both directions are plain copies. Knows no carrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

from asyncrl.errors import WeightSyncError


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor as a part of one live tensor: strided view, or flat indices where no view does."""

    hf_name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    index: Tensor | None

    @property
    def span(self) -> tuple[int, int]:
        """First flat index of the live tensor that it covers, and the one after its last."""
        if self.index is not None:
            return (int(self.index.min()), int(self.index.max()) + 1) if self.index.numel() else (0, 0)
        if 0 in self.size:
            return self.offset, self.offset
        steps = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + steps + 1

    @property
    def is_dense(self) -> bool:
        """True when it covers every element of its span, in order."""
        step = 1
        for n, stride in zip(reversed(self.size), reversed(self.stride), strict=False):
            if n != 1 and stride != step:
                return False
            step *= n
        return self.index is None

    def read(self, whole: Tensor) -> Tensor:
        """The checkpoint tensor out of the contiguous live tensor; may share its memory."""
        if self.index is not None:
            return whole.reshape(-1)[self.index.to(whole.device)]
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset).contiguous()

    def write(self, whole: Tensor, value: Tensor, first: int = 0) -> None:
        """Copy the checkpoint tensor into the contiguous live tensor, or into its flat part that begins at `first`."""
        if self.index is not None:
            whole.view(-1)[(self.index - first).to(whole.device)] = value.to(whole.device, whole.dtype)
        else:
            whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset - first).copy_(value)


_layouts: WeakKeyDictionary[nn.Module, dict[str, list[Piece]]] = WeakKeyDictionary()
"""Layout per live model: a pure function of its class and shapes, so a cache only."""


def stream(
    model: nn.Module,
    dtype: Callable[[str], torch.dtype | None] | None = None,
    whole: Callable[[str], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF checkpoint name, whole tensor) for everything that save_pretrained writes, parameter by parameter.

    Tensors are contiguous, on the CPU and never share memory with the model. Under FSDP2 each parameter is
    gathered in turn, a collective: all ranks must walk the whole stream in step. Tied names appear once.
    dtype: what a live tensor, given by its name in the state dict, is cast to; None leaves it.
    whole: live tensors by that name from elsewhere, as they are; model then gives names and shapes only, and may be
    on meta.
    """
    get = whole if whole is not None else _gather(model, dtype)
    for name, pieces in layout(model).items():
        tensor = get(name).contiguous()
        for piece in pieces:
            part = piece.read(tensor).cpu()
            shared = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            yield piece.hf_name, part.clone() if shared else part
        # Before the next one is gathered.
        del tensor, part


def _gather(model: nn.Module, dtype: Callable[[str], torch.dtype | None] | None) -> Callable[[str], Tensor]:
    live = model.state_dict()

    def get(name: str) -> Tensor:
        tensor = live[name].detach()
        chosen = dtype(name) if dtype is not None else None
        # Cast before it is gathered: half the bytes travel, and half the memory is needed.
        tensor = tensor.to(chosen) if chosen is not None else tensor
        whole: Tensor = cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole

    return get


class Loader:
    """Copies HF-named tensors into a live, unsharded model in place."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layout = layout(model)
        self.shapes: dict[str, tuple[int, ...]] = {
            piece.hf_name: piece.size for pieces in self._layout.values() for piece in pieces
        }

    def load(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in, cast to the model's dtype. The names must be exactly those of the model.

        Everything is checked before the first byte changes: WeightSyncError names what is missing,
        extra or of another shape, and leaves the model as it was.
        """
        given = dict(weights)
        self._check(given)
        live = self._model.state_dict()
        with torch.no_grad():
            for name, pieces in self._layout.items():
                target = live[name]
                if not target.is_contiguous():
                    raise WeightSyncError(f"live parameter {name} is not contiguous")
                for piece in pieces:
                    piece.write(target, given[piece.hf_name])

    def _check(self, given: Mapping[str, Tensor]) -> None:
        missing = [name for name in self.shapes if name not in given]
        extra = [name for name in given if name not in self.shapes]
        wrong = [
            f"{name} {tuple(given[name].shape)} for {shape}"
            for name, shape in self.shapes.items()
            if name in given and tuple(given[name].shape) != shape
        ]
        faults = {"missing": missing, "extra": extra, "wrong shape": wrong}
        texts = [f"{kind}: {some(names)}" for kind, names in faults.items() if names]
        if texts:
            raise WeightSyncError(f"weights do not fit the model; {'; '.join(texts)}")


def layout(model: nn.Module) -> dict[str, list[Piece]]:
    """Live tensor name -> its checkpoint tensors, in the order of save_pretrained, tied names left out."""
    known = _layouts.get(model)
    if known is None:
        known = {name: _pieces(model, name, tensor.shape) for name, tensor in _in_order(model)}
        twice = _repeated(piece.hf_name for pieces in known.values() for piece in pieces)
        if twice:
            raise WeightSyncError(f"{type(model).__name__}: two live tensors are saved as {some(twice)}")
        _layouts[model] = known
    return known


def _saved(model: nn.Module) -> dict[str, Tensor]:
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    # Whatever shares its parameter with a source that is in the state dict is saved once, as the source.
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict()
    return {k: v for k, v in state.items() if k not in ignored and not (k in tied and tied[k] in state)}


def _in_order(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Sorted as revert_weight_conversion sorts; it hands back as they are the weights of a family without any."""
    nothing: dict[str, Tensor] = {}
    saved = list(_saved(model).items())
    if revert_weight_conversion(model, nothing) is nothing:
        return saved
    return sorted(saved, key=lambda item: dot_natural_key(item[0]))


def _pieces(model: nn.Module, name: str, shape: torch.Size) -> list[Piece]:
    stand_in = torch.empty(shape, device="meta")
    with _LazyContiguous():
        parts: dict[str, Tensor] = revert_weight_conversion(model, {name: stand_in})
    if all(part.untyped_storage()._cdata == stand_in.untyped_storage()._cdata for part in parts.values()):
        return [Piece(k, tuple(p.shape), p.stride(), int(p.storage_offset()), None) for k, p in parts.items()]
    numbers = torch.arange(stand_in.numel()).view(shape)
    indices: dict[str, Tensor] = revert_weight_conversion(model, {name: numbers})
    flat = torch.cat([part.reshape(-1) for part in indices.values()])
    if flat.dtype != torch.int64 or not torch.equal(flat.sort().values, numbers.reshape(-1)):
        raise WeightSyncError(f"{name}: its checkpoint conversion does more than move values; family not supported")
    return [Piece(k, tuple(p.shape), (), 0, p.contiguous()) for k, p in indices.items()]


class _LazyContiguous(TorchFunctionMode):
    """Leaves slices as views of the stand-in, so that their offset and strides can be read off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def some(names: list[str], most: int = 5) -> str:
    """At most `most` of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
