"""A request and the running rows it is split into. Knows no model and no thread.

Axes: P prompt tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engines.base import Turn
from asyncrl.errors import EngineError
from asyncrl.types import Completion, SamplingParams, Segment, Version


@dataclass(slots=True, eq=False)
class Request:
    """n samples of one prompt. on_end is called once, by the batch, with error set or the completions there.

    turn: of a conversation (n = 1). forgotten: nobody wants its next turn.
    """

    prompt_ids: NDArray[np.int32]
    n: int
    sampling: SamplingParams
    on_end: Callable[[Request], None]
    turn: Turn | None = None
    forgotten: bool = False
    completions: list[Completion] = field(default_factory=list)
    started: int = 0
    running: int = 0
    ended: bool = False
    error: EngineError | None = None
    by_sample: dict[int, Completion] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True when every sample was started and none runs any more."""
        return self.started == self.n and self.running == 0

    @property
    def conversation(self) -> str | None:
        """Name of the conversation whose next turn may come."""
        return None if self.turn is None or self.forgotten else self.turn.conversation

    def end(self, error: EngineError | None) -> None:
        """Report the end; later calls do nothing."""
        if self.ended:
            return
        self.ended, self.error = True, error
        if error is None:
            self.completions = [completion for _, completion in sorted(self.by_sample.items(), key=lambda s: s[0])]
        self.on_end(self)


class Admitted(NamedTuple):
    """So many samples of a request get rows now; its prompt is run from token `start` on."""

    request: Request
    samples: int
    start: int


@dataclass(slots=True, eq=False)
class Row:
    """What Python keeps of a running row: whose it is, routes [P, L, K] of its prompt, versions and their first token.

    generator is set for requests with a seed of their own. through_load: weights were loaded since it began.
    """

    request: Request
    sample: int
    prompt_routes: NDArray[np.unsignedinteger] | None
    marks: list[tuple[Version, int]]
    generator: torch.Generator | None
    through_load: bool = False

    def mark(self, version: Version, token: int) -> None:
        """Tokens from number `token` on are sampled under version; without a token a mark leaves no segment."""
        self.marks.append((version, token))

    def segments(self, length: int) -> tuple[Segment, ...]:
        """The versions of the first `length` tokens."""
        if len(self.marks) == 1:
            return (Segment(self.marks[0][0], 0, length),)
        starts = [start for _, start in self.marks]
        ends = [*starts[1:], length]
        return tuple(
            Segment(version, start, end) for (version, start), end in zip(self.marks, ends, strict=True) if start < end
        )
