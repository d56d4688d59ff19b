"""Age of the data, and the learner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.sections.base import NonNegative, Positive, Seconds, Section


class StalenessSection(Section):
    """Age of the data: one rule (docs/staleness.md)."""

    sync_every: Positive = 4
    """N: weights are published every N updates."""
    max_lag: NonNegative = 8
    """A token of version w trains update u only if u - w <= max_lag."""
    updates_per_take: Positive = 1
    """M: updates made from one take."""
    stale: Literal["mask", "evict", "wait"] = "mask"
    """What happens to tokens older than max_lag. wait: the learner waits for groups about to become too old."""
    patience: float = Field(3.0, ge=0, le=1_000_000)
    """Under wait: longest wait before an update, in median times to sample a group; then what is too old is evicted."""
    on_evict: Literal["requeue", "drop"] = "requeue"
    """What happens to the prompt of a stale group. What a resumed learner threw away is always leased again."""


class LearnerSection(Section):
    """The learner."""

    ranks: int = Field(1, ge=1, le=1024)
    """Processes under torchrun."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner computes; auto is cuda where torch sees a GPU, one per rank."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each decoder layer for the backward pass and compute the rest again: less memory, about
    a third more time."""
    compile: bool = False
    """torch.compile of each decoder layer; the first updates are slow. Needs model.experts=grouped_mm."""
    updates: Positive = 120
    """Optimizer steps of the run."""
    lr: float = Field(3e-4, gt=0, le=1)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW moments, each in [0, 1)."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """Decoupled weight decay."""
    warmup_updates: NonNegative = 5
    """Linear warm-up of the learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: lr, or falling from lr towards min_lr until the last update."""
    min_lr: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine fall to: a learning rate, not a share of lr."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient-norm clip."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens per micro-batch."""
    logprob_chunk: Positive = 4096
    """Rows of the logits that are materialised at once, at most; of a large vocabulary only a part (2^25 logits)."""
    scoring: Literal["auto", "separate"] = "auto"
    """auto: score and update share one forward when every rank's share fits one micro-batch."""
    checkpoint_every: NonNegative = 20
    """Updates between checkpoints, from which a killed learner goes on; 0 is never."""
    keep_checkpoints: int = Field(2, ge=1, le=1024)
    """Newest checkpoints that are kept."""
    keep_best: str | None = Field(None, pattern=r"^eval/[A-Za-z0-9_./-]+$", max_length=200)
    """Metric of an evaluation, such as eval/greedy_accuracy: the policy of the version with its highest value is kept
    in RUN/best, whatever checkpoints are kept."""
    async_checkpoints: bool = True
    """Write checkpoints while the next updates run; takes host memory for a copy of what a rank saves."""
    checkpoint_timeout_s: Seconds = Field(600.0, ge=1)
    """Longest wait for a checkpoint that is being written when the next one is due; that one is then left out."""
    threads: int = Field(1, ge=1, le=1024)
    """Torch threads per rank."""
    max_skipped_updates: Positive = 5
    """Skipped updates in a row (non-finite, or all filtered) that end the run."""
    take_timeout_s: Seconds = Field(900.0, ge=10)
    """Longest wait for a take of a slow fleet before the learner gives up; keep it above run.watchdog_s, which comes
    first when nothing can progress. Longer than replay.heartbeat_timeout_s."""
    collective_timeout_s: Seconds = Field(120.0, ge=10)
    """Timeout of a collective between ranks. With several, rank 0 waits at most 0.75 of it for replay to answer a
    commit or an announcement."""
