"""Literal states of replay, as a status reply carries them."""

from __future__ import annotations

from typing import Any

RECORD = {
    "policy/reward": 0.7421875,
    "policy/entropy": 0.0167,
    "policy/response_length": 19.57,
    "optim/grad_norm": 0.1723,
    "optim/lr": 0.0003,
    "mismatch/kl_k1": 0.0021,
    "mismatch/kl_k3": 0.00104,
    "mismatch/f_2": 0.0013,
    "mismatch/ess": 0.9988,
    "drift/mean": 0.01245,
    "staleness/lag_mean": 3.25,
    "staleness/lag_p90": 6.0,
    "staleness/lag_max": 7.0,
    "throughput/learner_tokens_per_s": 5210.4,
    "throughput/learner_busy_fraction": 0.712,
    "throughput/learner_idle/few_groups": 0.2,
    "throughput/learner_idle/other": 0.088,
    "throughput/generator_tokens_per_s": 10000.0,
    "throughput/generator_busy_fraction": 0.6,
    "replay/idle/ahead_full": 90.0,
    "replay/idle/version_too_old": 8.0,
    "generator/g0/tokens_per_s": 4900.0,
    "generator/g0/busy_fraction": 0.5,
    "generator/g2/tokens_per_s": 5100.0,
    "sentinel/g0/drift_z": 0.34,
    "sentinel/g10/drift_z": 12.5,
}


def generator(**changes: Any) -> dict[str, Any]:
    gauges = {"tokens": 1000.0, "busy_s": 5.0, "time": 100.0, "in_flight": 32.0, "loading": 0.0}
    gauges |= changes.pop("gauges", {})
    return {
        "held": [0, 56],
        "alive": True,
        "failures": 0,
        "gauges": gauges,
        "busy": [[1.0, 2.0]],
        "seen_s": 0.4,
    } | changes


def empty(**changes: Any) -> dict[str, Any]:
    """Replay has just been started."""
    state: dict[str, Any] = {
        "time": 1000.0, "run": "r", "uptime_s": 3.0, "restarts": 0, "failure": "", "first_failure": "",
        "total_updates": 120, "max_lag": 8, "sync_every": 4, "groups_per_update": 32, "capacity_bytes": 2147483648,
        "learner": {"ranks": 0, "seen_s": None}, "update": 0, "epoch": 0, "newest": None,
        "queue_depth": 0, "kept": 0, "taken": 0, "leased": 0, "bytes": 0, "peak_bytes": 0,
        "waits": {"count": 0, "seconds": 0.0}, "counters": {}, "idle": {}, "left_out": {}, "trained": {},
        "dropped": [], "waiting": "nothing was asked for", "generators": {}, "evaluations": [], "finished": False,
        "closed": False, "report": None, "update_s": None,
    }  # fmt: skip
    return state | changes


def full(**changes: Any) -> dict[str, Any]:
    """A run in the middle."""
    state = empty(
        uptime_s=130.0, update=57, newest=[0, 56], queue_depth=32, taken=64, leased=8, bytes=81153, update_s=0.92,
        learner={"ranks": 2, "seen_s": 0.2}, counters={"stale": 12, "lease_expired": 1, "malformed": 0},
        idle={"ahead_full": 100, "version_too_old": 10},
        generators={
            "g0": generator(), "g10": generator(held=[0, 48], failures=3),
            "g2": generator(alive=False, held=[0, 52], seen_s=75.0),
        },
        evaluations=[
            {"version": 20, "epoch": 0, "count": 800, "sampled_accuracy": 0.61, "greedy_accuracy": 0.7},
            {"version": 40, "epoch": 0, "count": 800, "sampled_accuracy": 0.81, "greedy_accuracy": 0.84},
        ],
        report={"update": 56, "epoch": 0, "values": RECORD, "time": 998.0, "alarms": []},
    )  # fmt: skip
    return state | changes
