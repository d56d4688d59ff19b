"""A causal language model from a local folder, with its weights or without. Knows nothing of routes or sampling.

Never talks to a hub and never unpickles: the path must be a folder with config.json and safetensors.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from asyncrl.errors import ConfigError
from asyncrl.models.describe import describe, read_config
from asyncrl.models.families import attention_of
from asyncrl.models.folder import weights_of
from asyncrl.models.names import some

log = logging.getLogger(__name__)

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
    chosen = _arguments(path, dtype, attention, experts)
    weights_of(path)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, use_safetensors=True, **chosen)
    except (OSError, ValueError, ImportError, RuntimeError) as exc:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {exc}") from exc
    _check(path, info)
    loaded: PreTrainedModel = _settled(model, dtype).to(device)
    return loaded


def skeleton(
    path: str | Path,
    dtype: str,
    attention: str = "sdpa",
    experts: str = "grouped_mm",
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The model at path as `load_model` gives it, but all that the folder stores is on meta: no memory, no values.

    What is in no checkpoint (rope frequencies) is real, on device. transformers' own loader runs, over the shapes of
    the stored tensors in place of their values, so that names, dtypes, ties and complaints are those of a real load.
    asyncrl.models.fill brings the weights. Errors of load_model.
    """
    chosen = _arguments(path, dtype, attention, experts)
    shapes = {name: _Shape(stored.shape, getattr(torch, stored.dtype)) for name, stored in weights_of(path).items()}
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(config)
        model, info = type(shell).from_pretrained(None, config=shell.config, state_dict=shapes, **chosen)
    except (OSError, ValueError, ImportError, RuntimeError) as exc:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {exc}") from exc
    _check(path, info)
    if info["unexpected_keys"]:
        log.warning(
            "model.path=%s holds weights that the model does not use: %s", path, some(sorted(info["unexpected_keys"]))
        )
    model.config.name_or_path = str(path)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    return _settled(model, dtype)


class _Shape:
    """A stored tensor without its values, as much of one as transformers' loader asks for."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __getitem__(self, _: Any) -> _Shape:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor on meta, wherever it should go."""
        return torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")


def _arguments(path: str | Path, dtype: str, attention: str, experts: str) -> dict[str, Any]:
    """What both loaders pass to from_pretrained."""
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    # Roles write logs, where a bar is noise.
    disable_progress_bar()
    # Reads config.json, so a folder that is none is refused here; dense families refuse the experts argument.
    chosen = {"experts_implementation": experts} if describe(path).is_moe else {}
    # Mismatches are in the report, by name: transformers' own error has none.
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    attention = attention_of(str(read_config(Path(path)).get("model_type")), attention)
    return {"dtype": DTYPES[dtype], "attn_implementation": attention, **reported, **chosen}


def _settled(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """Eval mode, use_cache off, and no parameter of less precision than a float64 model should have.

    Some families pin their routers to float32, whatever dtype is asked for; FSDP2 wants one dtype in a unit.
    """
    model.config.use_cache = False
    if dtype == "float64":
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    settled: PreTrainedModel = model.eval()
    return settled


def _check(path: str | Path, info: dict[str, Any]) -> None:
    """Raise what transformers would fill at random: missing weights and those of another shape."""
    wrong = [f"{name} {tuple(stored)} for {tuple(needed)}" for name, stored, needed in info["mismatched_keys"]]
    faults = {"lacks weights": info["missing_keys"], "has weights of another shape than config.json says": wrong}
    texts = [f"{fault}: {some(sorted(names))}" for fault, names in faults.items() if names]
    if texts:
        raise ConfigError(f"model.path {str(path)!r} {'; it '.join(texts)}")
