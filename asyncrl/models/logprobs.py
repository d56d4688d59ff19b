"""Log-probs of chosen tokens from hidden states, without ever holding [N, V].

Knows nothing of responses or masks: the caller picks the rows. Axes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.errors import ConfigError

BLOCK_NUMBERS = 2**25
"""Logits that exist at a time (128 MiB in float32), whatever the vocabulary; also numbers of a widened weight block."""


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor | float,
    chunk: int = 4096,
    *,
    bias_V: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    block_numbers: int = BLOCK_NUMBERS,
) -> tuple[Tensor, Tensor]:
    """(logp [N], entropy [N]) of softmax(logits / temperature) at targets.

    logits = scale * (hidden weight^T + bias), or soft_cap * tanh of that over soft_cap (models/head.py). logp is
    differentiable in hidden, weight and bias, entropy (nats) carries no gradient. Both are float32, or float64 when
    hidden is; lower precision is multiplied in float32, because bfloat16 logits are off by up to 5e-2.

    Logits exist for at most chunk rows and block_numbers numbers at a time, in backward too, where all but the last
    block are computed again. weight must be whole (gathered by the caller); a lower precision is widened block by
    block. N = 0 works. Raises ConfigError when shapes, a temperature <= 0, scale or soft_cap make no sense.
    """
    _check(hidden_NH, weight_VH, targets_N, chunk, bias_V, scale, soft_cap)
    if not isinstance(temperature_N, Tensor):
        if not temperature_N > 0:
            raise ConfigError(f"temperature {temperature_N} must be above 0")
        temperature_N = hidden_NH.new_full(targets_N.shape, temperature_N, dtype=_accumulate(hidden_NH))
    if temperature_N.shape != targets_N.shape:
        raise ConfigError(f"temperature {tuple(temperature_N.shape)} for {targets_N.shape[0]} rows")
    head = _Head(scale, soft_cap, chunk, block_numbers)
    logp_N, entropy_N = _TokenLogprobs.apply(
        hidden_NH, weight_VH, bias_V, targets_N.long(), temperature_N.detach(), head
    )
    return logp_N, entropy_N


def _check(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    chunk: int,
    bias_V: Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> None:
    if hidden_NH.dim() != 2 or weight_VH.dim() != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ConfigError(f"hidden {tuple(hidden_NH.shape)} and weight {tuple(weight_VH.shape)} do not multiply")
    if targets_N.shape != hidden_NH.shape[:1]:
        raise ConfigError(f"targets {tuple(targets_N.shape)} for {hidden_NH.shape[0]} rows")
    if bias_V is not None and bias_V.shape != weight_VH.shape[:1]:
        raise ConfigError(f"bias {tuple(bias_V.shape)} for a vocabulary of {weight_VH.shape[0]}")
    if chunk < 1:
        raise ConfigError(f"chunk {chunk} must be at least 1")
    if scale == 0 or (soft_cap is not None and not soft_cap > 0):
        raise ConfigError(f"scale {scale} must not be 0 and soft_cap {soft_cap} must be above 0")


def _accumulate(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _Head(NamedTuple):
    """From products to logits, and how many at a time."""

    scale: float
    soft_cap: float | None
    chunk: int
    block_numbers: int

    def rows(self, count: int) -> list[slice]:
        """Chunks of the rows; no two of them and no block of the vocabulary overlap."""
        return [slice(i, i + self.chunk) for i in range(0, count, self.chunk)]

    def columns(self, rows: int, weight_VH: Tensor) -> list[slice]:
        """Blocks of the vocabulary: neither logits nor widened weights exceed block_numbers."""
        vocab, hidden = weight_VH.shape
        width = max(1, self.block_numbers // max(1, min(rows, self.chunk), hidden))
        return [slice(i, min(i + width, vocab)) for i in range(0, vocab, width)]

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits before the temperature, in the wide dtype."""
        out = _product(hidden, weight)
        if bias is not None:
            out.add_(bias.to(out.dtype))
        if self.scale != 1.0:
            out.mul_(self.scale)
        return out if self.soft_cap is None else out.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def slope_(self, delta: Tensor, capped: Tensor | None) -> None:
        """The gradient in the logits, turned in place into that in hidden weight^T + bias."""
        if capped is not None and self.soft_cap is not None:
            # d (c tanh(x / c)) / dx = 1 - tanh(x / c)^2
            delta.addcmul_(delta * capped, capped, value=-(self.soft_cap**-2))
        if self.scale != 1.0:
            delta.mul_(self.scale)


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden weight^T in at least float32."""
    if hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16:
        # Products of bfloat16 are exact in float32; tensor cores sum them there.
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    wide = _accumulate(hidden)
    return hidden.to(wide) @ weight.to(wide).t()


class _TokenLogprobs(torch.autograd.Function):
    """Forward and backward walk blocks of the vocabulary and chunks of the rows, backward from the last to the first.

    Between them only [N] is kept, and the last block, with which backward begins: it would compute it again while
    nothing else is there to need the room.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N: Tensor,
        head: _Head,
    ) -> tuple[Tensor, Tensor]:
        wide, count = _accumulate(hidden_NH), len(targets_N)
        scale_N = temperature_N.to(wide).reciprocal()
        columns = head.columns(count, weight_VH)
        # Per block: log of its share of Z, and the mean of its logits under it.
        norms = hidden_NH.new_empty((len(columns), count), dtype=wide)
        means = torch.empty_like(norms)
        chosen_N = norms.new_zeros(count)
        last = top = None
        for i, block in enumerate(columns):
            weight, bias = _ready(hidden_NH, weight_VH[block]), None if bias_V is None else bias_V[block]
            for rows in head.rows(count):
                last = None
                logits = head.logits(hidden_NH[rows], weight, bias).mul_(scale_N[rows, None])
                inside, at = _inside(targets_N[rows], block)
                chosen_N[rows] += logits.gather(1, at[:, None])[:, 0] * inside
                top = logits.amax(dim=-1)
                # In place, so that two blocks fit, not three; one exp gives Z, the mean and what backward keeps.
                last = torch.exp(logits.sub_(top[:, None]))
                total = last.sum(dim=-1)
                norms[i, rows] = total.log() + top
                means[i, rows] = torch.linalg.vecdot(last, logits) / total + top
        norm_N = torch.logsumexp(norms, dim=0)
        # H = log Z - sum p s
        entropy_N = norm_N - ((norms - norm_N).exp_() * means).sum(dim=0)
        # The slope of a soft-cap needs the logits themselves.
        ctx.kept = (None, None) if head.soft_cap is not None else (last, top)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, scale_N, norm_N)
        ctx.head = head
        ctx.mark_non_differentiable(entropy_N)
        return chosen_N - norm_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, scale_N, norm_N = ctx.saved_tensors
        # Used up by the first backward; another one computes it again.
        (kept, top), ctx.kept = ctx.kept, (None, None)
        head: _Head = ctx.head
        wide, count = _accumulate(hidden_NH), len(targets_N)
        slope_N = grad_N * scale_N
        grad_hidden = hidden_NH.new_zeros(hidden_NH.shape, dtype=wide) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight_VH) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        for block in reversed(head.columns(count, weight_VH)):
            weight, bias = _ready(hidden_NH, weight_VH[block]), None if bias_V is None else bias_V[block]
            widened = weight.to(wide)
            into_weight = widened.new_zeros(widened.shape) if grad_weight is not None else None
            into_bias = widened.new_zeros(len(widened)) if grad_bias is not None else None
            for rows in reversed(head.rows(count)):
                inside, at = _inside(targets_N[rows], block)
                capped = None
                # d logp / d s = onehot - p, and s = logits / temperature.
                if kept is not None:
                    delta = kept.mul_((-slope_N[rows] * (top - norm_N[rows]).exp())[:, None])
                    kept = None
                else:
                    logits = head.logits(hidden_NH[rows], weight, bias)
                    capped = logits.clone() if head.soft_cap is not None else None
                    delta = logits.mul_(scale_N[rows, None]).sub_(norm_N[rows, None]).exp_().mul_(-slope_N[rows, None])
                delta.scatter_add_(1, at[:, None], (slope_N[rows] * inside)[:, None])
                head.slope_(delta, capped)
                if grad_hidden is not None:
                    grad_hidden[rows] += delta @ widened
                if into_weight is not None:
                    into_weight.addmm_(delta.t(), hidden_NH[rows].to(wide))
                if into_bias is not None:
                    into_bias += delta.sum(dim=0)
            if grad_weight is not None and into_weight is not None:
                grad_weight[block] = into_weight
            if grad_bias is not None and into_bias is not None:
                grad_bias[block] = into_bias
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


def _ready(hidden: Tensor, weight: Tensor) -> Tensor:
    """A block of the weight as `_product` wants it, widened once for all chunks of rows."""
    return (
        weight if hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16 else weight.to(_accumulate(hidden))
    )


def _inside(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in a block of the vocabulary, and their places in it (0 for the others)."""
    inside = (targets >= block.start) & (targets < block.stop)
    return inside, (targets - block.start) * inside
