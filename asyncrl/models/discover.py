"""Find the routers of a transformers model. Knows nothing of capture or replay.

Nearly every family names its router class in `_can_record_outputs["router_logits"]`; a class name
that ends like a router's is the fallback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from asyncrl.errors import RouteError

_NAME = re.compile(r"(TopK|Topk|TokenChoice)?(Router|Gate|Gating)$")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = (
    "top_k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_top_k",
    "moe_topk",
    "experts_per_token",
    "top_k_experts",
)


@dataclass(frozen=True, slots=True)
class RouterInfo:
    """One router: its dotted name, decoder layer number, module, experts E and choices K."""

    name: str
    layer: int
    module: nn.Module
    num_experts: int
    top_k: int


def discover_routers(model: nn.Module) -> tuple[RouterInfo, ...]:
    """The routers of model ordered by layer number; empty for a dense model.

    Raises RouteError when a router has no layer number or size, or a layer has two routers.
    """
    found = _declared(model) or _by_class_name(model)
    infos = sorted((_describe(model, name, module) for name, module in found.items()), key=lambda r: r.layer)
    for earlier, later in pairwise(infos):
        if earlier.layer == later.layer:
            raise RouteError(f"layer {later.layer} has two routers: {earlier.name}, {later.name}")
    return tuple(infos)


def input_module(model: nn.Module, infos: tuple[RouterInfo, ...]) -> nn.Module:
    """The innermost transformers model that holds all routers: it sees the [B, S] input."""
    inner = model
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if hasattr(module, "config") and all(info.name.startswith(prefix) for info in infos) and _is_model(module):
            inner = module
    return inner


def _is_model(module: nn.Module) -> bool:
    return hasattr(module, "_can_record_outputs") or hasattr(module, "get_input_embeddings")


def _declared(model: nn.Module) -> dict[str, nn.Module]:
    targets: list[tuple[type[nn.Module], str]] = []
    for module in model.modules():
        entry: Any = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for recorder in entry if isinstance(entry, (list, tuple)) else [entry]:
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                targets.append((target, getattr(recorder, "layer_name", None) or ""))
    return {
        name: module
        for name, module in model.named_modules()
        if any(isinstance(module, target) and part in name for target, part in targets)
    }


def _by_class_name(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if _NAME.search(type(module).__name__) and _size(module, None, _TOP_K) is not None
    }


def _describe(model: nn.Module, name: str, module: nn.Module) -> RouterInfo:
    number = next((int(part) for part in name.split(".") if part.isdigit()), None)
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    num_experts, top_k = _size(module, text, _EXPERTS), _size(module, text, _TOP_K)
    if number is None or num_experts is None or top_k is None:
        raise RouteError(f"router {name} ({type(module).__name__}): no layer number, expert count or top-k found")
    return RouterInfo(name, number, module, num_experts, top_k)


def _size(module: nn.Module, config: Any, keys: tuple[str, ...]) -> int | None:
    for owner in (module, config):
        for key in keys:
            value = getattr(owner, key, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
