"""The protocol of a generation engine and the checks every request passes. Knows no queue and no task.

Axes: P prompt tokens, T response tokens, S = P + T, L MoE layers, K experts chosen per token.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import EngineError
from asyncrl.types import Completion, ModelInfo, SamplingParams, Version

Spec = tuple[str, str, tuple[int, ...]]
"""Name, dtype (as torch spells it, without `torch.`) and shape of one tensor."""


class Broadcast(Protocol):
    """One version on its way into an engine's processes; `Source.broadcast` makes it."""

    @property
    def group(self) -> str:
        """Name of the process group; the sender is its rank 0."""
        ...

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the group's store, as the engine reaches it."""
        ...

    @property
    def backend(self) -> str:
        """gloo or nccl."""
        ...

    @property
    def is_new(self) -> bool:
        """True when the engine has to join the group first."""
        ...

    @property
    def buckets(self) -> Sequence[Sequence[Spec]]:
        """The tensors of each broadcast, in order; their bytes lie back to back."""
        ...


class Source(Protocol):
    """One announced version and the ways to get it. Every method blocks and raises WeightSyncError.

    Which of tensors, folder and broadcast there is depends on the carrier.
    """

    @property
    def kind(self) -> Literal["tensors", "folder", "broadcast"]:
        """The way that the carrier serves best."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """The verified tensors by Hugging Face name. Not with a broadcast."""
        ...

    def folder(self) -> AbstractContextManager[Path]:
        """A complete model folder that stays as it is until the context ends. Only of a shared file system."""
        ...

    def broadcast(self, engine: str, ranks: int) -> Broadcast:
        """Begin to send to the `ranks` processes of an engine, whose name is unique in the run."""
        ...

    def leave(self, engine: str) -> None:
        """End the sending to an engine, also in the middle; what waits in the group fails. Never raises."""
        ...

    def checksums(self, names: Sequence[str], ranks: int) -> dict[str, frozenset[str]]:
        """What an engine's own checksums of its tensors `names` may be; names without an answer are left out."""
        ...


class Turn(NamedTuple):
    """One request of a conversation: its prompt is all that came before, token for token.

    conversation: a name, unique in the engine until `forget`. rows: route rows that the caller has of it: those of the
    completion begin with row number `rows`. 0 for the first turn.
    """

    conversation: str
    rows: int = 0


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
        self,
        prompt_ids: NDArray[np.int32],
        n: int,
        sampling: SamplingParams,
        limit_s: float | None = None,
        cut: asyncio.Event | None = None,
        turn: Turn | None = None,
    ) -> list[Completion]:
        """N samples of one prompt [P]. EngineError when the request or the engine cannot be served.

        After limit_s, or when cut is set, it gives the samples that are finished, perhaps none, and stops the others.
        turn: for n = 1, the next turn of a conversation. What the engine keeps of the turns before it is used again
        only while the weights are those that made it; routes hold rows turn.rows to S - 2 (routes_from counts from
        row 0 as ever).
        """
        ...

    def forget(self, conversation: str) -> None:
        """Free what is kept of a conversation; unknown names are ignored."""
        ...

    async def load(self, version: Version, source: Source) -> None:
        """Load weights between two decode steps. WeightSyncError leaves the label as it was.

        The weights then are as they were, or the engine samples nothing until a load succeeds.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Counters since start (tokens, prompt_tokens, busy_s, steps, loads, load_s) and gauges."""
        ...

    def close(self) -> None:
        """Stop; requests that wait fail with EngineError."""
        ...


def check_turn(prompt_ids: NDArray[np.int32], n: int, turn: Turn | None) -> None:
    """Raise EngineError when a request cannot be a turn of a conversation."""
    if turn is None:
        return
    if n != 1:
        raise EngineError(f"n={n} samples of a turn of conversation {turn.conversation!r}; ask for one")
    if not 0 <= turn.rows < len(prompt_ids):
        raise EngineError(
            f"conversation {turn.conversation!r}: rows={turn.rows} of a prompt of {len(prompt_ids)} tokens are said to "
            f"be known; at most {len(prompt_ids) - 1} can be, for the last one is computed now"
        )


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
