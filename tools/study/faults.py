"""What a broken or a cheaper generator does to the embedded engine: weights, activations, router, loads.

Everything is outside the package: weights are changed on their way into the engine, arithmetic by a mode around the
decoder's forward. Knows no queue and no filter.

Axes: N rows, K inner features.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncrl.engines import torch_engine
from asyncrl.engines.choose import make_decoder
from asyncrl.engines.decoder import Decoder, Forward, Prompts
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.models.names import Loader
from asyncrl.models.routes import RouteHook
from asyncrl.types import Version
from asyncrl.weights.fp8 import LARGEST, dequantise, quantise

FAULTS = ("noise", "int4", "swapped", "missed_syncs")
"""Router logits + N(0, 1); weights in int4; experts 0 and 1 exchanged in each layer; weights 16 updates old that are
labelled as new (the caller gives those weights)."""

_LINEAR = re.compile(r".*(_proj\.weight|\.experts\.\d+\.(gate|up|down)_proj\.weight)")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_COLUMNS = 128
_INT4_GROUP = 32


class Kind(NamedTuple):
    """precision: fp32, bf16 or fp8. fault: of FAULTS, or nothing."""

    precision: str = "fp32"
    fault: str = ""


def make_engine(model: str | Path, kind: Kind, seed: int, rows: int, threads: int = 1) -> TorchEngine:
    """An embedded engine of this kind, with the weights of the folder as they are until a load."""
    made = _Decoders(kind)
    with patch.object(torch_engine, "make_decoder", made), patch.object(torch_engine, "Loader", _loader(kind)):
        dtype = "bfloat16" if kind.precision == "bf16" else "float32"
        return TorchEngine(model, version=Version(0, -1), dtype=dtype, threads=threads, max_rows=rows, seed=seed)


def changed(weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], kind: Kind) -> dict[str, Tensor]:
    """The weights that an engine of this kind holds when it is given these, by Hugging Face name."""
    given = dict(weights)
    if kind.fault == "swapped":
        given = {_exchanged(name): tensor for name, tensor in given.items()}
    if kind.fault == "int4":
        given = {name: fake_int4(t) if _LINEAR.fullmatch(name) else t for name, t in given.items()}
    if kind.precision == "fp8":
        given = {name: fake_fp8_weight(t) if _LINEAR.fullmatch(name) else t for name, t in given.items()}
    return given


def fake_fp8_weight(weight: Tensor) -> Tensor:
    """The weight [N, K] rounded to float8_e4m3fn with one scale per 128 x 128 block."""
    return dequantise(*quantise(weight), dtype=torch.float32).to(weight.dtype)


def fake_int4(weight: Tensor) -> Tensor:
    """The weight [N, K] rounded to 15 levels, symmetric, with one scale per row and 32 columns."""
    blocks = F.pad(weight.float(), (0, -weight.shape[1] % _INT4_GROUP)).unflatten(1, (-1, _INT4_GROUP))
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 7
    rounded = (blocks / torch.where(scale > 0, scale, 1.0)).round().clamp(-7, 7) * scale
    return rounded.flatten(1)[:, : weight.shape[1]].to(weight.dtype)


def fake_fp8_activation(x: Tensor) -> Tensor:
    """x [..., K] rounded to float8_e4m3fn with one scale per row and 128 columns, as servers do it."""
    width = x.shape[-1]
    blocks = F.pad(x.float(), (0, -width % _COLUMNS)).unflatten(-1, (-1, _COLUMNS))
    scale = blocks.abs().amax(dim=-1, keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    rounded = (blocks / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)[..., :width].to(x.dtype)


def _exchanged(name: str) -> str:
    found = _EXPERT.fullmatch(name)
    other = {"0": "1", "1": "0"}
    return name if found is None else f"{found[1]}{other.get(found[2], found[2])}{found[3]}"


def _loader(kind: Kind) -> type[Loader]:
    class Changing(Loader):
        def load(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
            super().load(changed(weights, kind))

    return Changing


class _Decoders:
    """Stands in for asyncrl.engines.choose.make_decoder."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def __call__(self, model: PreTrainedModel, hook: RouteHook | None, rows: int) -> Decoder:
        inner = make_decoder(model, hook, rows)
        if self._kind.precision != "fp8" and self._kind.fault != "noise":
            return inner
        routers: list[Any] = [] if hook is None else [r.weight for r in hook.routers.values()]
        head: Any = model.get_output_embeddings()
        return _Around(inner, _Arithmetic(self._kind, routers, [head.weight]))


class _Around:
    """A decoder whose forward runs under a mode."""

    def __init__(self, inner: Decoder, mode: TorchFunctionMode) -> None:
        self._inner, self._mode = inner, mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, tokens_A: Tensor, positions_A: Tensor, length: int, prompts: Prompts | None) -> Forward:
        with self._mode:
            return self._inner.forward(tokens_A, positions_A, length, prompts)


class _Arithmetic(TorchFunctionMode):
    """Rounds what goes into linear layers (not routers, not the output matrix), or adds noise to router logits."""

    def __init__(self, kind: Kind, routers: list[Tensor], heads: list[Tensor]) -> None:
        super().__init__()
        self._kind = kind
        self._routers = {w.data_ptr() for w in routers}
        self._exact = self._routers | {w.data_ptr() for w in heads}
        self._generator = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = {"linear": 0, "mm": 0, "addmm": 1, "grouped_mm": 0, "_grouped_mm": 0}.get(getattr(func, "__name__", ""))
        if place is None or len(args) < place + 2:
            return func(*args, **kwargs)
        weight = args[place + 1].data_ptr()
        if self._kind.precision == "fp8" and weight not in self._exact:
            args = (*args[:place], fake_fp8_activation(args[place]), *args[place + 1 :])
        out = func(*args, **kwargs)
        if self._kind.fault == "noise" and weight in self._routers:
            out = out + torch.randn(out.shape, generator=self._generator).to(out)
        return out
