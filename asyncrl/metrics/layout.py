"""The ready dashboard: pages of charts for TensorBoard's CUSTOM SCALARS tab.

A line chart lists regular expressions; TensorBoard matches them from the start of a tag, so each is anchored at both
ends. A band is a mean between two bounds, by exact names. Knows names only, no TensorBoard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from asyncrl.metrics.names import NAMES, is_known, pattern


class Band(NamedTuple):
    """A value with its lower and upper bound, drawn as a band: exact metric names."""

    value: str
    lower: str
    upper: str


Chart = tuple[str, ...] | Band
Layout = Mapping[str, Mapping[str, Chart]]

# Bands stand last: so TensorBoard draws them.
_PAGES: Mapping[str, Mapping[str, Chart]] = {
    "Policy": {
        "reward, mean of the trained responses": ("policy/reward",),
        "held-out accuracy": ("eval/sampled_accuracy", "eval/greedy_accuracy"),
        "response length in tokens, trained and held-out": ("policy/response_length", "eval/response_length"),
        "entropy of the policy per token, in nats": ("policy/entropy",),
        "share of truncated responses, share of groups with equal rewards": (
            "policy/truncated_fraction",
            "policy/zero_variance_fraction",
        ),
        "named parts of the reward": ("reward/<word>",),
        "reward by data source": ("source/<word>/reward",),
        "share of the responses by data source": ("source/<word>/share",),
        "length by data source, in tokens": ("source/<word>/length",),
        "loss": ("policy/loss",),
        "KL to the reference policy per token: k3, k1, and its part of the loss": (
            "policy/ref_kl",
            "policy/ref_kl_k1",
            "policy/kl_loss",
        ),
    },
    "Mismatch": {
        "KL of generators against learner: k1, k3": ("mismatch/kl_k1", "mismatch/kl_k3"),
        "F(tau): share of tokens whose ratio exceeds tau": ("mismatch/f_1.2", "mismatch/f_2", "mismatch/f_5"),
        "effective sample size as a share, mean weight and share left out of the correction": (
            "mismatch/ess",
            "mismatch/weight_mean",
            "mismatch/weight_zero",
        ),
        "KL (k3) by lag": ("mismatch/lags_<lags>/kl_k3",),
        "F(2) by lag": ("mismatch/lags_<lags>/f_2",),
        "F(1.2) by lag": ("mismatch/lags_<lags>/f_1.2",),
        "F(5) by lag": ("mismatch/lags_<lags>/f_5",),
        "effective sample size by lag": ("mismatch/lags_<lags>/ess",),
        "KL (k3), kept and filtered": ("mismatch/kept/kl_k3", "mismatch/filtered/kl_k3"),
    },
    "Gradient norm": {
        "gradient norm before clipping": ("optim/grad_norm",),
        "clip fraction: share of tokens whose ratio was clipped": ("policy/clip_fraction",),
        "learning rate": ("optim/lr",),
        "skipped updates so far": ("optim/skipped_updates",),
    },
    "Evaluation": {
        "avg@k by set: mean reward of the sampled answers": ("eval/<set>/avg_at_<k>",),
        "pass@k by set": ("eval/<set>/pass_at_<k>",),
        "maj@k by set: the most frequent answer": ("eval/<set>/maj_at_<k>",),
        "greedy by set": ("eval/<set>/greedy",),
        "length by set, in tokens": ("eval/<set>/length",),
        "share of truncated responses by set": ("eval/<set>/truncated",),
        "share of responses without an answer, by set": ("eval/<set>/no_answer",),
        "95 % interval of avg@k by set: both ends": ("eval/<set>/ci_low", "eval/<set>/ci_high"),
    },
    "Staleness": {
        "lag in updates: tokens' mean, responses' p90, largest": (
            "staleness/lag_mean",
            "staleness/lag_p90",
            "staleness/lag_max",
        ),
        "groups in the queue, and being sampled": ("replay/queue_depth", "replay/leased"),
        "left out for age since the last record, by reason": (
            "replay/dropped_now/stale",
            "replay/dropped_now/overtaken",
            "replay/dropped_now/stale_response",
            "replay/dropped_now/doomed_lease",
        ),
        "dropped or returned since the last record, every reason": ("replay/dropped_now/<reason>",),
        "lease requests refused per second, by reason": ("replay/refused_per_s/<reason>",),
        "share of tokens masked as too old": ("staleness/masked_token_fraction",),
        "the same by length: decile 0 shortest, 9 longest": ("staleness/masked_decile_<d>",),
        "length, trained and left out for age": ("staleness/trained/length", "staleness/left_out/length"),
        "reward, trained and left out for age": ("staleness/trained/reward", "staleness/left_out/reward"),
        "lag of responses: mean, and 10 % to 90 % as a band": Band(
            "staleness/response_lag_mean", "staleness/lag_p10", "staleness/lag_p90"
        ),
    },
    "Router drift": {
        "drift: mean, median, p90, largest": ("drift/mean", "drift/p50", "drift/p90", "drift/max"),
        "drift by lag": ("drift/lags_<lags>",),
        "drift by depth: thirds of the MoE layers": ("drift/depth_<part>",),
        "drift by length bucket": ("drift/bucket_<i>/mean",),
        "threshold by length bucket: lowest drift dropped": ("drift/bucket_<i>/threshold",),
        "share of responses with drift, dropped, dropped with effect": (
            "drift/nonzero_fraction",
            "filter/dropped_fraction",
            "filter/effective_dropped_fraction",
        ),
        "length, kept and dropped": ("filter/kept/length", "filter/dropped/length"),
        "reward, kept and dropped": ("filter/kept/reward", "filter/dropped/reward"),
        "|log ratio|, kept and dropped": ("filter/kept/abs_log_ratio", "filter/dropped/abs_log_ratio"),
        "routing replay: share forced, drift inside the pass": (
            "r3/forced_fraction",
            "r3/in_pass_drift",
            "r2/forced_fraction",
            "r2/in_pass_drift",
        ),
        "responses without drift, or with unknown routes": ("drift/undefined", "drift/routes_cut"),
        "drift of responses: mean, and 10 % to 90 % as a band": Band("drift/mean", "drift/p10", "drift/p90"),
    },
    "Throughput": {
        "tokens per second: sampled, trained": (
            "throughput/generator_tokens_per_s",
            "throughput/learner_tokens_per_s",
        ),
        "busy share: learner, generators, and their overlap": (
            "throughput/learner_busy_fraction",
            "throughput/generator_busy_fraction",
            "throughput/overlap_fraction",
        ),
        "why the learner idles, as shares of time": ("throughput/learner_idle/<reason>",),
        "why generators idle, as shares of time": ("throughput/generator_idle/<reason>",),
        "seconds per update: step, wait for the take": ("throughput/step_s", "throughput/wait_s"),
        "seconds the learner stood still for a version, and to write it": ("throughput/sync_s", "weights/write_s"),
    },
    "Fleet": {
        "version by generator": ("generator/<id>/version",),
        "tokens per second by generator": ("generator/<id>/tokens_per_s",),
        "failures so far by generator": ("generator/<id>/failures",),
        "living generators, failed loads so far": ("generator/alive", "generator/failed_loads"),
        "responses without a reward so far: errors, timeouts": ("verifier/errors", "verifier/timeouts"),
        "busy share by generator": ("generator/<id>/busy_fraction",),
        "mean lag by generator": ("generator/<id>/lag",),
        "drift by generator": ("generator/<id>/drift",),
        "|log ratio| by generator": ("generator/<id>/abs_log_ratio",),
        "version of the weights: oldest, mean, newest": Band(
            "generator/version_mean", "generator/version_lowest", "generator/version_highest"
        ),
        "tokens per second: slowest, mean, fastest": Band(
            "generator/tokens_per_s_mean", "generator/tokens_per_s_lowest", "generator/tokens_per_s_highest"
        ),
    },
    "Alarms": {
        "every alarm: 1 while it is on": ("alarm/<name>",),
        "mismatch and drift": ("alarm/f_2", "alarm/kl_rising", "alarm/ess_falling", "alarm/drift_rising"),
        "what is learned": (
            "alarm/truncation",
            "alarm/zero_variance",
            "alarm/reward_length_collapse",
            "alarm/dead_experts",
        ),
        "age and supply of data": (
            "alarm/lag_at_cap",
            "alarm/masked_tokens",
            "alarm/learner_starving",
            "alarm/generators_starving",
        ),
        "what a correction leaves out": ("alarm/unweighted_tokens",),
        "faults": ("alarm/dead_generator", "alarm/reward_errors", "alarm/skipped_updates", "alarm/not_finite"),
    },
    "Sentinel": {
        "drift against the fleet at equal lag, robust z": ("sentinel/<id>/drift_z",),
        "|log ratio| against the fleet at equal lag, robust z": ("sentinel/<id>/log_ratio_z",),
        "both together, robust z": ("sentinel/<id>/joint_z",),
        "in quarantine: 1 while a generator gets no leases": ("sentinel/<id>/quarantined",),
    },
    "Settings": {
        "live changes in force (asyncrl tune)": ("tune/changes",),
        "max_lag and sync_every, in updates": ("settings/max_lag", "settings/sync_every"),
        "patience, in median times to sample a group": ("settings/patience",),
        "rdc.q: share of responses that RDC drops": ("settings/rdc_q",),
        "correction.cap: upper bound of the TIS weight": ("settings/tis_cap",),
        "eps_low and eps_high of the clip": ("settings/eps_low", "settings/eps_high"),
        "learning rate: peak as set, and in use": ("settings/lr", "optim/lr"),
        "groups in flight of a generator": ("settings/groups_in_flight",),
    },
}

OPENED = 3
"""Pages that are open at first. A browser takes long to draw all of them; the others open by a click on their name."""


def dashboard(absent: Collection[str] = ()) -> Layout:
    """Page -> chart title -> anchored tag patterns, or a band.

    absent: beginnings of the names that this run never has; a chart of nothing else is left out.
    """
    layout: dict[str, dict[str, Chart]] = {}
    for page, charts in _PAGES.items():
        shown = {title: c for title, c in charts.items() if not all(n.startswith(tuple(absent)) for n in c)}
        for title, chart in shown.items():
            unknown = [name for name in chart if name not in NAMES and not is_known(name)]
            assert not unknown, f"{page}/{title} names unknown metrics: {unknown}"
            layout.setdefault(page, {})[title] = chart if isinstance(chart, Band) else tuple(map(pattern, chart))
    return layout
