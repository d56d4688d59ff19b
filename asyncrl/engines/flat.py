"""The flat decoder: qwen3_moe and its relatives written out as plain tensor operations.

Nothing of the modules runs but the routers, under the route hook, and for many tokens the experts.

Axes: A running rows, P new prompts, S their padded length, N = A + P * S tokens of one pass, G kv heads,
Q query heads per kv head, D head dim, C positions, L MoE layers, K experts per token.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.engines.decoder import Forward, Prompts
from asyncrl.engines.flat_weights import Flat, Layer, Mlp, Moe, Norm, flatten
from asyncrl.engines.kv_cache import KvCache
from asyncrl.models.routes import RouteHook

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# All experts on all tokens is faster than sorting tokens by expert while it wastes fewer operations than this.
_WASTED_FLOPS = 50_000_000


def why_not_flat(model: PreTrainedModel) -> str | None:
    """Why the flat decoder cannot serve the model; None when it can."""
    config: Any = model.config
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r} is not 'silu'"
    if getattr(config, "sliding_window", None):
        return f"sliding_window={config.sliding_window}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return None if rope in _ROPE_TYPES else f"rope type {rope!r} depends on the length"


class FlatDecoder:
    """Decoder for FAMILIES. Memory of the cache: 2 * layers * rows * kv heads * D * capacity numbers."""

    def __init__(self, model: PreTrainedModel, hook: RouteHook | None, rows: int) -> None:
        self._model = model
        self._hook = hook
        self._wide = torch.float64 if model.dtype == torch.float64 else torch.float32
        self.refresh()
        flat = self._flat
        self._cache = KvCache(len(flat.layers), rows, flat.kv_heads, flat.head_dim, model.dtype, flat.embed.device)

    def refresh(self) -> None:
        """Borrow and fuse the weights anew."""
        with torch.no_grad():
            self._flat: Flat = flatten(self._model, self._hook)

    def reserve(self, length: int) -> None:
        """Grow the cache to hold `length` positions per row."""
        if self._cache.reserve(length):
            self._positions = torch.arange(self._cache.capacity, device=self._flat.embed.device)
            self._rotations = self._rotation_table()

    def _rotation_table(self) -> Tensor:
        """cos + i sin per position and pair of dims, complex [C, D / 2]; attention scaling of the rope included."""
        inner: Any = self._model.model
        # The module gives the dtype of its first argument; angles are needed in full.
        like = torch.empty(0, dtype=self._wide, device=self._positions.device)
        cos, sin = inner.rotary_emb(like, self._positions[None])
        half = self._flat.head_dim // 2
        return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())

    def forward(self, tokens_A: Tensor, positions_A: Tensor, length: int, prompts: Prompts | None) -> Forward:
        """One pass over the tokens of the running rows and of all new prompts; only attention tells them apart."""
        rows, tokens, positions = len(tokens_A), tokens_A, positions_A
        if prompts is not None:
            tokens = torch.cat((tokens_A, prompts.tokens_PS.reshape(-1)))
            positions = torch.cat((positions_A, self._begin(rows, prompts)))
        x = self._flat.embed[tokens]
        rotation = self._rotations[positions][:, None]
        self._cache.begin(positions_A, length)
        with nullcontext() if self._hook is None else self._hook.record():
            for i, layer in enumerate(self._flat.layers):
                mixed = self._attention(i, rows, prompts, self._qkv(layer, x, rotation))
                x = _rest_of_layer(layer, x, mixed)
        return self._result(x, rows, prompts)

    def _begin(self, rows: int, prompts: Prompts) -> Tensor:
        """Positions of the prompts' tokens and pads [P * S]."""
        if prompts.starts_P is not None:
            return self._cache.begin_extend(rows, prompts).reshape(-1)
        count, padded = prompts.tokens_PS.shape
        return self._positions[:padded].repeat(count)

    def _attention(self, i: int, rows: int, prompts: Prompts | None, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        if prompts is None:
            return self._cache.step(i, *qkv)
        q, k, v = qkv
        cut = rows * self._flat.kv_heads
        new = (q[cut:], k[cut:], v[cut:])
        begins = prompts.starts_P is None
        mixed = self._cache.prefill(i, rows, prompts, new) if begins else self._cache.extend(i, new)
        return torch.cat((self._cache.step(i, q[:cut], k[:cut], v[:cut]), mixed)) if rows else mixed

    def _result(self, x: Tensor, rows: int, prompts: Prompts | None) -> Forward:
        routes_NLK = None if self._hook is None else self._hook.native[:, :, 0].transpose(0, 1)
        if prompts is None:
            return Forward(self._logits(x), routes_NLK, None)
        count, padded = prompts.tokens_PS.shape
        last = rows + self._positions.new_tensor(range(count)) * padded + prompts.lengths_P - 1
        logits = self._logits(torch.cat((x[:rows], x[last])))
        logits = torch.cat((logits[:rows], logits[rows:][prompts.source_N]))
        if routes_NLK is None:
            return Forward(logits, None, None)
        return Forward(logits, routes_NLK[:rows], routes_NLK[rows:].unflatten(0, (count, padded)))

    def _qkv(self, layer: Layer, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N * G, Q, D] (scaled) and keys [N * G, D], values [N * G, D].

        `flatten` put the two dims that rotate together side by side, so a rotation is a complex product.
        """
        flat, tokens = self._flat, len(x)
        heads = F.linear(_rms(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(
            tokens * flat.kv_heads, -1, flat.head_dim
        )
        qk = heads[:, :-1]
        if layer.qk_eps is not None:
            qk = F.rms_norm(qk, (flat.head_dim,), None, layer.qk_eps)
        qk = (qk * layer.head_scale).to(self._wide).view(tokens, -1, flat.head_dim // 2, 2)
        turned = torch.view_as_real(torch.view_as_complex(qk) * rotation).view(len(heads), -1, flat.head_dim)
        turned = turned.to(x.dtype)
        return turned[:, :-1], turned[:, -1], heads[:, -1]

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(_rms(x, self._flat.norm), self._flat.head)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy cached positions between rows."""
        self._cache.move(source, target, length)

    def save(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row's first `length` positions."""
        return self._cache.save(row, length)

    def restore(self, row: int, saved: tuple[Tensor, Tensor]) -> None:
        """Row begins with what was saved."""
        self._cache.restore(row, saved)

    def clear(self, first: int) -> None:
        """Zero rows first and above."""
        self._cache.clear(first)


def _rest_of_layer(layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
    """Output projection, residuals and the MLP or MoE block."""
    x = torch.addmm(x, mixed, layer.out_t)
    if layer.out_bias is not None:
        x = x + layer.out_bias
    normed = _rms(x, layer.post_norm)
    if isinstance(layer.mlp, Mlp):
        return torch.addmm(x, _gated(normed, layer.mlp), layer.mlp.down_t)
    return _moe(layer.mlp, x, normed)


def _rms(x: Tensor, norm: Norm) -> Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    return norm.weight * F.rms_norm(x.float(), (x.shape[-1],), None, norm.eps).to(x.dtype)


def _gated(x: Tensor, mlp: Mlp) -> Tensor:
    if len(mlp.gate_up) == 1:
        gate, up = F.linear(x, mlp.gate_up[0]).chunk(2, dim=-1)
    else:
        gate, up = F.linear(x, mlp.gate_up[0]), F.linear(x, mlp.gate_up[1])
    return F.silu(gate).mul_(up)


def _moe(moe: Moe, x: Tensor, normed: Tensor) -> Tensor:
    """Add the routed (and shared) experts of normed to x."""
    _, weights_NK, index_NK = moe.router(normed)[:3]
    if moe.fused is not None and len(x) * moe.wasted_flops <= _WASTED_FLOPS:
        # An expert that was not chosen has weight 0, so the sum is exactly the sparse one.
        weights_NE = weights_NK.new_zeros(len(x), moe.num_experts).scatter_(1, index_NK, weights_NK)
        active = _gated(normed, moe.fused)
        active.view(len(x), moe.num_experts, -1).mul_(weights_NE[..., None])
        x = torch.addmm(x, active, moe.fused.down_t)
    else:
        x = x + moe.experts(normed, index_NK, weights_NK)
    if moe.shared is not None and moe.shared_gate is not None:
        shared = torch.mm(_gated(normed, moe.shared), moe.shared.down_t)
        x = torch.addcmul(x, torch.sigmoid(F.linear(normed, moe.shared_gate)), shared)
    return x
