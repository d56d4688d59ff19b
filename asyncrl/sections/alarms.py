"""When the learner raises an alarm, and what it then does (docs/alarms.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.sections.base import Positive, Seconds, Section


class AlarmRule(Section):
    """What every alarm has."""

    enabled: bool = True
    """Look for it."""
    actions: tuple[Literal["log", "text", "command", "pause", "stop"], ...] = Field(("log", "text"), max_length=5)
    """What it does when it goes on (docs/alarms.md)."""
    updates: Positive = 5
    """It goes on when this many ..."""
    window: Positive = 10
    """... of the last so many updates were bad."""


class F2Alarm(AlarmRule):
    """Tokens whose probability differs by more than a factor of 2 between the policy that sampled and the learner's."""

    above: float = Field(0.1, ge=0, le=1)
    """Bad above this share of tokens (mismatch/f_2)."""


class KlAlarm(AlarmRule):
    """KL between the rollout policy and the learner's rises."""

    updates: Positive = 3
    """It goes on when this many ..."""
    window: Positive = 5
    """... of the last so many updates were bad."""
    above: float = Field(0.1, gt=0)
    """Never bad below this mean KL over 10 updates, in nats per token (k3 while below 0.05, else k1)."""
    factor: float = Field(2.0, ge=1)
    """Bad above this multiple of the lowest such mean of the 50 updates before."""


class EssAlarm(AlarmRule):
    """Few tokens carry the importance weights."""

    below: float = Field(0.7, gt=0, le=1)
    """Bad below this effective sample size (mismatch/ess)."""


class DriftAlarm(AlarmRule):
    """Routers of rollout and learner drift apart although the data is no older."""

    updates: Positive = 3
    """It goes on when this many ..."""
    window: Positive = 5
    """... of the last so many updates were bad."""
    factor: float = Field(1.5, ge=1)
    """Bad above this multiple: mean drift of 10 updates over that of the first 20 of the same lag, within 1 or 10 %."""
    above: float = Field(0.03, ge=0, le=1)
    """Never bad below this mean drift."""


class LagAlarm(AlarmRule):
    """The data is as old as it may be, and that costs something."""

    updates: Positive = 3
    """It goes on when this many ..."""
    ess: float = Field(0.7, ge=0, le=1)
    """Bad at the limit with an effective sample size below this, ..."""
    left_out: float = Field(0.05, ge=0, le=1)
    """... or when more than this share of tokens or responses is left out for its age."""


class StarvingAlarm(AlarmRule):
    """One side waits for the other."""

    below: float = Field(0.5, ge=0, le=1)
    """Bad below this busy share of the time."""
    seconds: Seconds = Field(30.0, ge=0)
    """The share is that of the last updates that took this long together, at least."""


class GeneratorsStarvingAlarm(StarvingAlarm):
    """The generators stand still most of the time."""

    below: float = Field(0.2, ge=0, le=1)
    """Bad below this busy share of the time, mean of the living generators."""


class TruncationAlarm(AlarmRule):
    """Responses end at sampling.max_new_tokens."""

    above: float = Field(0.15, ge=0, le=1)
    """Bad above this share of responses."""


class ZeroVarianceAlarm(AlarmRule):
    """Groups whose rewards are all equal teach nothing."""

    above: float = Field(0.95, ge=0, le=1)
    """Bad above this share of groups."""


class ExpertsAlarm(AlarmRule):
    """Experts that no token is routed to."""

    above: float = Field(0.1, ge=0, le=1)
    """Bad above this share of the experts of all layers (experts/unused_fraction)."""


class CollapseAlarm(AlarmRule):
    """Reward and response length fall together."""

    updates: Positive = 3
    """It goes on when this many ..."""
    window: Positive = 5
    """... of the last so many updates were bad."""
    reward: float = Field(0.7, ge=0, le=1)
    """Bad when the mean reward of 5 updates is below this share of the best such mean before, ..."""
    length: float = Field(0.8, ge=0, le=1)
    """... and the mean length below this share of that at the time."""


class GeneratorAlarm(AlarmRule):
    """A generator is silent, or did not come."""

    updates: Positive = 1
    """It goes on when this many ..."""
    window: Positive = 1
    """... of the last so many updates were bad."""
    seconds: Seconds = Field(60.0, ge=0)
    """How long after its start the learner expects generator.count generators."""


class MaskedAlarm(AlarmRule):
    """Tokens or responses are left out for their age."""

    above: float = Field(0.1, ge=0, le=1)
    """Bad above this share of tokens masked, or of responses dropped, ..."""
    long_above: float = Field(0.3, ge=0, le=1)
    """... or above this share of the tokens of the longest tenth, when that is twice the overall share or more."""


class UnweightedAlarm(AlarmRule):
    """The correction leaves tokens out of the loss."""

    above: float = Field(0.5, ge=0, le=1)
    """Bad above this share of tokens of weight 0 (mismatch/weight_zero)."""


class SkippedAlarm(AlarmRule):
    """Batches that made no step."""

    updates: Positive = 2
    """It goes on when this many ..."""


class RewardErrorAlarm(AlarmRule):
    """Groups that could not be scored, and responses that were left out for it."""

    updates: Positive = 3
    """It goes on when this many ..."""
    above: float = Field(0.05, ge=0, le=1)
    """Bad above this share of the groups of an update's time, or of its responses."""


class NotFiniteAlarm(AlarmRule):
    """Metrics that are no numbers."""

    updates: Positive = 1
    """It goes on when this many ..."""
    window: Positive = 1
    """... of the last so many updates were bad."""


class AlarmsSection(Section):
    """Alarms on what the learner records with every update (docs/alarms.md)."""

    enabled: bool = True
    """Look for any."""
    clear_after: Positive = 5
    """An alarm goes off after so many updates in a row that were not bad."""
    command: tuple[str, ...] = ()
    """Program and arguments of the action `command`; it gets the alarm as JSON on its standard input and its name in
    ASYNCRL_ALARM. No shell."""
    command_timeout_s: Seconds = Field(30.0, ge=1)
    """The command and what it started are killed after this long."""
    f_2: F2Alarm = F2Alarm()
    kl_rising: KlAlarm = KlAlarm()
    ess_falling: EssAlarm = EssAlarm()
    drift_rising: DriftAlarm = DriftAlarm()
    lag_at_cap: LagAlarm = LagAlarm()
    learner_starving: StarvingAlarm = StarvingAlarm()
    generators_starving: GeneratorsStarvingAlarm = GeneratorsStarvingAlarm()
    truncation: TruncationAlarm = TruncationAlarm()
    zero_variance: ZeroVarianceAlarm = ZeroVarianceAlarm()
    dead_experts: ExpertsAlarm = ExpertsAlarm()
    reward_length_collapse: CollapseAlarm = CollapseAlarm()
    dead_generator: GeneratorAlarm = GeneratorAlarm()
    masked_tokens: MaskedAlarm = MaskedAlarm()
    unweighted_tokens: UnweightedAlarm = UnweightedAlarm()
    skipped_updates: SkippedAlarm = SkippedAlarm()
    reward_errors: RewardErrorAlarm = RewardErrorAlarm()
    not_finite: NotFiniteAlarm = NotFiniteAlarm()

    def rules(self) -> dict[str, AlarmRule]:
        """Every alarm by name."""
        return {k: v for k in type(self).model_fields if isinstance(v := getattr(self, k), AlarmRule)}
