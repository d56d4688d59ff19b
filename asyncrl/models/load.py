"""Load a causal language model from a local folder. Knows nothing of routes, sharding or sampling.

Never talks to a hub: the path must be a folder with config.json and safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from asyncrl.errors import ConfigError
from asyncrl.models.describe import describe

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def load_model(
    path: str | Path,
    dtype: str,
    attention: Literal["sdpa", "eager"] | str = "sdpa",
    experts: Literal["eager", "grouped_mm"] | str = "grouped_mm",
    device: str = "cpu",
) -> PreTrainedModel:
    """The model at path with its weights, in eval mode, use_cache off, on device.

    dtype: one of DTYPES. Raises ConfigError naming the path or the dtype when either is unusable,
    and when a weight of the checkpoint is missing (transformers would fill it at random).
    """
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    # Roles write logs, where a bar is noise.
    disable_progress_bar()
    # Reads config.json, so a folder that is none is refused here; dense families refuse the experts argument.
    chosen = {"experts_implementation": experts} if describe(path).is_moe else {}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
            **chosen,
        )
    except (OSError, ValueError, ImportError) as exc:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {exc}") from exc
    if info["missing_keys"]:
        raise ConfigError(f"model.path {str(path)!r} lacks weights: {sorted(info['missing_keys'])[:5]}")
    model.config.use_cache = False
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded
