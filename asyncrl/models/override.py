"""The part of the route hook that stands inside a router's forward.

Knows one router call at a time: which pass it belongs to, what is forced, what came out.
Axes: N rows of the router's input, E experts, K chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asyncrl.errors import RouteError
from asyncrl.models.router_scores import log_scores

if TYPE_CHECKING:
    from asyncrl.models.routes import RouteHook

_TOPK = (torch.topk, Tensor.topk)
_MASKED_FILL = (torch.masked_fill, Tensor.masked_fill)


def in_backward() -> bool:
    """True while autograd runs, which for a module's forward means recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class RoutePass:
    """The routes of one model forward: forced int16 [L, N, K] or None; native and used per layer.

    reads_scores: record log-scores too, of the experts in watched integers [L, B, S, K], or of the used ones. It
    outlives the context that made it, because a recomputation in backward reads `used`.
    """

    __slots__ = (
        "checkpointed", "entered", "forced", "forced_rows", "native", "reads_scores", "rerun", "scores", "shape",
        "used", "watched",
    )  # fmt: skip

    def __init__(
        self,
        layers: int,
        shape: tuple[int, int] | None,
        forced_LNK: Tensor | None = None,
        reads_scores: bool = False,
        watched_LBSK: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.forced = forced_LNK
        self.reads_scores = reads_scores
        self.watched = watched_LBSK
        self.scores: list[Tensor | None] = [None] * layers
        self.native: list[Tensor | None] = [None] * layers
        self.used: list[Tensor | None] = [None] * layers
        self.forced_rows: list[Tensor | None] = [None] * layers
        self.checkpointed = False
        self.rerun = False
        # True for the pass of one model forward, in which a router runs once.
        self.entered = False

    def fresh(self, shape: tuple[int, int]) -> RoutePass:
        """An empty pass with the same forced routes, for an input of shape (B, S)."""
        if self.forced is not None and shape != self.shape:
            raise RouteError(f"routes are for a batch of {self.shape}, the model's input is {shape}")
        if self.watched is not None and shape != (watched := tuple(self.watched.shape[1:3])):
            raise RouteError(f"watched experts are for a batch of {watched}, the model's input is {shape}")
        one = RoutePass(len(self.native), shape, self.forced, self.reads_scores, self.watched)
        one.entered = True
        return one

    def recomputing(self) -> RoutePass:
        """A view that forces what this pass used and records nothing."""
        again = RoutePass(len(self.native), self.shape)
        again.used, again.rerun, again.checkpointed = self.used, True, True
        return again

    @property
    def forced_fraction(self) -> float:
        """Forced rows / routed rows over the layers; 0.0 when nothing was forced."""
        counts = [rows for rows in self.forced_rows if rows is not None]
        routed = sum(plane.shape[0] for plane in self.native if plane is not None)
        return int(torch.stack(counts).sum()) / routed if counts and routed else 0.0


class RoutedForward:
    """Stands in for a router's forward; free when no pass is active.

    A class and not a closure, so that a deep copy of the model gets a copy that points into itself.
    """

    __slots__ = ("hook", "index", "inner", "num_experts", "position", "router", "top_k")

    def __init__(self, hook: RouteHook, router: nn.Module, index: int) -> None:
        self.hook = hook
        self.router = router
        self.inner = router.forward
        self.index = index
        self.num_experts = hook.num_experts
        self.top_k = hook.top_k
        # Where the router's output tuple holds the chosen ids; learned at the first recorded call.
        self.position: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router's own forward, recorded or overridden if a pass is active."""
        state = self.hook.current_pass()
        if state is None:
            return self.inner(*args, **kwargs)
        if state.entered and state.native[self.index] is not None:
            raise RouteError(f"{type(self.router).__name__}: ran twice in one forward, so a layer has several routes")
        if state.forced is not None and not state.checkpointed and torch.is_grad_enabled():
            self.hook.forced_for_backward = True
        if state.forced is None and not state.checkpointed and self.position is not None:
            output = self.inner(*args, **kwargs)
            chosen = output[self.position]
            state.native[self.index] = state.used[self.index] = chosen.detach()
        else:
            output = self._overridden(state, args, kwargs)
        if state.reads_scores:
            state.scores[self.index] = self._log_scores(state, output)
        return output

    def _overridden(self, state: RoutePass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = _AnswerTopK(self.num_experts, self.top_k, self._forced(state), state)
        with mode:
            output = self.inner(*args, **kwargs)
        if mode.native is None or mode.used is None:
            raise RouteError(
                f"{type(self.router).__name__}: its forward made no top-{self.top_k} of E={self.num_experts}"
            )
        if state.rerun:
            return output
        state.native[self.index] = self._small(mode.native)
        state.used[self.index] = state.native[self.index] if mode.used is mode.native else self._small(mode.used)
        state.forced_rows[self.index] = mode.forced_rows
        if self.position is None and isinstance(output, tuple):
            self.position = next((i for i, part in enumerate(output) if part is mode.used), None)
        return output

    def _log_scores(self, state: RoutePass, output: Any) -> Tensor:
        """Log-scores float32 [N, K] of the watched experts, or of the used ones."""
        ids_NK = state.used[self.index] if state.watched is None else state.watched[self.index].flatten(0, 1)
        logits_NE = output[0] if isinstance(output, tuple) else None
        if ids_NK is None or not isinstance(logits_NE, Tensor) or logits_NE.shape != (len(ids_NK), self.num_experts):
            raise RouteError(
                f"{type(self.router).__name__}: its first output is not [rows, E={self.num_experts}] for the experts "
                "that are asked for, so its scores cannot be read"
            )
        return log_scores(logits_NE, self.hook.scores_kind).gather(-1, ids_NK.long())

    def _forced(self, state: RoutePass) -> Tensor | None:
        if state.rerun:
            used = state.used[self.index]
            if used is None:
                raise RouteError(f"layer index {self.index} is recomputed but its forward recorded no routes")
            return used.long()
        return None if state.forced is None else state.forced[self.index].long()

    @staticmethod
    def _small(ids: Tensor) -> Tensor:
        # Kept until backward: int16 holds any expert id in a quarter of the bytes.
        return ids.detach().to(torch.int16)


class _AnswerTopK(TorchFunctionMode):
    """Answers the top-K over [N, E] of one router call; every other function passes through."""

    def __init__(self, num_experts: int, top_k: int, forced_NK: Tensor | None, state: RoutePass) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.forced = forced_NK
        # A checkpointed forward and its recomputation must save the same tensors, so both gather.
        self.gathers = state.checkpointed or forced_NK is not None
        self.settled = state.rerun
        self.native: Tensor | None = None
        self.used: Tensor | None = None
        self.forced_rows: Tensor | None = None
        self.unmasked: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MASKED_FILL and self.gathers and self._is_scores(args[0]):
            masked = func(*args, **kwargs)
            self.unmasked = (masked, args[0])
            return masked
        if func in _TOPK and self._is_scores(_argument(args, kwargs, 0, "input")) and self._is_final(args, kwargs):
            return self._answer(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_scores(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() == 2 and value.shape[-1] == self.num_experts

    def _is_final(self, args: Any, kwargs: Any) -> bool:
        # The top-k over groups that some families do first has another k or another width.
        return bool(_argument(args, kwargs, 1, "k") == self.top_k)

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.gathers:
            result = func(*args, **kwargs)
            self.native = self.used = result[1]
            return result
        scores_NE: Tensor = _argument(args, kwargs, 0, "input")
        native_NK, used_NK = self._choose(func, scores_NE, args, kwargs)
        self.native, self.used = native_NK, used_NK
        values_NK = self._open_groups(scores_NE).gather(-1, used_NK)
        return torch.return_types.topk((values_NK, used_NK))

    def _choose(self, func: Any, scores_NE: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.settled and self.forced is not None:
            return self.forced, self.forced
        rest = {name: value for name, value in kwargs.items() if name != "input"}
        native_NK: Tensor = func(scores_NE.detach(), *args[1:], **rest)[1]
        return native_NK, native_NK if self.forced is None else self._merge(self.forced, native_NK)

    def _merge(self, forced_NK: Tensor, native_NK: Tensor) -> Tensor:
        if forced_NK.shape != native_NK.shape:
            raise RouteError(f"routes have {tuple(forced_NK.shape)} rows and ids, the router {tuple(native_NK.shape)}")
        self.forced_rows = (forced_NK[:, 0] >= 0).sum()
        return torch.where(forced_NK >= 0, forced_NK, native_NK)

    def _open_groups(self, scores_NE: Tensor) -> Tensor:
        """Scores without the group mask in forced rows: a forced expert may lie outside the native groups."""
        if self.unmasked is None or self.unmasked[0] is not scores_NE:
            return scores_NE
        rows_N1 = scores_NE.new_zeros(len(scores_NE), 1, dtype=torch.bool)
        if self.forced is not None:
            rows_N1 = self.forced[:, :1] >= 0
        return torch.where(rows_N1, self.unmasked[1], scores_NE)


def _argument(args: Any, kwargs: Any, position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)
