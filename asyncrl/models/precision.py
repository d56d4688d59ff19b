"""What is float32 in a bfloat16 model, on both sides alike. Knows no sharding and no engine.

The learner holds float32 weights and rounds them for each forward, an engine holds rounded ones. Where one of them
kept a router in float32 and the other did not, they would choose different experts for the same token.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.core_model_loading import build_glob_alternation

from asyncrl.models.discover import discover_routers

RouterDtype = Literal["checkpoint", "float32"]


def float32_names(model: nn.Module, router_dtype: RouterDtype) -> frozenset[str]:
    """Names in the state dict that stay float32 when the model computes in bfloat16.

    What transformers keeps so for the family (router weights and score corrections of DeepSeek-V3 and its relatives),
    floating buffers, which sharding never rounds, and with router_dtype=float32 all of every router.
    """
    plan = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    kept = build_glob_alternation(plan)[0].search if plan else lambda _: None
    routers = tuple(f"{r.name}." for r in discover_routers(model)) if router_dtype == "float32" else ()
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return frozenset(
        name for name in state if name not in parameters or kept(name) or any(name.startswith(r) for r in routers)
    )


def keep_float32(model: nn.Module, router_dtype: RouterDtype) -> None:
    """Make `float32_names` of a live bfloat16 model float32; what was rounded stays so until weights are loaded."""
    for name in float32_names(model, router_dtype):
        owner = model.get_submodule(name.rpartition(".")[0])
        own = name.rpartition(".")[2]
        if own in owner._buffers:
            owner._buffers[own] = getattr(owner, own).float()
        else:
            parameter = getattr(owner, own)
            parameter.data = parameter.data.float()


def routers_in_float32(model: nn.Module) -> None:
    """Let every router compute in float32 on inputs cast to it; its outputs stay float32. Before `RouteHook`.

    The weights are the caller's business (`keep_float32`, or sharding that does not round them).
    """
    for info in discover_routers(model):
        info.module.forward = _Float32Forward(info.module)


class _Float32Forward:
    """A router's forward on float32 inputs. A class, so that a deep copy of the model points into itself."""

    __slots__ = ("inner",)

    def __init__(self, router: nn.Module) -> None:
        self.inner = router.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*tree_map(_widened, args), **tree_map(_widened, kwargs))


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value
