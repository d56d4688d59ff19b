"""A static KV cache with ragged rows, and attention over it. Knows no weights, no tokens and no request.

The keys are kept transposed: scores are then row times matrix, 3x faster on a CPU than against rows of keys.
Every row has its own length; positions that a row has not written are masked.

Axes: R rows, A running rows, G kv heads, Q query heads per kv head, D head dim, C positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.engines.decoder import Prompts, continued


class KvCache:
    """Keys [R, G, D, C] and values [R, G, C, D] of every layer; C grows with `reserve`."""

    def __init__(
        self, layers: int, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = 0
        self._shape = (layers, rows, kv_heads)
        self._head_dim = head_dim
        self._dtype = dtype
        self._softmax_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._device = device
        self._keys = self._zeros(head_dim, 0)
        self._values = self._zeros(0, head_dim)

    def _zeros(self, *matrix: int) -> Tensor:
        # Zeros and not empty: a masked position has weight 0, and 0 * NaN is NaN.
        return torch.zeros((*self._shape, *matrix), dtype=self._dtype, device=self._device)

    def reserve(self, length: int) -> bool:
        """Hold at least `length` positions per row; True when it grew. What was written stays."""
        if length <= self.capacity:
            return False
        # Odd multiples of 16: strides that are powers of two would map all rows to the same cache sets.
        capacity = 16 * (-(-length // 16) | 1)
        keys, values = self._zeros(self._head_dim, capacity), self._zeros(capacity, self._head_dim)
        keys[..., : self.capacity] = self._keys
        values[..., : self.capacity, :] = self._values
        self._keys, self._values, self.capacity = keys, values, capacity
        layers, rows, heads = self._shape
        self._key_matrices = keys.view(layers, rows * heads, self._head_dim, capacity).unbind(0)
        self._value_matrices = values.view(layers, rows * heads, capacity, self._head_dim).unbind(0)
        self._key_numbers = [part.view(-1) for part in self._key_matrices]
        self._value_lines = [part.view(-1, self._head_dim) for part in self._value_matrices]
        self._key_base = torch.arange(rows * heads * self._head_dim, device=self._device).view(rows, -1) * capacity
        self._value_base = torch.arange(rows * heads, device=self._device).view(rows, -1) * capacity
        self._columns = torch.arange(capacity, device=self._device)
        self._zero, self._hidden = keys.new_zeros(()), keys.new_full((), float("-inf"))
        return True

    def begin(self, positions_A: Tensor, length: int) -> None:
        """The next writes and attention are for these positions (all < length) of rows [0, A)."""
        rows, wide = len(positions_A), positions_A[:, None]
        self._length = length
        self._bias = torch.where(self._columns[:length] > wide, self._hidden, self._zero)[:, None]
        self._key_index = (self._key_base[:rows] + wide).view(-1)
        self._value_index = (self._value_base[:rows] + wide).view(-1)

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write one key and value per row [A * G, D], attend with q [A * G, Q, D]: [A, G * Q * D]."""
        matrices, rows = len(q), len(self._bias)
        self._key_numbers[layer].index_copy_(0, self._key_index, k.reshape(-1))
        self._value_lines[layer].index_copy_(0, self._value_index, v)
        scores = torch.bmm(q, self._key_matrices[layer][:matrices, :, : self._length])
        scores.view(rows, -1, self._length).add_(self._bias)
        weights = torch.softmax(scores, dim=-1, dtype=self._softmax_dtype).to(q.dtype)
        return torch.bmm(weights, self._value_matrices[layer][:matrices, : self._length]).view(rows, -1)

    def prefill(self, layer: int, first: int, prompts: Prompts, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Causal attention inside the prompts; their keys and values also go to rows first... As `step`, A = P * S.

        Pad positions come last, so no token attends to them; the cached ones are overwritten before they are seen.
        """
        (count, padded), groups = prompts.tokens_PS.shape, self._shape[2]
        q = qkv[0].reshape(count, padded, -1, self._head_dim).transpose(1, 2)
        k, v = (part.reshape(count, padded, groups, self._head_dim).transpose(1, 2) for part in qkv[1:])
        rows = slice(first, first + len(prompts.source_N))
        self._keys[layer, rows, ..., :padded] = k.transpose(2, 3)[prompts.source_N]
        self._values[layer, rows, :, :padded] = v[prompts.source_N]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(count * padded, -1)

    def begin_extend(self, first: int, prompts: Prompts) -> Tensor:
        """The next `extend` puts prompts after what rows first... hold. Returns their positions [P, S].

        Pads are not written: they could lie beyond the capacity.
        """
        assert prompts.starts_P is not None
        self._seen, positions_PS, real_PS = continued(prompts)
        at = real_PS.nonzero()
        self._real, self._row_n, self._position_n = real_PS, first + at[:, 0], positions_PS[real_PS]
        self._rows = slice(first, first + len(prompts.starts_P))
        self._mask = (self._columns[: self._seen] <= positions_PS[..., None])[:, None]
        return positions_PS

    def extend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Causal attention of the new tokens to what their rows hold and to each other. As `step`, A = P * S."""
        (count, padded), groups = self._real.shape, self._shape[2]
        k, v = (part.reshape(count, padded, groups, self._head_dim)[self._real] for part in qkv[1:])
        keys, values = self._keys[layer], self._values[layer]
        keys[self._row_n, :, :, self._position_n] = k
        values[self._row_n, :, self._position_n] = v
        q = qkv[0].reshape(count, padded, -1, self._head_dim).transpose(1, 2)
        keys = keys[self._rows, ..., : self._seen].transpose(2, 3).contiguous()
        values = values[self._rows, :, : self._seen]
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask, scale=1.0, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(count * padded, -1)

    def save(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies of a row's first `length` keys [L, G, D, length] and values [L, G, length, D], L layers."""
        return self._keys[:, row, ..., :length].clone(), self._values[:, row, :, :length].clone()

    def restore(self, row: int, saved: tuple[Tensor, Tensor]) -> None:
        """Write what was saved to the beginning of a row."""
        keys, values = saved
        self._keys[:, row, ..., : keys.shape[-1]] = keys
        self._values[:, row, :, : values.shape[2]] = values

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of rows source to rows target."""
        self._keys[:, target, ..., :length] = self._keys[:, source, ..., :length]
        self._values[:, target, :, :length] = self._values[:, source, :, :length]

    def clear(self, first: int) -> None:
        """Zero rows first and above."""
        self._keys[:, first:].zero_()
        self._values[:, first:].zero_()
