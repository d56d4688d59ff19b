"""The ready dashboard: pages of charts for TensorBoard's CUSTOM SCALARS tab.

A chart lists regular expressions; TensorBoard matches them from the start of a tag, so each is
anchored at both ends. Knows names only, no TensorBoard.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.metrics.names import NAMES, pattern

Layout = Mapping[str, Mapping[str, tuple[str, ...]]]

_PAGES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Policy": {
        "reward": ("policy/reward",),
        "held-out accuracy": ("eval/sampled_accuracy", "eval/greedy_accuracy"),
        "response length": ("policy/response_length", "eval/response_length"),
        "entropy": ("policy/entropy",),
        "clipped, truncated, zero-variance": (
            "policy/clip_fraction",
            "policy/truncated_fraction",
            "policy/zero_variance_fraction",
        ),
        "loss": ("policy/loss",),
    },
    "Router drift": {
        "drift": ("drift/mean", "drift/p50", "drift/p90", "drift/max"),
        "drift by layer": ("drift/layer_<l>",),
        "drift by length bucket": ("drift/bucket_<i>/mean",),
        "threshold by length bucket": ("drift/bucket_<i>/threshold",),
        "drift by lag": ("drift/lag_<n>",),
        "share with drift, dropped, effectively dropped": (
            "drift/nonzero_fraction",
            "filter/dropped_fraction",
            "filter/effective_dropped_fraction",
        ),
        "length, kept and dropped": ("filter/kept/length", "filter/dropped/length"),
        "reward, kept and dropped": ("filter/kept/reward", "filter/dropped/reward"),
        "|log ratio|, kept and dropped": ("filter/kept/abs_log_ratio", "filter/dropped/abs_log_ratio"),
        "routing replay": ("r3/forced_fraction", "r3/in_pass_drift"),
        "responses without drift, or with unknown routes": ("drift/undefined", "drift/routes_cut"),
    },
    "Staleness": {
        "lag": ("staleness/lag_mean", "staleness/lag_p90", "staleness/lag_max"),
        "masked tokens": ("staleness/masked_token_fraction",),
        "masked tokens by length decile": ("staleness/masked_decile_<d>",),
        "length, left out and trained": ("staleness/left_out/length", "staleness/trained/length"),
        "reward, left out and trained": ("staleness/left_out/reward", "staleness/trained/reward"),
        "groups dropped, by reason": ("replay/dropped/<reason>",),
    },
    "Mismatch": {
        "KL": ("mismatch/kl_k1", "mismatch/kl_k3"),
        "F(tau)": ("mismatch/f_1.2", "mismatch/f_2", "mismatch/f_5", "mismatch/f_10"),
        "KL, kept and filtered": ("mismatch/kept/kl_k3", "mismatch/filtered/kl_k3"),
        "KL by lag": ("mismatch/lag_<n>/kl_k3",),
        "effective sample size, importance weight": ("mismatch/ess", "mismatch/tis_weight_mean"),
    },
    "Gradient norm": {
        "gradient norm": ("optim/grad_norm",),
        "learning rate": ("optim/lr",),
        "skipped updates": ("optim/skipped_updates",),
    },
    "Throughput": {
        "tokens per second": ("throughput/learner_tokens_per_s", "throughput/generator_tokens_per_s"),
        "busy and overlap": (
            "throughput/learner_busy_fraction",
            "throughput/generator_busy_fraction",
            "throughput/overlap_fraction",
        ),
        "seconds per update": ("throughput/step_s", "throughput/wait_s", "throughput/sync_s"),
        "queue": ("replay/queue_depth", "replay/leased"),
        "idle, by reason": ("replay/idle/<reason>",),
    },
    "Fleet": {
        "drift by generator": ("generator/<id>/drift",),
        "|log ratio| by generator": ("generator/<id>/abs_log_ratio",),
        "tokens per second by generator": ("generator/<id>/tokens_per_s",),
        "busy by generator": ("generator/<id>/busy_fraction",),
        "version by generator": ("generator/<id>/version",),
    },
}


def dashboard() -> Layout:
    """Page -> chart title -> anchored tag patterns."""
    layout: dict[str, dict[str, tuple[str, ...]]] = {}
    for page, charts in _PAGES.items():
        layout[page] = {}
        for title, names in charts.items():
            assert all(name in NAMES for name in names), f"{page}/{title} names an unknown metric: {names}"
            layout[page][title] = tuple(pattern(name) for name in names)
    return layout
