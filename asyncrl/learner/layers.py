"""What happens around the forward of each decoder layer: compilation and activation checkpointing. Knows no ranks.

Both replace `layer.forward`, inside whatever hooks the layer has: sharding gathers a layer's weights once for its
backward, and the recomputation finds them. torch's checkpoint is used in place of that of transformers, which works
in training mode only, where some routers draw random numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncrl.models.routes import RouteHook

Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


def compile_layers(layers: nn.ModuleList, hook: RouteHook | None, backend: str = "inductor") -> None:
    """torch.compile each layer for any batch and length. Routers run outside: capture and replay are Python.

    Before `checkpoint_layers`. backend: of torch.compile; inductor needs a C++ compiler.
    """
    # transformers asks for torch's version while a layer runs; that its answer is cached does no harm.
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`", UserWarning)
    for router in hook.routers.values() if hook is not None else ():
        router.forward = torch.compiler.disable(router.forward)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def checkpoint_layers(layers: nn.ModuleList, hook: RouteHook | None) -> None:
    """Keep only each layer's inputs for its backward, which runs the forward again with the routes it used."""
    contexts = hook.checkpoint_context_fn if hook is not None else _no_contexts
    for layer in layers:
        layer.forward = _Checkpointed(layer.forward, contexts)


def _no_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), nullcontext()


class _Checkpointed:
    """A layer's forward under activation checkpointing while gradients are wanted."""

    __slots__ = ("contexts", "inner")

    def __init__(self, inner: Callable[..., Any], contexts: Contexts) -> None:
        self.inner, self.contexts = inner, contexts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        # Models are in eval mode and draw no random numbers, so no generator need be put back.
        return checkpoint(
            self.inner, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts, **kwargs
        )
