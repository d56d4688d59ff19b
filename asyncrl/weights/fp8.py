"""FP8 with one scale per block of 128 x 128 weights, as checkpoints of the kind `fp8` with `weight_block_size` have it.

A weight w [N, K] is stored as float8_e4m3fn q [N, K] and float32 scale_inv [ceil(N / 128), ceil(K / 128)]: w is about
q * scale_inv of its block. scale_inv is the largest magnitude of the block over 448, the largest number of the format
(DeepSeek-V3 report, arXiv:2412.19437, section 3.3). Knows no names.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError

BLOCK = 128
"""Rows and columns under one scale."""
LARGEST = 448.0
"""Largest finite number of float8_e4m3fn."""


class Quantised(NamedTuple):
    """data float8_e4m3fn [N, K]; scale_inv float32 [ceil(N / 128), ceil(K / 128)]."""

    data: Tensor
    scale_inv: Tensor


def quantise(weight: Tensor) -> Quantised:
    """The weight [N, K], floating, finite, in FP8. A block of zeros gets scale 1.

    The error of an entry is at most 1/16 of its magnitude (half a step of 3 bits), or 2^-10 scale_inv where that is
    more. WeightSyncError for another rank or what is not finite.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise WeightSyncError(f"FP8 blocks need a matrix of floats, got {weight.dtype} of shape {tuple(weight.shape)}")
    wide = weight.detach().to(torch.float32)
    largest = _blocks(wide).abs().amax(dim=(1, 3))
    if not bool(torch.isfinite(largest).all()):
        raise WeightSyncError(f"weight {tuple(weight.shape)} has non-finite values, which FP8 cannot carry")
    scale = largest / LARGEST
    # The smallest numbers have no quotient by 448; so small a block is zero in FP8.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    # Rounding of the quotient may end above 448, which would become NaN.
    scaled = (wide / _spread(scale, wide.shape)).clamp(-LARGEST, LARGEST)
    return Quantised(scaled.to(torch.float8_e4m3fn), scale)


def dequantise(data: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What the pair stands for, [N, K], computed in float32 and rounded to dtype."""
    return (data.to(torch.float32) * _spread(scale_inv, data.shape)).to(dtype)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of a weight [N, K]."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def _blocks(wide: Tensor) -> Tensor:
    """[N / 128, 128, K / 128, 128], padded with zeros."""
    rows, columns = wide.shape
    padded = torch.nn.functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of every entry, [N, K]."""
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[: shape[0], : shape[1]]
