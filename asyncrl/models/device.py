"""Which device a role computes on. Knows no model."""

from __future__ import annotations

import os
from typing import Literal

import torch

from asyncrl.errors import ConfigError


def pick_device(setting: Literal["auto", "cpu", "cuda"], key: str) -> torch.device:
    """The device that `key=setting` means in this process: auto is cuda where torch sees a GPU, else cpu.

    Under torchrun each rank takes the GPU of its LOCAL_RANK, any other process the first. Raises ConfigError when
    cuda is asked for and there is no such GPU.
    """
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cpu" or (setting == "auto" and not seen):
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= seen:
        need = f"GPU number {local} of this host" if seen else "a GPU"
        raise ConfigError(
            f"{key}={setting} needs {need}, but torch {torch.__version__} sees {seen}; set {key}=cpu, start at most "
            f"one rank per GPU, or install a torch build with CUDA and check `nvidia-smi`"
        )
    return torch.device("cuda", local)
