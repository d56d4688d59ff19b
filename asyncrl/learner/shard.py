"""The sharded policy: process group, FSDP2 units and the one forward that gives log-probs.

Knows nothing of rewards, filters or losses.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from asyncrl.learner.batch import MicroBatch
from asyncrl.models.load import load_model
from asyncrl.models.logprobs import token_logprobs
from asyncrl.models.routes import RouteHook, discover_routers


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place among the learner's processes."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_writer(self) -> bool:
        """Rank 0 alone writes metrics, weights and commits."""
        return self.rank == 0


def init_world(timeout_s: float) -> World:
    """Join the process group that torchrun described in the environment.

    Waits for the other ranks at most timeout_s; the same bound holds for every collective.
    """
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
    return World(dist.get_rank(), dist.get_world_size(), device)


class Policy(nn.Module):
    """A causal language model whose forward returns log-probs, entropy and native routes.

    The wrapper is the FSDP root, so that the output matrix is whole while log-probs are computed.
    """

    def __init__(self, model: Any, chunk: int, replay: bool) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.replay = replay
        self.hook = RouteHook(model) if discover_routers(model) else None

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs [B, S] at the predicting positions (0 elsewhere), entropy [B, S], routes.

        Native routes are int [L, B, S, K], or None for a dense model.
        """
        hidden_BSH = self._hidden(batch)
        mask_BS = batch.predict_mask
        weight_VH = self.model.get_output_embeddings().weight
        temperature_N = batch.temperature[:, None].expand_as(mask_BS)[mask_BS]
        picked_NH = hidden_BSH[mask_BS]
        logp_N, entropy_N = token_logprobs(picked_NH, weight_VH, batch.targets[mask_BS], temperature_N, self.chunk)
        logp_BS = logp_N.new_zeros(mask_BS.shape).masked_scatter(mask_BS, logp_N)
        entropy_BS = entropy_N.new_zeros(mask_BS.shape).masked_scatter(mask_BS, entropy_N)
        if logp_BS.requires_grad or hidden_BSH.requires_grad:
            # Keeps every parameter in the graph when no token counts, so that ranks stay in step.
            logp_BS = logp_BS + 0.0 * (hidden_BSH.sum() + weight_VH.sum()).to(logp_BS.dtype)
        return logp_BS, entropy_BS, self.hook.native if self.hook is not None else None

    def _hidden(self, batch: MicroBatch) -> Tensor:
        if self.hook is None:
            capture: Any = nullcontext()
        elif self.replay and batch.routes is not None:
            capture = self.hook.replay(batch.routes)
        else:
            capture = self.hook.record()
        with capture:
            out = self.model.base_model(input_ids=batch.input_ids, use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return hidden


def reshard(policy: Policy) -> None:
    """Back to sharded parameters after forwards that no backward followed (which would do it)."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def build_policy(
    path: str,
    dtype: str,
    attention: str,
    experts: str,
    chunk: int,
    replay: bool,
    world: World,
) -> Policy:
    """Load, wrap and shard the policy over all ranks: one FSDP unit per decoder layer and a root.

    bfloat16 computes in bf16 with fp32 sharded parameters (the optimizer's masters).
    """
    stored = "float64" if dtype == "float64" else "float32"
    model = load_model(path, stored, attention=attention, experts=experts, device=str(world.device))
    policy = Policy(model, chunk, replay)
    mesh = init_device_mesh(world.device.type, (world.size,))
    mixed = dtype == "bfloat16"
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy
