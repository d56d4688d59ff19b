"""The protocol of a generation engine and the checks every request passes. Knows no queue and no task.

Axes: P prompt tokens, T response tokens, S = P + T, L MoE layers, K experts chosen per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import EngineError
from asyncrl.types import Completion, ModelInfo, SamplingParams, Version

SourceReader = Callable[[], Mapping[str, Tensor]]
"""Gives the verified tensors of one version by Hugging Face name; raises WeightSyncError."""


class Engine(Protocol):
    """What a generator needs from an engine. All methods may be called from any thread."""

    @property
    def version(self) -> Version:
        """The version of the weights it samples with now."""
        ...

    def describe(self) -> ModelInfo:
        """MoE layers, experts, top-k, vocabulary and fingerprint of its model."""
        ...

    async def generate(
        self, prompt_ids: NDArray[np.int32], n: int, sampling: SamplingParams, limit_s: float | None = None
    ) -> list[Completion]:
        """N samples of one prompt [P]. EngineError when the request or the engine cannot be served.

        After limit_s it gives the samples that are finished, perhaps none, and stops the others.
        """
        ...

    async def load(self, version: Version, source_reader: SourceReader) -> None:
        """Load weights between two decode steps. WeightSyncError leaves label and weights as they were."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since start (tokens, prompt_tokens, busy_s, steps, loads, load_s) and gauges."""
        ...

    def close(self) -> None:
        """Stop; requests that wait fail with EngineError."""
        ...


def check_request(
    prompt_ids: NDArray[np.int32], n: int, sampling: SamplingParams, vocab_size: int, max_length: int
) -> None:
    """Raise EngineError naming what is wrong with a request; max_length bounds P + max_new_tokens."""
    prompt = np.asarray(prompt_ids)
    new = sampling.max_new_tokens
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise EngineError(f"prompt ids must be integers [P], got {prompt.dtype} of shape {prompt.shape}")
    if not len(prompt):
        raise EngineError("the prompt is empty; give at least one token")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise EngineError(f"prompt ids span [{prompt.min()}, {prompt.max()}], the vocabulary has {vocab_size}")
    if n < 1:
        raise EngineError(f"n={n} samples; ask for at least one")
    if new < 1:
        raise EngineError(f"max_new_tokens={new}; ask for at least one")
    if len(prompt) + new > max_length:
        raise EngineError(
            f"prompt of {len(prompt)} tokens + max_new_tokens={new} = {len(prompt) + new} exceeds the engine's "
            f"limit of {max_length}; shorten the prompt or lower sampling.max_new_tokens"
        )
    if not (math.isfinite(sampling.temperature) and sampling.temperature > 0):
        raise EngineError(f"temperature={sampling.temperature} must be finite and > 0; use greedy=True for argmax")
    bad = [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]
    if bad:
        raise EngineError(f"stop_token_ids {bad} are outside the vocabulary of {vocab_size}")
