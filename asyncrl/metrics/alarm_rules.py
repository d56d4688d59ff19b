"""Whether an update was bad, for every alarm on what is trained: mismatch, drift, responses, rewards, experts.

A rule looks at the history and says bad or not, with the numbers in words; None is no comparison (a metric is missing
or not a number). How many bad updates make an alarm is asyncrl.metrics.alarms' business.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.metrics.alarm_history import History
from asyncrl.sections import alarms as sections


class Facts(NamedTuple):
    """Settings that the rules need besides their own, as they are in force."""

    max_lag: int
    max_new_tokens: int = 0
    num_generators: int = 0
    group_size: int = 1
    num_responses: int = 0
    """Of an update in which none is missing; 0: not known."""


class Judgement(NamedTuple):
    """bad or not; text: the numbers in words; remedy: what to do where it depends on them."""

    bad: bool
    text: str = ""
    remedy: str = ""


GOOD = Judgement(False)

MEAN = 10
"""Updates of the running means of KL and drift."""
BEFORE = 50
"""Running means before, of which the lowest KL is compared."""
FIRST = 20
"""Updates whose mean drift is compared."""
SHORT = 5
"""Updates of the running means of reward and length."""
KL_SWITCH = 0.05
"""Below it k3 is the better estimate of KL, above it k1: there k3 follows single tokens."""


def f_2(h: History, s: sections.F2Alarm, _: Facts) -> Judgement | None:
    """F(2) is high."""
    share = h.get("mismatch/f_2")
    if share is None:
        return None
    text = f"{share:.1%} of the tokens have probabilities that differ by more than a factor of 2 between the policy "
    return Judgement(share > s.above, text + f"that sampled them and the learner's (limit {s.above:.1%})")


def kl_rising(h: History, s: sections.KlAlarm, _: Facts) -> Judgement | None:
    """KL over the last updates against its lowest before."""
    if h.get("mismatch/kl_k1") is None or h.get("mismatch/kl_k3") is None:
        return None
    values = [_kl(p.values) for p in h.points]
    known = [v for v in values if v is not None]
    if len(known) < 2 * MEAN:
        return None
    means = [sum(known[i : i + MEAN]) / MEAN for i in range(len(known) - MEAN + 1)]
    now, lowest = means[-1], min(means[-BEFORE - MEAN : -MEAN])
    bad = now > s.above and now > s.factor * lowest
    text = (
        f"KL between the rollout policy and the learner's rose to {now:.3g} nats per token (mean of {MEAN} updates), "
    )
    return Judgement(bad, text + f"from {lowest:.3g} within the {BEFORE} updates before")


def _kl(values: dict[str, float]) -> float | None:
    k1, k3 = values.get("mismatch/kl_k1"), values.get("mismatch/kl_k3")
    return None if k1 is None or k3 is None else k3 if k3 < KL_SWITCH else k1


def ess_falling(h: History, s: sections.EssAlarm, _: Facts) -> Judgement | None:
    """The effective sample size is low."""
    ess = h.get("mismatch/ess")
    if ess is None:
        return None
    best = max(h.means("mismatch/ess", MEAN), default=ess)
    return Judgement(
        ess < s.below,
        f"the importance ratios leave an effective sample of {ess:.0%} of the tokens (limit {s.below:.0%}; the best "
        f"{MEAN} updates had {best:.0%}): a few tokens outweigh the others",
    )


def drift_rising(h: History, s: sections.DriftAlarm, _: Facts) -> Judgement | None:
    """Drift of the last updates against that of the first ones of the same lag."""
    lag, drift = h.get("staleness/lag_mean"), h.get("drift/mean")
    if lag is None or drift is None:
        return None
    near = max(1.0, 0.1 * lag)
    alike = [
        p.values["drift/mean"]
        for p in h.points
        if "drift/mean" in p.values and abs(p.values.get("staleness/lag_mean", -near - 1) - lag) <= near
    ]
    if len(alike) < FIRST + MEAN:
        return None
    first, now = sum(alike[:FIRST]) / FIRST, sum(alike[-MEAN:]) / MEAN
    return Judgement(
        now > s.above and now > s.factor * first,
        f"mean router drift rose to {now:.3g} (mean of {MEAN} updates) from {first:.3g} in the first {FIRST} updates "
        f"of the same lag ({lag:.1f})",
    )


def truncation(h: History, s: sections.TruncationAlarm, facts: Facts) -> Judgement | None:
    """Responses reach the length limit."""
    share = h.get("policy/truncated_fraction")
    if share is None:
        return None
    return Judgement(
        share > s.above, f"{share:.0%} of the responses ended at sampling.max_new_tokens={facts.max_new_tokens} "
        f"(limit {s.above:.0%})",
    )  # fmt: skip


def unweighted_tokens(h: History, s: sections.UnweightedAlarm, _: Facts) -> Judgement | None:
    """A correction that drops what it is to correct: the step goes on, by the optimizer's moments alone."""
    share = h.get("mismatch/weight_zero")
    if share is None:
        return None
    text = f"the correction leaves {share:.0%} of the loss tokens out (weight 0, limit {s.above:.0%})"
    return Judgement(share > s.above, text)


