"""What a family does between the base model's last hidden state and its logits; which modules are its decoder layers.

Logits are soft_cap * tanh(x / soft_cap) with x = scale * (hidden weight^T + bias), or x itself without a soft-cap.
Granite and Cohere scale, Gemma caps, most families do neither. Both numbers are read off the family's own
forward, run on a stand-in of three columns: no table of config fields can miss one, no weights are needed, and a
family that does anything else is refused by name.

Axes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from asyncrl.errors import ConfigError
from asyncrl.models.discover import discover_routers

_HUGE = 1e30
_TOLERANCE = 1e-5  # some families cap in float32


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The step from hidden states to logits.

    name: attribute of the causal model that holds the output matrix. scale: factor on the product with the
    matrix. soft_cap: bound of the logits, None without one. bias: whether a bias [V] is added before the scale.
    vocab_size: V, the first rows of the matrix; some families pad it with rows that are no tokens.
    """

    name: str
    scale: float
    soft_cap: float | None
    bias: bool
    vocab_size: int

    def tensors(self, model: nn.Module) -> tuple[Tensor, Tensor | None]:
        """The live weight [V, H] and bias [V] or None of model, without padding rows; sharded ones as they are."""
        module: Any = getattr(model, self.name)
        weight, bias = module.weight, module.bias if self.bias else None
        if weight.shape[0] == self.vocab_size:
            return weight, bias
        return weight[: self.vocab_size], None if bias is None else bias[: self.vocab_size]

    def logits(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Logits [N, V] in the dtype of hidden: the plain formula that chunked code must equal."""
        out = nn.functional.linear(hidden_NH, weight_VH, bias_V) * self.scale
        return out if self.soft_cap is None else torch.tanh(out / self.soft_cap) * self.soft_cap


def output_head(model: nn.Module) -> OutputHead:
    """The output head of a causal model, weights or not (meta and sharded models work too).

    Runs the family's own forward around a stand-in for the base model, and takes scale and soft-cap from what
    comes out. Raises ConfigError naming the model type when no such formula gives the same numbers to 1e-5.
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    module = find() if find is not None else None
    name = next((name for name, child in model.named_children() if child is module), None)
    if name is None or not isinstance(module, nn.Linear):
        raise _refused(model, f"its output matrix is {type(module).__name__}, not a linear layer of the model itself")
    bias, rows = module.bias is not None, module.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    hidden, weight, shift = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (5, rows, rows))
    bias_V = shift[:, 0] if bias else None
    got = _run(model, name, hidden, weight, bias_V)
    head = OutputHead(name, *_scale_and_cap(model, name), bias, got.shape[-1])
    expected = head.logits(hidden, weight, bias_V)[:, : head.vocab_size]
    if got.shape != expected.shape or not torch.allclose(got, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise _refused(model, "its logits are neither a scaled nor a soft-capped product with the output matrix")
    return head


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal model in order: the units to shard and to checkpoint.

    Found by their count, which the config gives, and by the routers, which they must hold all. Raises
    ConfigError naming the model type when no module list fits.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    routers = [info.name for info in discover_routers(model)]
    fitting = [
        (name.count("."), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == getattr(text, "num_hidden_layers", None)
        and all(router.startswith(f"{name}.") for router in routers)
        and next(module.parameters(), None) is not None
    ]
    if not fitting:
        raise _refused(model, "no list of its num_hidden_layers decoder layers was found")
    layers = model.get_submodule(min(fitting)[1])
    assert isinstance(layers, nn.ModuleList)
    return layers


def _scale_and_cap(model: nn.Module, name: str) -> tuple[float, float | None]:
    def answer(x: float) -> float:
        one = torch.ones(1, 1, dtype=torch.float64)
        return float(_run(model, name, one * x, one, torch.zeros(1, dtype=torch.float64)))

    slope = answer(1e-3) / 1e-3
    if not math.isfinite(slope) or slope == 0.0:
        raise _refused(model, "its logits do not depend on the output matrix")
    cap = abs(answer(_HUGE))
    if cap > _HUGE / 1e6:
        return _exact(answer(1.0)), None
    # Away from the flat ends of tanh its inverse is well conditioned.
    x = 0.3 * cap / slope
    part = answer(x) / cap
    if not abs(part) < 1.0:
        raise _refused(model, "its logits are cut off, but not by a soft-cap")
    return _exact(math.atanh(part) * cap / x), cap


def _exact(scale: float) -> float:
    """scale, freed of the rounding of a float32 soft-cap where it is 1."""
    return 1.0 if abs(scale - 1.0) < 1e-6 else scale


class _Output(MoeModelOutputWithPast):
    """Has nothing but hidden states: whatever else a family passes on is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _StandIn(nn.Module):
    """Answers as the base model with given hidden states; everything else is asked of the base model."""

    def __init__(self, base: nn.Module, hidden_NH: Tensor) -> None:
        super().__init__()
        self.__dict__["real"] = base
        self.__dict__["hidden"] = hidden_NH

    def forward(self, *_args: Any, **_kwargs: Any) -> _Output:
        return _Output(last_hidden_state=self.__dict__["hidden"][None])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["real"], name)


@torch.no_grad()
def _run(model: nn.Module, name: str, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Logits [N, V] float64 of the model's own forward over these hidden states and this output matrix."""
    base, real = str(getattr(model, "base_model_prefix", "")), getattr(model, name)
    if base not in dict(model.named_children()):
        raise _refused(model, f"it has no base model {base!r}")
    linear = nn.Linear(weight_VH.shape[1], weight_VH.shape[0], bias=real.bias is not None, dtype=weight_VH.dtype)
    linear.weight.copy_(weight_VH)
    if linear.bias is not None and bias_V is not None:
        linear.bias.copy_(bias_V)
    shell = copy.copy(model)
    parts = {**dict(model.named_children()), base: _StandIn(getattr(model, base), hidden_NH), name: linear}
    shell.__dict__["_modules"] = parts
    ids = torch.zeros(1, len(hidden_NH), dtype=torch.int64)
    try:
        logits: Tensor = type(model).forward(shell, input_ids=ids, use_cache=False).logits
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        raise _refused(model, f"its output head cannot be run alone ({type(exc).__name__}: {exc})") from exc
    return logits[0].double()


def _refused(model: nn.Module, reason: str) -> ConfigError:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return ConfigError(f"model type {kind!r} is not supported: {reason}")
