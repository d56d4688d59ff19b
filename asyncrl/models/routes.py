"""Capture and replay of expert routes in any transformers MoE model: the one hook of the project.

A router's own forward runs under a TorchFunctionMode that answers only its final top-k, with
idx = where(forced >= 0, forced, native) and values = scores.gather(idx); the family's own
arithmetic around it stays untouched, and so do its gradients. Knows nothing of losses or drift.

Axes: L MoE layers in model order, B batch rows, S input positions, N = B * S, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.errors import RouteError
from asyncrl.models.discover import RouterInfo, discover_routers, input_module
from asyncrl.models.families import REFUSED
from asyncrl.models.override import RoutedForward, RoutePass, in_backward
from asyncrl.models.router_scores import ScoresKind, scores_kind

__all__ = ["RouteHook", "discover_routers"]


class RouteHook:
    """Records the native routes of a model and, on request, forces given ones (docs/models.md).

    layers: numbers of the MoE layers, ascending. num_layers: of all decoder layers. num_experts, top_k: E and
    K. routers: layer number -> router module, for decoders that call the modules themselves. duplicate_rows:
    replayed rows so far that named an expert twice and were native instead. Install before or after fully_shard.
    State lives on this object and on the routers: two models never share any. Raises RouteError when the model's
    family is refused, when it has no router, two in a layer, or routers that disagree about E or K; in a forward,
    when a router makes no top-k or runs twice.
    """

    def __init__(self, model: nn.Module) -> None:
        if _model_type(model) in REFUSED:
            raise RouteError(f"model type {_model_type(model)!r} {REFUSED[_model_type(model)]}")
        infos = discover_routers(model)
        if not infos:
            raise RouteError(f"model type {_model_type(model)!r} has no router (dense model or unknown family)")
        first = infos[0]
        for info in infos:
            if (info.num_experts, info.top_k) != (first.num_experts, first.top_k):
                raise RouteError(f"{info.name}: experts and top-k differ from those of {first.name}")
        self.layers: tuple[int, ...] = tuple(info.layer for info in infos)
        self.num_experts: int = first.num_experts
        self.top_k: int = first.top_k
        self.routers: dict[int, nn.Module] = {info.layer: info.module for info in infos}
        self.num_layers: int = _num_layers(model, self.layers)
        self.scores_kind: ScoresKind | None = scores_kind(_text_config(model))
        self.duplicate_rows: int = 0
        # Set by a router that replayed for a backward outside any checkpoint of ours.
        self.forced_for_backward: bool = False
        self._model = model
        self._open: RoutePass | None = None
        self._active: RoutePass | None = None
        self._last: RoutePass | None = None
        self._replaying: RoutePass | None = None
        self._install(model, infos)

    def _install(self, model: nn.Module, infos: tuple[RouterInfo, ...]) -> None:
        for index, info in enumerate(infos):
            info.module.forward = RoutedForward(self, info.module, index)
        input_module(model, infos).register_forward_pre_hook(self._before_model, with_kwargs=True)

    def current_pass(self) -> RoutePass | None:
        """What a router that runs now belongs to: a recomputed forward, else the open context."""
        if self._replaying is not None:
            return self._replaying
        if (self._active is not None or self.forced_for_backward) and in_backward():
            raise RouteError("activation checkpointing reran a router without its routes: use enable_checkpointing()")
        return self._active

    @contextmanager
    def record(
        self, shape: tuple[int, int] | None = None, scores: bool = False, watch: Tensor | None = None
    ) -> Iterator[RouteHook]:
        """Record native routes of the forwards inside; logits and gradients stay bitwise the same.

        shape (B, S) is only needed by callers that run the router modules without the model; without
        it such rows read as [L, N, 1, K]. scores: `scores` can be read afterwards, of the experts in watch, integers
        [L, B, S, K] that may repeat, or of those used. RouteError: a family whose scores are not known, watched
        experts of another shape or outside of [0, E).
        """
        watched_LBSK = self._watched(scores, watch)
        with self._activate(RoutePass(len(self.layers), shape, None, scores, watched_LBSK)):
            yield self

    @contextmanager
    def replay(self, routes: Tensor, scores: bool = False, watch: Tensor | None = None) -> Iterator[RouteHook]:
        """Force routes in the forwards inside, and record the native choice of the same forwards.

        routes: any integer dtype [L, B, S, K], or one plane per decoder layer instead of per MoE
        layer. A row with a -1 is native there; so is a row that names an expert twice, which is added
        to duplicate_rows. scores, watch: as in `record`. RouteError: wrong plane count or shape, an id < -1 or >= E.
        """
        watched_LBSK = self._watched(scores, watch)
        forced_LNK, shape, duplicates = self._check(routes)
        state = RoutePass(len(self.layers), shape, forced_LNK, scores, watched_LBSK)
        self.duplicate_rows += duplicates
        with self._activate(state):
            yield self

    @contextmanager
    def _activate(self, state: RoutePass) -> Iterator[None]:
        earlier = (self._open, self._active)
        self._open = self._active = self._last = state
        try:
            yield
        finally:
            self._open, self._active = earlier

    @property
    def active(self) -> bool:
        """True inside record() or replay()."""
        return self._active is not None

    @property
    def native(self) -> Tensor:
        """Native routes int64 [L, B, S, K] of the last forward; RouteError before there is one."""
        return self._stacked("native")

    @property
    def used(self) -> Tensor:
        """Routes int64 [L, B, S, K] that the last forward sent to the experts."""
        return self._stacked("used")

    @property
    def scores(self) -> Tensor:
        """Log-scores float32 [L, B, S, K] of the last forward, without a gradient: of the router's own scores of its
        experts (router_scores.py), before biases, group masks and renormalisation. RouteError if none were asked for.
        """
        return self._stacked("scores")

    @property
    def forced_fraction(self) -> float:
        """Rows the last forward forced / rows it routed, over all MoE layers; 0.0 for a recording."""
        return self._last.forced_fraction if self._last is not None else 0.0

    def _stacked(self, what: str) -> Tensor:
        state = self._last
        planes: list[Tensor | None] = [None] * len(self.layers) if state is None else getattr(state, what)
        missing = [n for plane, n in zip(planes, self.layers, strict=True) if plane is None]
        if state is None or missing:
            raise RouteError(f"no {what} of layers {missing}: run a forward inside record() or replay() first")
        stacked_LNK = torch.stack([plane for plane in planes if plane is not None])
        stacked_LNK = stacked_LNK if what == "scores" else stacked_LNK.long()
        rows = stacked_LNK.shape[1]
        batch, length = state.shape if state.shape is not None else (rows, 1)
        if batch * length != rows:
            raise RouteError(f"routers saw {rows} rows, the input has {batch} x {length}")
        return stacked_LNK.view(len(self.layers), batch, length, self.top_k)

    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give each forward its own pass, so that several may wait for their backward."""
        if self._open is None or self._replaying is not None:
            return
        batch, length = _input_shape(args, kwargs)
        fresh = self._open.fresh((batch, length))
        fresh.checkpointed = self._active is not None and self._active.checkpointed
        self._active = self._last = fresh

    def _watched(self, scores: bool, watch: Tensor | None) -> Tensor | None:
        """Watched experts int16 [L, B, S, K] on the model's device, or None."""
        if scores and self.scores_kind is None:
            raise RouteError(
                f"model type {_model_type(self._model)!r}: how its router scores experts is not known, so its scores "
                "cannot be read (asyncrl/models/families.py)"
            )
        if watch is None:
            return None
        if not scores:
            raise RouteError("experts are watched for their scores: ask for scores too")
        if watch.dim() != 4 or (len(watch), watch.shape[-1]) != (len(self.layers), self.top_k):
            raise RouteError(
                f"watched experts must be [L={len(self.layers)}, B, S, K={self.top_k}], got {tuple(watch.shape)}"
            )
        wide = self._whole(watch, "watched experts")
        if wide.numel() and (int(wide.min()) < 0 or int(wide.max()) >= self.num_experts):
            raise RouteError(f"watched experts span [{int(wide.min())}, {int(wide.max())}], E is {self.num_experts}")
        return wide.to(torch.int16)

    def _whole(self, ids: Tensor, what: str) -> Tensor:
        """Ids as int32 on the model's device; RouteError that says what when they are no integers."""
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise RouteError(f"{what} must be integers, got {ids.dtype}")
        # uint16 has no comparison kernels in torch and int64 is four times the bytes of int16.
        return ids.to(next(self._model.parameters()).device, torch.int32)

    def _check(self, routes: Tensor) -> tuple[Tensor, tuple[int, int], int]:
        """Validated routes int16 [L, N, K] with invalid rows set to -1, (B, S), duplicate rows."""
        routes = torch.as_tensor(routes)
        if routes.dim() != 4 or routes.shape[-1] != self.top_k:
            raise RouteError(f"routes must be [L, B, S, K={self.top_k}], got {tuple(routes.shape)}")
        wide = self._whole(routes, "routes")
        planes, batch, length = routes.shape[0], routes.shape[1], routes.shape[2]
        if planes == self.num_layers and planes != len(self.layers):
            wide = wide[list(self.layers)]
        elif planes != len(self.layers):
            raise RouteError(
                f"routes need {self.num_layers} planes (all layers) or {len(self.layers)} (MoE layers), got {planes}"
            )
        wide = wide.reshape(len(self.layers), -1, self.top_k)
        if wide.numel() and (int(wide.min()) < -1 or int(wide.max()) >= self.num_experts):
            raise RouteError(f"route ids span [{int(wide.min())}, {int(wide.max())}], E is {self.num_experts}")
        ordered = wide.sort(dim=-1).values
        whole_LN = ordered[..., 0] >= 0
        twice_LN = whole_LN & (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
        forced_LNK = wide.masked_fill(~(whole_LN & ~twice_LN)[..., None], -1).to(torch.int16)
        return forced_LNK, (batch, length), int(twice_LN.sum())

    def checkpoint_context_fn(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """context_fn of torch.utils.checkpoint: recompute uses the routes its forward used."""
        state = self._replaying if self._replaying is not None else self._active
        if state is None:
            return nullcontext(), nullcontext()
        held = [state]
        return self._checkpointed(held), self._recompute(held)

    @contextmanager
    def _checkpointed(self, held: list[RoutePass]) -> Iterator[None]:
        held[0].checkpointed = True
        try:
            yield
        finally:
            # A checkpoint around the whole model got its own pass only when the model was entered.
            if self._replaying is None and self._active is not None:
                held[0] = self._active

    @contextmanager
    def _recompute(self, held: list[RoutePass]) -> Iterator[None]:
        earlier = self._replaying
        self._replaying = held[0].recomputing()
        try:
            yield
        finally:
            self._replaying = earlier

    def enable_checkpointing(self) -> None:
        """Turn on transformers' activation checkpointing with routes that survive recomputation."""
        enable = getattr(self._model, "activation_checkpointing_enable", None) or getattr(
            self._model, "gradient_checkpointing_enable", None
        )
        if enable is None:
            raise RouteError(f"model type {_model_type(self._model)!r} has no activation checkpointing")
        enable({"use_reentrant": False, "context_fn": self.checkpoint_context_fn})


def _input_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args):
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value.shape[0], value.shape[1]
    raise RouteError("cannot read [B, S] from the model's input: pass input_ids or inputs_embeds")


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config


def _num_layers(model: nn.Module, layers: tuple[int, ...]) -> int:
    return max(int(getattr(_text_config(model), "num_hidden_layers", 0) or 0), layers[-1] + 1)