def zero_variance(h: History, s: sections.ZeroVarianceAlarm, _: Facts) -> Judgement | None:
    """Groups without a lesson."""
    share, reward = h.get("policy/zero_variance_fraction"), h.get("policy/reward")
    if share is None:
        return None
    mean = "" if reward is None else f"; mean reward {reward:.3g}"
    return Judgement(
        share > s.above, f"{share:.0%} of the groups have equal rewards and teach nothing (limit {s.above:.0%}{mean})"
    )


def dead_experts(h: History, s: sections.ExpertsAlarm, _: Facts) -> Judgement | None:
    """Experts that get no token."""
    share = h.get("experts/unused_fraction")
    if share is None:
        return None
    return Judgement(share > s.above, f"no token was routed to {share:.0%} of the experts (limit {s.above:.0%})")


def reward_length_collapse(h: History, s: sections.CollapseAlarm, _: Facts) -> Judgement | None:
    """Reward and length fell together since the best reward."""
    if h.get("policy/reward") is None or h.get("policy/response_length") is None:
        return None
    rewards, lengths = h.means("policy/reward", SHORT), h.means("policy/response_length", SHORT)
    if len(rewards) < SHORT + 1 or len(rewards) != len(lengths):
        return None
    best = max(range(len(rewards)), key=rewards.__getitem__)
    reward, length, top, long = rewards[-1], lengths[-1], rewards[best], lengths[best]
    bad = top > 0 and reward < s.reward * top and length < s.length * long
    return Judgement(
        bad, f"mean reward fell to {reward:.3g} from {top:.3g}, and the mean length to {length:.3g} tokens from "
        f"{long:.3g} (means of {SHORT} updates)",
    )  # fmt: skip


def skipped_updates(h: History, s: sections.SkippedAlarm, _: Facts) -> Judgement | None:
    """A batch made no step."""
    stepped = h.get("optim/stepped")
    if stepped is None:
        return None
    so_far = {k.removeprefix("optim/skipped/"): v for k, v in h.points[-1].values.items() if "/skipped/" in k}
    reasons = ", ".join(f"{n:.0f} x {reason}" for reason, n in sorted(so_far.items()))
    total = h.get("optim/skipped_updates") or 0.0
    return Judgement(stepped == 0, f"{total:.0f} batches so far made no optimizer step ({reasons})")


def not_finite(h: History, s: sections.NotFiniteAlarm, _: Facts) -> Judgement | None:
    """Values that are not numbers."""
    broken = h.points[-1].broken
    more = f" and {len(broken) - 5} more" * (len(broken) > 5)
    return Judgement(bool(broken), f"not finite: {', '.join(broken[:5])}{more}")
