"""What SGLang servers get of the learner's tensors: tied models with their output matrix, FP8 where asked for.

Works on the stream of (name, tensor) that a publisher gets, one tensor at a time. Knows no carrier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.models.tied import EMBEDDING, HEAD
from asyncrl.weights.fp8 import BLOCK, quantise

Weights = Iterable[tuple[str, Tensor]]
Quantize = Literal["none", "fp8_block"]

SCALE = "_scale_inv"
"""What the name of a scale has after the name of its weight."""

_LINEAR = re.compile(r".*(_proj|_proj_with_mqa|\.experts\.\d+\.w[123])\.weight")
"""Linear layers of attention, dense layers and experts. Not: embeddings, output matrix, norms, routers."""


def for_sglang(
    weights: Weights, config_json: Mapping[str, Any], quantize: Quantize = "none"
) -> Iterator[tuple[str, Tensor]]:
    """The stream with what servers need besides, in the same order, lm_head.weight last.

    config_json: of the model folder that the servers start from. A tied model without lm_head.weight gets the
    embeddings under that name: SGLang does not tie every family, and then samples from zeros. With fp8_block every
    linear weight [N, K] becomes float8_e4m3fn and is followed by <name>_scale_inv float32, but for modules that
    config_json excludes (modules_to_not_convert). ConfigError for a folder that wants another kind of FP8;
    WeightSyncError for weights that cannot be quantised, or a tied model without embeddings.
    """
    convert = _converted(config_json) if quantize == "fp8_block" else None
    return _stream(weights, config_json.get("tie_word_embeddings") is True, convert)


def _stream(weights: Weights, tied: bool, convert: Callable[[str], bool] | None) -> Iterator[tuple[str, Tensor]]:
    embedding: Tensor | None = None
    for name, tensor in weights:
        if name == HEAD:
            tied = False
        elif name == EMBEDDING:
            embedding = tensor
        if convert is None or not convert(name):
            yield name, tensor
            continue
        try:
            data, scale_inv = quantise(tensor)
        except WeightSyncError as exc:
            raise WeightSyncError(f"{name}: {exc}") from exc
        yield name, data
        yield name + SCALE, scale_inv
    if tied and embedding is None:
        raise WeightSyncError(f"the model is tied, but its weights have no {EMBEDDING} to send as {HEAD}")
    if tied and embedding is not None:
        yield HEAD, embedding


def _converted(config_json: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a tensor is sent as FP8, by the folder's quantization_config."""
    settings = config_json.get("quantization_config")
    wanted = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    found = {key: settings.get(key) for key in wanted} if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping) or found != wanted:
        raise ConfigError(
            f"weights.quantize=fp8_block needs servers that start from such a checkpoint: config.json has "
            f"quantization_config {found or settings!r}, expected {wanted}; set generator.model to the model's FP8 "
            "folder, or weights.quantize=none"
        )
    kept = [_bare(module) for module in settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()]

    def convert(name: str) -> bool:
        module = _bare(name.removesuffix(".weight"))
        return _LINEAR.fullmatch(name) is not None and not any(_is_under(module, other) for other in kept)

    return convert


def _bare(module: str) -> str:
    return module.removeprefix("model.")


def _is_under(module: str, other: str) -> bool:
    return module == other or module.startswith(other + ".") or f".{other}." in f".{module}."
