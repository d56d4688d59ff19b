"""The sharded policy: process group, FSDP2 units and the one forward that gives log-probs.

Knows nothing of rewards, filters or losses.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.layers import checkpoint_layers, compile_layers
from asyncrl.models.device import pick_device
from asyncrl.models.fill import fill_sharded, materialize
from asyncrl.models.head import decoder_layers, output_head
from asyncrl.models.load import skeleton
from asyncrl.models.logprobs import token_logprobs
from asyncrl.models.precision import float32_names, routers_in_float32
from asyncrl.models.routes import RouteHook, discover_routers
from asyncrl.sections.policy import ModelSection
from asyncrl.sections.training import LearnerSection

log = logging.getLogger(__name__)


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


def init_world(timeout_s: float, device: Literal["auto", "cpu", "cuda"] = "auto") -> World:
    """Join the process group that torchrun described in the environment; NCCL on GPUs, else gloo.

    Waits for the other ranks at most timeout_s; the same bound holds for every collective. device: as
    learner.device; raises ConfigError when it asks for a GPU that is not there.
    """
    chosen = pick_device(device, "learner.device")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    return World(dist.get_rank(), dist.get_world_size(), chosen)


class Policy(nn.Module):
    """A causal language model whose forward returns log-probs, entropy and native routes.

    The wrapper is the FSDP root, so that the output matrix is whole while log-probs are computed. Raises ConfigError
    for a family whose step from hidden states to logits is not known (models/head.py).
    """

    def __init__(self, model: Any, chunk: int, replay: bool) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.replay = replay
        self.head = output_head(model)
        self.hook = RouteHook(model) if discover_routers(model) else None

    def forward(self, batch: MicroBatch, scores: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs [B, S] at the predicting positions (0 elsewhere), entropy [B, S], routes.

        Native routes are int [L, B, S, K], or None for a dense model. scores: `hook.scores` can be read afterwards, of
        the experts in batch.watched, or of those used.
        """
        hidden_BSH = self._hidden(batch, scores)
        mask_BS = batch.predict_mask
        weight_VH, bias_V = self.head.tensors(self.model)
        temperature_N = batch.temperature[:, None].expand_as(mask_BS)[mask_BS]
        logp_N, entropy_N = token_logprobs(
            hidden_BSH[mask_BS], weight_VH, batch.targets[mask_BS], temperature_N, self.chunk,
            bias_V=bias_V, scale=self.head.scale, soft_cap=self.head.soft_cap,
        )  # fmt: skip
        logp_BS = logp_N.new_zeros(mask_BS.shape).masked_scatter(mask_BS, logp_N)
        entropy_BS = entropy_N.new_zeros(mask_BS.shape).masked_scatter(mask_BS, entropy_N)
        if logp_BS.requires_grad or hidden_BSH.requires_grad:
            # Keeps every parameter in the graph when no token counts, so that ranks stay in step.
            logp_BS = logp_BS + _nothing(hidden_BSH, weight_VH, bias_V).to(logp_BS.dtype)
        return logp_BS, entropy_BS, self.hook.native if self.hook is not None else None

    def _hidden(self, batch: MicroBatch, scores: bool) -> Tensor:
        watch = batch.watched if scores else None
        if self.hook is None:
            capture: Any = nullcontext()
        elif self.replay and batch.routes is not None:
            capture = self.hook.replay(batch.routes, scores=scores, watch=watch)
        else:
            capture = self.hook.record(scores=scores, watch=watch)
        with capture:
            out = self.model.base_model(input_ids=batch.input_ids, use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return hidden


def _nothing(*tensors: Tensor | None) -> Tensor:
    """0 that depends on one number of each tensor."""
    return sum((0.0 * t.reshape(-1)[:1].sum() for t in tensors if t is not None), torch.zeros(()))


def reshard(policy: Policy) -> None:
    """Back to sharded parameters after forwards that no backward followed (which would do it)."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def build_policy(m: ModelSection, s: LearnerSection, replay: bool, world: World) -> Policy:
    """Load, wrap and shard the policy over all ranks, compiled and checkpointed as the settings say.

    bfloat16 computes in bf16 with fp32 sharded parameters (the optimizer's masters) and reduces gradients in fp32.
    """
    stored = "float64" if m.dtype == "float64" else "float32"
    # No weights yet: each rank reads its own shard below, so that none ever holds the whole model.
    model = skeleton(m.path, stored, attention=m.attention, experts=m.experts, device=world.device)
    mixed = m.dtype == "bfloat16"
    if mixed and m.router_dtype == "float32":
        routers_in_float32(model)
    policy = Policy(model, s.logprob_chunk, replay)
    layers = decoder_layers(model)
    if s.compile:
        compile_layers(layers, policy.hook)
    if s.activation_checkpointing:
        checkpoint_layers(layers, policy.hook)
    _shard(policy, layers, float32_names(model, m.router_dtype) if mixed else None, world)
    materialize(policy, world.device)
    fill_sharded(model, m.path)
    return policy


def _shard(policy: Policy, layers: nn.ModuleList, wide: frozenset[str] | None, world: World) -> None:
    """One FSDP unit per decoder layer and a root; wide: names that stay float32 while all else is rounded to bf16.

    A module of a layer whose parameters all stay float32 (a router) becomes a unit of its own, because a unit has one
    dtype. Inputs are not rounded: an engine does not do it either.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    rounded = exact
    if wide is not None:
        rounded = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    own, left = _wide_modules(policy.model, layers, wide or frozenset())
    for module in own:
        fully_shard(module, mesh=mesh, mp_policy=exact)
    if left:
        log.warning(
            "model.dtype=bfloat16: the learner rounds %s to bfloat16, which an engine keeps in float32; where that "
            "matters, set model.dtype=float32", ", ".join(left),
        )  # fmt: skip
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=rounded)
    fully_shard(policy, mesh=mesh, mp_policy=rounded)


def _wide_modules(model: nn.Module, layers: nn.ModuleList, wide: frozenset[str]) -> tuple[list[nn.Module], list[str]]:
    """Modules inside the layers whose parameters all stay float32, and the names of such parameters outside of them."""
    names = {id(p): name for name, p in model.named_parameters()}
    left = {name for name in names.values() if name in wide}
    own: list[nn.Module] = []
    for layer in layers:
        for module in layer.modules():
            held = [names[id(p)] for p in module.parameters()]
            if held and left.issuperset(held):
                own.append(module)
                left.difference_update(held)
    return own, sorted(left)
