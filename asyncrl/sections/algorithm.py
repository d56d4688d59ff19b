"""The objective: advantages, surrogate, correction, routes, filter, reference policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from asyncrl.algos.registry import ADVANTAGES, AGGREGATIONS, CORRECTIONS, SURROGATES
from asyncrl.sections.base import NonNegative, Positive, Section

if TYPE_CHECKING:
    AdvantageName = str
    SurrogateName = str
    AggregationName = str
    CorrectionName = str
else:
    # What can be chosen is what the registry has.
    AdvantageName, SurrogateName = Literal[tuple(ADVANTAGES)], Literal[tuple(SURROGATES)]
    AggregationName, CorrectionName = Literal[tuple(AGGREGATIONS)], Literal[tuple(CORRECTIONS)]


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
    """Correction of the rollout-learner mismatch in token probabilities (docs/methods.md)."""

    kind: CorrectionName = "tis"
    """tis: truncated importance sampling, min(pi_old / mu, cap), detached. sis: 1 for a token that passes a rejection
    test, else the ratio, in the mean over the test. ctpo: the product of the ratios up to the token, bounded wider the
    later it stands. mask: tokens whose ratio is outside [low, high] do not train. trm: responses with a token whose KL
    exceeds bound do not train. rspo: the ratio is scaled by how far the router moved since the start of the take."""
    cap: float = Field(2.0, gt=0, le=1_000_000)
    """tis: upper bound of the weight."""
    level: Literal["token", "sequence"] = "token"
    """tis: one weight per token or per response."""
    envelope: float = Field(2.0, ge=1, le=1_000_000)
    """sis: a token is accepted with probability pi_old / (envelope mu); above that ratio always."""
    low: float = Field(0.5, ge=0, le=1)
    """mask: smallest pi_old / mu that trains."""
    high: float = Field(5.0, ge=1, le=1_000_000)
    """mask: largest pi_old / mu that trains."""
    bound: float = Field(0.5, gt=0, le=1_000_000)
    """trm: largest KL of a token (k3 of pi_old against mu) with which its response trains."""
    spread_low: float = Field(0.025, gt=0, le=1_000)
    """ctpo: the log of the weight of token t is at least -spread_low sqrt(t)."""
    spread_high: float = Field(0.05, gt=0, le=1_000)
    """ctpo: and at most spread_high sqrt(t)."""
    floor: float = Field(0.8, gt=0, le=1)
    """rspo: smallest factor of the ratio."""


class KlSection(Section):
    """KL divergence to a reference policy (docs/kl.md)."""

    coef: float = Field(0.0, ge=0, le=1_000)
    """Weight of the term; 0 is off: no reference policy is loaded then."""
    where: Literal["loss", "reward"] = "loss"
    """loss: a term per token. reward: coef times the KL of the response (k1, summed over its tokens) is taken from its
    reward, before the advantages."""
    estimator: Literal["unbiased", "k2", "k3", "k1"] = "unbiased"
    """Of the loss term. unbiased: k3 times the importance ratio, right in value and gradient off policy too. The others
    are biased, and there to be compared with."""
    reference: str | None = None
    """Model folder of the reference policy; null is model.path, the policy that the run began with."""


class AlgorithmSection(Section):
    """Objective."""

    groups_per_update: int = Field(32, ge=1, le=65536)
    """G: groups per optimizer step."""
    group_size: int = Field(8, ge=2, le=1024)
    """Responses per prompt."""
    advantage: AdvantageName = "grpo"
    """Advantage estimator."""
    surrogate: SurrogateName = "clip"
    """Policy-gradient surrogate: clip (PPO, GRPO), gspo (one ratio per response), cispo (clipped, detached weight),
    gmpo (geometric mean of the ratios)."""
    ratio: Literal["proximal", "behaviour"] = "proximal"
    """Denominator of the clipped ratio: pi_old of the scoring pass, or the rollout policy mu."""
    eps_low: float | None = Field(None, gt=0, le=1)
    """Lower clip range; null is the surrogate's own: 0.2 for clip, 0.0003 for gspo, 1 (none) for cispo, 0.4 (of the
    log) for gmpo."""
    eps_high: float | None = Field(None, gt=0, le=1_000_000)
    """Upper clip range; null is the surrogate's own: 0.27 for clip (DAPO clip-higher), 0.0004 for gspo, 4 for cispo,
    0.4 (of the log) for gmpo."""
    dual_clip: float | None = Field(None, gt=1, le=1_000_000)
    """clip: bound on the ratio of negative-advantage tokens; null is off."""
    aggregation: AggregationName = "token_mean"
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
    routes: Literal["native", "r3", "r2"] = "native"
    """r3 forces the rollout routes in the scoring and the update pass. r2 forces the routes of the scoring pass of the
    take in its updates."""
    native_drift_every: NonNegative = 1
    """Under r3 and r2: updates between extra passes that measure the exact native drift; 0 is never."""
    rdc: RdcSection = RdcSection()
    correction: CorrectionSection = CorrectionSection()
    kl: KlSection = KlSection()

    @property
    def replays(self) -> bool:
        """True when the learner's updates run on given routes."""
        return self.routes != "native"

    @property
    def compares_routers(self) -> bool:
        """True when the correction compares the router with the one at the start of the take."""
        return CORRECTIONS[self.correction.kind].needs_take

    @property
    def kl_in_loss(self) -> bool:
        """True when every token has a KL term, also one whose advantage is 0."""
        return self.kl.coef > 0 and self.kl.where == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """True when the rewards that advantages come from are not those of the task alone."""
        return self.kl.coef > 0 and self.kl.where == "reward"

    @property
    def clip_range(self) -> dict[str, float]:
        """eps_low and eps_high in force, as far as the surrogate has them."""
        own = SURROGATES[self.surrogate].defaults
        known = {"eps_low": self.eps_low, "eps_high": self.eps_high}
        return {name: own[name] if value is None else value for name, value in known.items() if name in own}
