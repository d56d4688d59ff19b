"""What both sides must agree on about a model, read from its folder. Imports no torch.

Knows the config fields of the MoE families, not their modules: asyncrl.models.routes finds the same
layers in the live model, and a test holds the two together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.errors import ConfigError
from asyncrl.models.families import family_of
from asyncrl.types import ModelInfo

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "num_selected_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "experts_per_token",
)
_LENGTHS = ("max_position_embeddings", "n_positions")
MAX_LENGTH = 4096
"""Longest prompt and response of the embedded engine, whatever the model was made for."""

# Says how a model is run or was saved, not what it computes.
_NOT_ARCHITECTURE = {
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "experts_implementation",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "quantization_config",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def describe(path: str | Path) -> ModelInfo:
    """MoE layer numbers, E, K, vocabulary size and fingerprint of the model folder at path.

    A dense model has layers () and E = K = 0. The fingerprint is xxh3 of the canonical JSON of the
    architecture fields followed by the bytes of tokenizer.json. Raises ConfigError naming the file, or the model
    type of an MoE family that is not served.
    """
    folder = Path(path)
    config = read_config(folder)
    text = text_config(config)
    num_experts = _first(text, _EXPERTS)
    layers = _moe_layers(text) if num_experts > 0 else ()
    if layers and isinstance(config.get("model_type"), str):
        family_of(config["model_type"])
    top_k = _first(text, _TOP_K) if layers else 0
    if layers and not 0 < top_k <= num_experts:
        raise ConfigError(f"{folder / 'config.json'}: {num_experts} experts but top-k is {top_k}")
    # Some families pad the output matrix with rows that are no tokens.
    vocab_size = _first(text, ("unpadded_vocab_size", "vocab_size")) or _first(config, ("vocab_size",))
    if vocab_size <= 0:
        raise ConfigError(f"{folder / 'config.json'}: no vocab_size")
    return ModelInfo(layers, num_experts if layers else 0, top_k, vocab_size, _fingerprint(folder, config))


def max_length(path: str | Path, at_most: int | None = MAX_LENGTH) -> int:
    """Longest prompt + response in tokens: what the model folder at path was made for, and at_most.

    A folder that does not say counts as made for MAX_LENGTH. Raises ConfigError naming the file.
    """
    config = read_config(Path(path))
    inner = config.get("text_config")
    longest = _first(inner if isinstance(inner, dict) else {}, _LENGTHS) or _first(config, _LENGTHS)
    longest = longest if longest > 0 else MAX_LENGTH
    return longest if at_most is None else min(longest, at_most)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of the model folder. Raises ConfigError naming the folder."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path {str(folder)!r}: cannot read {file.name}: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the decoder of a multimodal model, else the whole."""
    if _first(config, _EXPERTS) > 0:
        return config
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return inner
    # dbrx keeps its sizes in parts; it is refused, but must not pass for dense.
    parts = config.get("ffn_config")
    return {**config, **parts} if isinstance(parts, dict) else config


def _first(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def _moe_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Numbers of the layers that route, by the rule whose fields the config has.

    An explicit list of layer kinds; a period with an offset (jamba); dense first layers (deepseek, glm); every n-th
    layer with exceptions (qwen); a range (ernie). Families without any such field route everywhere.
    """
    if config.get("enable_moe_block") is False or config.get("is_moe") is False:
        return ()
    total = _first(config, ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    for field in ("mlp_layer_types", "layers_block_type", "hybrid_override_pattern"):
        kinds = config.get(field)
        if isinstance(kinds, (list, str)):
            return tuple(i for i, kind in enumerate(kinds) if kind in ("sparse", "moe", "E"))
    if isinstance(config.get("expert_layer_period"), int):
        period, offset = config["expert_layer_period"], _first(config, ("expert_layer_offset",))
        return tuple(i for i in range(total) if i % period == offset)
    first = _first(config, ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"))
    last = config.get("moe_layer_end_index")
    end = last + 1 if isinstance(last, int) and last >= 0 else total
    step = max(1, _first(config, ("decoder_sparse_step", "moe_layer_interval")))
    every = config.get("moe_layer_freq")
    dense = set(config.get("mlp_only_layers") or ())

    def routes(i: int) -> bool:
        if isinstance(every, list):
            return bool(every[i])
        by_freq = not isinstance(every, int) or every <= 0 or i % every == 0
        return first <= i < end and by_freq and (i + 1) % step == 0 and i not in dense

    return tuple(i for i in range(total) if routes(i))


def _fingerprint(folder: Path, config: dict[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE}
    digest = xxhash.xxh3_64(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()
