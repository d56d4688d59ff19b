"""What a decoder does for the batch.

A decoder owns the KV state of numbered rows; rows [0, A) run. It knows tokens and positions, but no
request, version, temperature or stop token.

Axes: A running rows, P new prompts, S their padded length, N rows for the samples of the new prompts, B = A + N,
V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Prompts(NamedTuple):
    """New prompts: right-padded ids int64 [P, S], lengths [P]; new row A + i holds prompt source_N[i].

    starts_P: None when they begin at position 0. Else the position of each one's first token: row A + i holds what
    comes before it (`Decoder.restore`), and source_N is 0 to P - 1.
    """

    tokens_PS: Tensor
    lengths_P: Tensor
    source_N: Tensor
    starts_P: Tensor | None = None


def continued(prompts: Prompts) -> tuple[int, Tensor, Tensor]:
    """Of prompts with starts: length of the longest whole row, positions [P, S] and which are no pads, bool [P, S].

    Pads get positions below that length, too: they are run, and nothing comes of them.
    """
    assert prompts.starts_P is not None
    columns = torch.arange(prompts.tokens_PS.shape[1], device=prompts.lengths_P.device)
    seen = int((prompts.starts_P + prompts.lengths_P).max())
    positions_PS = (prompts.starts_P[:, None] + columns).clamp(max=seen - 1)
    return seen, positions_PS, columns < prompts.lengths_P[:, None]


class Forward(NamedTuple):
    """Logits [B, V] for the next token of running and new rows; routes (any integer dtype), None when dense."""

    logits_BV: Tensor
    routes_ALK: Tensor | None
    prompt_routes_PSLK: Tensor | None


class Decoder(Protocol):
    """Runs the model for the batch."""

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in every row; what the rows hold stays."""
        ...

    def forward(self, tokens_A: Tensor, positions_A: Tensor, length: int, prompts: Prompts | None) -> Forward:
        """Feed each running row its token at its position (all < length), and run new prompts into the rows after."""
        ...

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Rows target get the first `length` positions of rows source (index tensors of one size)."""
        ...

    def save(self, row: int, length: int) -> Any | None:
        """A copy of the first `length` positions of a row, for `restore`; None when that would save no computation."""
        ...

    def restore(self, row: int, saved: Any) -> None:
        """Row begins with what was saved, for which there is room. Under other weights it means nothing."""
        ...

    def clear(self, first: int) -> None:
        """Zero rows first and above: needed after non-finite numbers, which would outlive their mask."""
        ...

    def refresh(self) -> None:
        """Rebuild what was derived from the weights; call after every load."""
        ...
