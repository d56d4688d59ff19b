"""Log-probs of chosen tokens from hidden states, without ever holding [N, V].

Knows nothing of responses or masks: the caller picks the rows. Axes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import ConfigError


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor | float,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """(logp [N], entropy [N]) of softmax(hidden weight^T / temperature) at targets.

    logp is differentiable in hidden and weight, entropy (nats) carries no gradient. Both are float32,
    or float64 when hidden is; lower precision is multiplied in float32, because bfloat16 logits are off
    by up to 5e-2. At most chunk rows of logits exist at a time, in backward too, where they are computed
    again. weight must be whole (gathered by the caller). N = 0 works. Raises ConfigError when
    shapes or a temperature <= 0 make no sense.
    """
    if hidden_NH.dim() != 2 or weight_VH.dim() != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ConfigError(f"hidden {tuple(hidden_NH.shape)} and weight {tuple(weight_VH.shape)} do not multiply")
    if targets_N.shape != hidden_NH.shape[:1]:
        raise ConfigError(f"targets {tuple(targets_N.shape)} for {hidden_NH.shape[0]} rows")
    if not isinstance(temperature_N, Tensor):
        if not temperature_N > 0:
            raise ConfigError(f"temperature {temperature_N} must be above 0")
        temperature_N = hidden_NH.new_full(targets_N.shape, temperature_N, dtype=_accumulate(hidden_NH))
    if temperature_N.shape != targets_N.shape:
        raise ConfigError(f"temperature {tuple(temperature_N.shape)} for {targets_N.shape[0]} rows")
    if chunk < 1:
        raise ConfigError(f"chunk {chunk} must be at least 1")
    logp_N, entropy_N = _TokenLogprobs.apply(hidden_NH, weight_VH, targets_N.long(), temperature_N.detach(), chunk)
    return logp_N, entropy_N


def _accumulate(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _TokenLogprobs(torch.autograd.Function):
    """Forward and backward both walk the rows in chunks; only [N] vectors are kept between them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature_N: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = _accumulate(hidden_NH)
        weight = weight_VH.to(wide)
        scale_N = temperature_N.to(wide).reciprocal()
        norm_N = hidden_NH.new_empty(targets_N.shape, dtype=wide)
        logp_N, entropy_N = torch.empty_like(norm_N), torch.empty_like(norm_N)
        for start in range(0, len(targets_N), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden_NH[rows].to(wide), weight, scale_N[rows])
            norm_N[rows] = torch.logsumexp(logits, dim=-1)
            logp_N[rows] = logits.gather(1, targets_N[rows, None])[:, 0] - norm_N[rows]
            # H = log Z - sum p s; p is made in place of nothing else so that two chunks fit, not three.
            probs = (logits - norm_N[rows, None]).exp_()
            entropy_N[rows] = norm_N[rows] - torch.linalg.vecdot(probs, logits)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, scale_N, norm_N)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _entropy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_NH, weight_VH, targets_N, scale_N, norm_N = ctx.saved_tensors
        wide = _accumulate(hidden_NH)
        weight = weight_VH.to(wide)
        grad_hidden = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets_N), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            hidden = hidden_NH[rows].to(wide)
            # d logp / d s = onehot - p, and s = scale * hidden weight^T.
            slope_N = (grad_N[rows] * scale_N[rows])[:, None]
            delta = _logits(hidden, weight, scale_N[rows]).sub_(norm_N[rows, None]).exp_().mul_(-slope_N)
            delta.scatter_add_(1, targets_N[rows, None], slope_N)
            if grad_hidden is not None:
                grad_hidden[rows] = (delta @ weight).to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(delta.t(), hidden)
        return grad_hidden, grad_weight.to(weight_VH.dtype) if grad_weight is not None else None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (hidden @ weight.t()).mul_(scale[:, None])
