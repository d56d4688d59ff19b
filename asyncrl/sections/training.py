"""Age of the data, objective and learner."""

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


class RdcSection(Section):
    """Router Drift Control (docs/rdc.md)."""

    mode: Literal["filter", "observe", "random", "off"] = "filter"
    """filter drops, observe only measures, random drops as many at random, off does neither."""
    q: float = Field(0.08, ge=0, lt=1)
    """Fraction of responses to drop per update."""
    gate: Literal["top_q", "outlier"] = "top_q"
    """top_q: the paper's rule. outlier: drift above median + k MAD of its bucket."""
    outlier_k: float = Field(4.0, gt=0, le=1_000_000)
    """k of the outlier gate."""
    outlier_floor: float = Field(0.02, ge=0, le=1)
    """Absolute drift below which the outlier gate never drops."""
    signal: Literal["drift", "log_ratio"] = "drift"
    """What is ranked: router drift or mean |log pi/mu|."""
    buckets: Literal["auto"] | Positive = "auto"
    """Length buckets: auto = min(4, max(1, floor(q n)))."""
    bucket_edges: tuple[Positive, ...] | None = Field(None, max_length=1024)
    """Explicit upper edges in tokens, ascending; replaces `buckets`."""
    normalize: Literal["batch", "retained"] = "batch"
    """Loss tokens that divide the loss: of the batch before filtering, or of what stays."""
    baseline: Literal["batch", "retained"] = "batch"
    """Rewards that enter the advantage baseline."""
    on_undefined: Literal["keep", "drop"] = "keep"
    """Responses without a defined drift."""


class CorrectionSection(Section):
    """Correction of the rollout-learner mismatch in token probabilities."""

    kind: Literal["none", "tis"] = "tis"
    """tis: truncated importance sampling, min(pi_old / mu, cap), detached."""
    cap: float = Field(2.0, gt=0, le=1_000_000)
    """Upper bound of the weight."""
    level: Literal["token", "sequence"] = "token"
    """One weight per token or per response."""


class AlgorithmSection(Section):
    """Objective."""

    groups_per_update: int = Field(32, ge=1, le=65536)
    """G: groups per optimizer step."""
    group_size: int = Field(8, ge=2, le=1024)
    """Responses per prompt."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """Advantage estimator."""
    surrogate: Literal["clip"] = "clip"
    """Policy-gradient surrogate."""
    ratio: Literal["proximal", "behaviour"] = "proximal"
    """Denominator of the clipped ratio: pi_old of the scoring pass, or the rollout policy mu."""
    eps_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip range."""
    eps_high: float = Field(0.27, gt=0, le=1_000_000)
    """Upper clip range (DAPO clip-higher)."""
    dual_clip: float | None = Field(None, gt=1, le=1_000_000)
    """Bound on the ratio of negative-advantage tokens; None is off."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How token losses become one loss."""
    zero_variance: Literal["keep", "refill"] = "keep"
    """Groups of equal rewards: keep with advantage 0, or drop before the take."""
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """Responses that the length limit cut off. keep: trained like any other. mask: their reward counts in the baseline
    of their group, their tokens do not train. penalise: truncated_penalty is taken from their reward."""
    truncated_penalty: float = Field(1.0, gt=0, le=1_000_000)
    """With truncated=penalise: what a cut-off response loses of its reward."""
    overlong_buffer: NonNegative = 0
    """With truncated=penalise: tokens below sampling.max_new_tokens over which the penalty grows from 0 to all of it
    (DAPO's soft overlong punishment); 0 penalises cut-off responses only."""
    routes: Literal["native", "r3"] = "native"
    """r3 forces the rollout routes in the scoring and the update pass."""
    native_drift_every: NonNegative = 1
    """Under r3: updates between extra passes that measure the exact native drift; 0 is never."""
    rdc: RdcSection = RdcSection()
    correction: CorrectionSection = CorrectionSection()


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
