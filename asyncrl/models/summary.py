"""What `asyncrl config` says about a model folder: read from config.json alone, without torch and without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.models.describe import describe, max_length, read_config, text_config
from asyncrl.models.families import FORMULAS, family_of

_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
_ALWAYS_SHARED = {"hunyuan_v1_moe": 1}
"""Families that have shared experts whatever their config says."""


def summary(path: str | Path) -> dict[str, str]:
    """Field -> what was discovered about the model folder at path, in the order to print.

    Raises ConfigError for an unusable folder, and for an MoE family that is not served with the reason.
    """
    info, config = describe(path), read_config(Path(path))
    text = text_config(config)
    model_type = str(config.get("model_type", "unknown"))
    lines = {"model type": model_type}
    if not info.is_moe:
        lines["routes"] = "none (dense model): algorithm.routes=r3 and r2, rspo and algorithm.rdc are refused"
    else:
        family = family_of(model_type)
        kind = family.formula(text)
        shared = shared_experts(text)
        lines |= {
            "MoE layers": f"{len(info.layers)} of {_layers(text, info.layers)}: {ranges(info.layers)}",
            "experts": f"{info.num_experts}, top-{info.top_k}, {shared or 'no'} shared",
            "weight formula": f"{kind}: {FORMULAS[kind]}",
            "packing": "allowed" if family.packing else "not allowed: rows with several responses give other numbers",
            "attention": "sdpa, eager" if family.sdpa else "eager",
        }
    lines["vocabulary"] = f"{info.vocab_size} tokens, at most {max_length(path)} of prompt and response"
    return lines


def shared_experts(text: Mapping[str, Any]) -> int:
    """Shared experts beside the routed ones of a layer, by the (text) config of a served model."""
    for key in _SHARED:
        if isinstance(text.get(key), int):
            return int(text[key])
    if any(isinstance(text.get(key), int) and text[key] > 0 for key in _SHARED_WIDTHS):
        return 1
    return _ALWAYS_SHARED.get(str(text.get("model_type")), 0)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: (0, 1, 2, 5) is "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _layers(text: Mapping[str, Any], layers: Sequence[int]) -> int:
    total = text.get("num_hidden_layers")
    return total if isinstance(total, int) else layers[-1] + 1
