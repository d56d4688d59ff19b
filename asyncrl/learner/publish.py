"""The whole policy on the host, and as a folder; both walk the same stream of HF-named tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.learner.shard import Policy, World
from asyncrl.models.names import stream
from asyncrl.models.precision import float32_names
from asyncrl.models.write import FolderWriter, planned
from asyncrl.sections.policy import ModelSection

Cast = Callable[[str], torch.dtype | None]
"""What a live tensor, by its name in the state dict, is cast to; None leaves it."""


def published_dtype(policy: Policy, m: ModelSection) -> Cast:
    """The dtype in which each tensor is published: what the learner computes with.

    Under model.dtype=bfloat16 that is bfloat16, rounded from the float32 weights as each forward rounds them, but for
    what stays float32 on both sides. All else is published as it is held.
    """
    if m.dtype != "bfloat16":
        return lambda name: None
    wide = float32_names(policy.model, m.router_dtype)
    floating = {name for name, tensor in policy.model.state_dict().items() if tensor.is_floating_point()}
    return lambda name: torch.bfloat16 if name in floating and name not in wide else None


def host_copy(policy: Policy, world: World, dtype: Cast | None = None) -> dict[str, Tensor]:
    """Whole weights by HF name on rank 0, nothing elsewhere. A collective: all ranks walk it."""
    out: dict[str, Tensor] = {}
    for name, tensor in stream(policy.model, dtype):
        if world.is_writer:
            out[name] = tensor
    return out


def export(policy: Policy, model_path: str, directory: Path, world: World) -> None:
    """Write the policy as an HF folder: its weights as they are held, config and tokenizer of the start model.

    Rank 0 writes tensor by tensor and holds one at a time. A collective. WeightSyncError on rank 0 when a weight is
    not finite or the disk fails; an older folder of that name then stays.
    """
    writing = _Writing(policy, directory) if world.is_writer else None
    for name, tensor in stream(policy.model):
        if writing is not None:
            writing.add(name, tensor)
    if writing is not None:
        writing.finish(Path(model_path))


class _Writing:
    """Rank 0's side of an export. What goes wrong is raised at the end: the other ranks walk to there."""

    def __init__(self, policy: Policy, directory: Path) -> None:
        self._directory = directory
        self._dtype = str(next(policy.parameters()).dtype).removeprefix("torch.")
        self._writer: FolderWriter | None = None
        self._why: Exception | None = None
        try:
            self._writer = FolderWriter(directory, planned(policy.model))
        except OSError as exc:
            self._why = exc

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, unless something went wrong before."""
        if self._writer is None or self._why is not None:
            return
        try:
            self._writer.add(name, tensor)
        except (OSError, WeightSyncError) as exc:
            self._why = exc

    def finish(self, start: Path) -> None:
        """Give the folder its name, or raise WeightSyncError with what went wrong."""
        if self._writer is not None and self._why is None:
            try:
                self._writer.copy_rest(start, self._dtype)
                self._writer.finish()
            except (OSError, WeightSyncError) as exc:
                self._why = exc
        if self._why is not None:
            if self._writer is not None:
                self._writer.give_up()
            raise WeightSyncError(f"the policy is not exported to {self._directory}: {self._why}") from self._why
