"""What both sides of the queue share: records, and a rule. Numpy only: importing this never loads torch.

Axes: P prompt tokens, T response tokens, S = P + T input tokens, L MoE layers, E experts,
K experts chosen per token, V version segments of one response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LOGPROB_TOLERANCE = 1e-6
"""A log-prob above 0 by no more than this is rounding, and used as it is: its ratio is off by a millionth."""


def impossible(logprobs: NDArray[np.float32]) -> bool:
    """True when no policy can have sampled a token at one of these: -inf, or above 0. NaN (missing) is possible."""
    if not len(logprobs):
        return False
    # fmin and fmax pass over NaN; all of them NaN give NaN, which is neither.
    with np.errstate(invalid="ignore"):
        lowest, highest = np.fmin.reduce(logprobs), np.fmax.reduce(logprobs)
    return bool(lowest == -np.inf or highest > LOGPROB_TOLERANCE)


class Version(NamedTuple):
    """What weights something was sampled or scored with: (run epoch, update), ordered."""

    epoch: int
    update: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.update}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task item: prompt token ids, what the reward needs, a stable id.

    token_ids: int32 [P]. answer: the gold answer as text. source: name of the verifier. data_source: name of the
    source or evaluation set that it comes from. extra: JSON of what else a reward or an environment reads, or "".
    """

    prompt_id: str
    token_ids: NDArray[np.int32]
    text: str
    answer: str
    source: str
    data_source: str = ""
    extra: str = ""


class Segment(NamedTuple):
    """Response tokens [start, end) that were sampled under one version."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled response to a prompt.

    token_ids int32 [T]; logprobs float32 [T] of the sampled tokens at the sampling temperature
    (NaN where the engine gave none); loss_mask bool [T], True where the policy sampled the token;
    segments cover [0, T) in order; route_counts uint16 or uint32 [V, L, E]: how often each
    expert was chosen at the input positions that predict the loss-masked tokens of each segment;
    routes uint8 or uint16 [S - 1, L, K], or None when only the counts travel. Routes of rows below routes_from (of
    S - 1) are unknown: they are in no count, and what stands there in routes means nothing. parts: named parts of the
    reward, and what else was measured of the response (turns), for the metrics.
    """

    trajectory_id: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]
    segments: tuple[Segment, ...]
    reward: float
    finish_reason: str
    route_counts: NDArray[np.unsignedinteger] | None = None
    routes: NDArray[np.unsignedinteger] | None = None
    routes_from: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Response tokens T."""
        return len(self.token_ids)

    @property
    def oldest(self) -> Version | None:
        """Lowest version of any token, None for an empty response."""
        return min((s.version for s in self.segments), default=None)

    @property
    def newest(self) -> Version | None:
        """Highest version of any token, None for an empty response."""
        return max((s.version for s in self.segments), default=None)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt: the unit that is leased, sent, queued, taken, committed.

    group_id is stable over attempts (data epoch / prompt id), so a prompt that was leased twice
    is trained once. temperature is the sampling temperature of every log-prob in the group.
    """

    group_id: str
    prompt: Prompt
    generator_id: str
    attempt: int
    temperature: float
    trajectories: tuple[Trajectory, ...]
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Response tokens of all trajectories."""
        return sum(t.num_tokens for t in self.trajectories)

    @property
    def oldest(self) -> Version | None:
        """Lowest token version of the group, None if no response has a token."""
        return min((t.oldest for t in self.trajectories if t.oldest is not None), default=None)

    @property
    def newest(self) -> Version | None:
        """Highest token version of the group, None if no response has a token."""
        return max((t.newest for t in self.trajectories if t.newest is not None), default=None)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What both sides must agree on about the model. layers are the MoE layer numbers in order."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    vocab_size: int
    fingerprint: str = ""

    @property
    def is_moe(self) -> bool:
        """True when at least one layer routes."""
        return len(self.layers) > 0 and self.num_experts > 0

    @property
    def route_dtype(self) -> np.dtype:
        """Smallest unsigned type for an expert id, chosen from E and never from values seen."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Log-probs are of the full distribution at `temperature`."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    seed: int | None = None


@dataclass(slots=True)
class Completion:
    """What an engine returns for one sample of one request.

    token_ids int32 [T] include the stop token when finish_reason is "stop"; logprobs float32 [T];
    routes [S - 1, L, K] in the model's route dtype (None for a dense model). sampled bool [T]: False where the
    policy did not sample the token, as for an end token that the engine put there; None is True everywhere.
    routes_from: first row of routes that is known to be what sampled the token; an engine that computed older rows
    again, under other weights, leaves them out by this number. 0 to S - 1 (none is known).
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    segments: tuple[Segment, ...]
    finish_reason: str
    routes: NDArray[np.unsignedinteger] | None = None
    extra: dict[str, float] = field(default_factory=dict)
    sampled: NDArray[np.bool_] | None = None
    routes_from: int = 0


def fewest_sound(num_alive: int) -> int:
    """So many living generators must stay out of quarantine, by the learner and by replay: half of them, and one."""
    return max(1, -(-num_alive // 2))
