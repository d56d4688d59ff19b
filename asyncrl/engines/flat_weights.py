"""The weights of a llama-like decoder, flattened for the flat decoder. Knows no tokens and no cache.

Parameters are borrowed from the live module; what is fused or transposed is a copy, made anew by every
call of `flatten`, so it must be called after each load.

Axes: H hidden, E experts, I expert intermediate, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.models.routes import RouteHook

# Experts of a layer up to this many parameters are also kept fused, for the dense path.
_FUSED_PARAMETERS = 4_000_000


@dataclass(slots=True)
class Norm:
    """RMS norm: weight and epsilon."""

    weight: Tensor
    eps: float


@dataclass(slots=True)
class Mlp:
    """Gated MLP: gate and up [I, H] (or gate_up [2I, H] alone), down_t [I, H]."""

    gate_up: tuple[Tensor, ...]
    down_t: Tensor


@dataclass(slots=True)
class Moe:
    """Routed experts. fused: all of them as one gated MLP of E * I units, None when that is too large.

    wasted_flops: operations per token that the fused form spends on experts that were not chosen.
    """

    router: nn.Module
    experts: Callable[..., Tensor]
    num_experts: int
    wasted_flops: int
    fused: Mlp | None
    shared: Mlp | None
    shared_gate: Tensor | None


@dataclass(slots=True)
class Layer:
    """One decoder layer. qkv rows go by kv head: its Q query heads, its key, its value, each of D dims.

    qk_eps is None for families without norms of queries and keys; head_scale [Q + 1, D] holds their weights
    and the softmax scaling of the queries.
    """

    input_norm: Norm
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_eps: float | None
    head_scale: Tensor
    out_t: Tensor
    out_bias: Tensor | None
    post_norm: Norm
    mlp: Mlp | Moe


@dataclass(slots=True)
class Flat:
    """All of it, and the sizes a cache needs."""

    embed: Tensor
    layers: list[Layer]
    norm: Norm
    head: Tensor
    heads: int
    kv_heads: int
    head_dim: int


def flatten(model: PreTrainedModel, hook: RouteHook | None) -> Flat:
    """Flat weights of a model that `why_not_flat` accepts."""
    inner: Any = model.model
    routers = hook.routers if hook is not None else {}
    attention = inner.layers[0].self_attn
    head_dim = int(attention.head_dim)
    heads = attention.q_proj.weight.shape[0] // head_dim
    kv_heads = attention.k_proj.weight.shape[0] // head_dim
    layers = [_layer(layer, routers.get(i), heads, kv_heads, head_dim) for i, layer in enumerate(inner.layers)]
    head: Any = model.lm_head
    return Flat(inner.embed_tokens.weight, layers, _norm(inner.norm), head.weight, heads, kv_heads, head_dim)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def _layer(layer: Any, router: nn.Module | None, heads: int, kv_heads: int, head_dim: int) -> Layer:
    attention = layer.self_attn
    norm = getattr(attention, "q_norm", None)
    pairs = _pairs(head_dim, attention.q_proj.weight.device)
    like = attention.q_proj.weight
    # 1 / sqrt(D) rounded to bfloat16 would be another temperature.
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    scale = torch.ones(heads // kv_heads + 1, head_dim, dtype=wide, device=like.device)
    if norm is not None:
        scale[:-1], scale[-1] = attention.q_norm.weight, attention.k_norm.weight
    scale[:-1] *= attention.scaling
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    weights = [p.weight.unflatten(0, (kv_heads, -1, head_dim)) for p in projections]
    biases = [p.bias.unflatten(0, (kv_heads, -1, head_dim)) for p in projections if p.bias is not None]
    return Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=_fuse(weights, pairs),
        qkv_bias=_fuse(biases, pairs) if biases else None,
        qk_eps=None if norm is None else float(norm.variance_epsilon),
        head_scale=scale[:, pairs].contiguous(),
        out_t=attention.o_proj.weight.t(),
        out_bias=attention.o_proj.bias,
        post_norm=_norm(layer.post_attention_layernorm),
        mlp=_dense(layer.mlp) if router is None else _moe(layer.mlp, router),
    )


def _pairs(head_dim: int, device: torch.device) -> Tensor:
    """Order of the dims of a head in which those that rotate together, d and d + D / 2, are neighbours."""
    return torch.arange(head_dim, device=device).view(2, -1).t().reshape(-1)


def _fuse(parts_q_k_v: list[Tensor], pairs: Tensor) -> Tensor:
    """Query, key and value parts [kv heads, Q or 1, D, ...] as one [rows, ...].

    Scores do not mind an order of dims that queries and keys share.
    """
    q, k, v = parts_q_k_v
    return torch.cat((q[:, :, pairs], k[:, :, pairs], v), dim=1).flatten(0, 2)


def _dense(mlp: Any) -> Mlp:
    return Mlp((mlp.gate_proj.weight, mlp.up_proj.weight), mlp.down_proj.weight.t())


def _moe(block: Any, router: Any) -> Moe:
    gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
    num_experts, hidden, inter = down.shape
    fused = None
    if 3 * down.numel() <= _FUSED_PARAMETERS:
        both = gate_up.unflatten(1, (2, inter)).transpose(0, 1).reshape(-1, hidden)
        fused = Mlp((both,), down.permute(1, 0, 2).reshape(hidden, -1).t())
    shared = getattr(block, "shared_expert", None)
    return Moe(
        router=router,
        experts=block.experts,
        num_experts=num_experts,
        wasted_flops=6 * (num_experts - int(router.top_k)) * hidden * inter,
        fused=fused,
        shared=None if shared is None else _dense(shared),
        shared_gate=None if shared is None else block.shared_expert_gate.weight,
    )
