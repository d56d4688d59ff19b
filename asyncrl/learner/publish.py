"""The whole policy on the host, and as a folder; both walk the same stream of HF-named tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.learner.shard import Policy, World
from asyncrl.models.finite import is_finite
from asyncrl.models.names import stream


def host_copy(policy: Policy, world: World) -> dict[str, Tensor]:
    """Whole weights by HF name on rank 0, nothing elsewhere. A collective: all ranks walk it."""
    out: dict[str, Tensor] = {}
    for name, tensor in stream(policy.model):
        if world.is_writer:
            out[name] = tensor
    return out


def export(policy: Policy, model_path: str, directory: Path, world: World) -> None:
    """Write the policy as an HF folder: safetensors plus config and tokenizer of the start model."""
    weights = host_copy(policy, world)
    if not world.is_writer:
        return
    broken = [name for name, tensor in weights.items() if not is_finite(tensor)]
    if broken:
        raise WeightSyncError(f"the policy is not exported: {broken[0]} is not finite")
    from safetensors.torch import save_file

    aside = directory.with_name(directory.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in Path(model_path).iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy2(file, aside / file.name)
    save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(directory, ignore_errors=True)
    aside.rename(directory)
