"""Publishing versions and exporting the policy; both walk the same stream of HF-named tensors."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.learner.shard import Policy, World
from asyncrl.learner.table import all_max
from asyncrl.models.names import stream
from asyncrl.types import Version
from asyncrl.weights.shm import Publisher

log = logging.getLogger(__name__)


def host_copy(policy: Policy, world: World) -> dict[str, Tensor]:
    """Whole weights by HF name on rank 0, nothing elsewhere. A collective: all ranks walk it."""
    out: dict[str, Tensor] = {}
    for name, tensor in stream(policy.model):
        if world.is_writer:
            out[name] = tensor
    return out


def publish(policy: Policy, publisher: Publisher | None, version: Version, world: World) -> str | None:
    """Publish on rank 0; returns the source there ("" elsewhere), None on every rank if it failed."""
    weights = host_copy(policy, world)
    source, failed = "", 0.0
    if publisher is not None:
        try:
            source = publisher.publish(version, iter(weights.items()))
        except WeightSyncError as exc:
            # Retried by the loop; the run ends when generators would fall behind max_lag.
            log.error("version %s was not published: %s", version, exc)
            failed = 1.0
    return None if all_max([failed], world)[0] else source


def export(policy: Policy, model_path: str, directory: Path, world: World) -> None:
    """Write the policy as an HF folder: safetensors plus config and tokenizer of the start model."""
    weights = host_copy(policy, world)
    if not world.is_writer:
        return
    broken = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
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
