"""From replay's state to the numbers that people ask for: progress, rates, lag, what idles and why. Pure.

`asyncrl status --json` prints them; docs/status.md names the keys. What is not known (yet) is None.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

State = Mapping[str, Any]
Values = dict[str, Any]

SILENT_S = 30.0
"""A learner that was not heard for this long, and for SILENT_UPDATES updates, is said to be silent."""
SILENT_UPDATES = 5

LEARNING = {
    "reward": "policy/reward",
    "entropy": "policy/entropy",
    "response_length": "policy/response_length",
    "kl_k1": "mismatch/kl_k1",
    "kl_k3": "mismatch/kl_k3",
    "f_2": "mismatch/f_2",
    "ess": "mismatch/ess",
    "grad_norm": "optim/grad_norm",
    "lr": "optim/lr",
    "drift": "drift/mean",
    "skipped_updates": "optim/skipped_updates",
}
"""Of the last record, by the name shown."""

_BAD = ("failed", "silent", "no generator")


def derive(state: State, before: State | None = None) -> Values:
    """Derived values of a state. before: an earlier one of the same run, for rates since then."""
    report = state.get("report") or {}
    values: Values = report.get("values") or {}
    since = _since(state, before)
    generators = _generators(state, before if since else None, values)
    idle, over = _idle(state, before if since else None, values)
    known = [g for g in generators.values() if g["alive"]]
    rates = [g["tokens_per_s"] for g in known if g["tokens_per_s"] is not None]
    busy = [g["busy"] for g in known if g["busy"] is not None]
    return {
        "phase": phase(state),
        "well": not state.get("failure") and not phase(state).startswith(_BAD),
        "since_s": since,
        "updates": {"done": state["update"], "total": state.get("total_updates") or None} | _pace(state),
        "lag": {k: _number(values, f"staleness/lag_{k}") for k in ("mean", "p90", "max")}
        | {"limit": state.get("max_lag")},
        "tokens_per_s": {
            "generators": sum(rates) if rates else _number(values, "throughput/generator_tokens_per_s"),
            "learner": _number(values, "throughput/learner_tokens_per_s"),
        },
        "busy": {
            "generators": sum(busy) / len(busy) if busy else _number(values, "throughput/generator_busy_fraction"),
            "learner": _number(values, "throughput/learner_busy_fraction"),
        },
        "idle": {"generators": idle, "generators_over": over, "learner": _under(values, "throughput/learner_idle/")},
        "learning": {name: _number(values, key) for name, key in LEARNING.items()},
        "accuracy": _accuracy(state),
        "dropped": {k: v for k, v in sorted(state["counters"].items()) if v},
        "settings": _settings(state),
        "alarms": list(report.get("alarms") or ()),
        "quarantine": dict(state.get("quarantine") or {}),
        "record_age_s": max(0.0, state["time"] - report["time"]) if report and "time" in state else None,
        "generators": generators,
    }


def phase(state: State) -> str:
    """What the run is doing now, in words."""
    learner = state.get("learner") or {}
    seen_s = learner.get("seen_s")
    alive = sum(bool(g.get("alive")) for g in state["generators"].values())
    if state.get("failure"):
        return f"failed: {state['failure']}"
    if state.get("finished"):
        return "finished"
    if state.get("closed"):
        return "made its last update; an evaluation is open"
    if seen_s is None:
        return "waiting for the learner"
    if seen_s > max(SILENT_S, SILENT_UPDATES * (state.get("update_s") or 0.0)):
        return f"silent: the learner was not heard for {seen_s:.0f} s (a long step, or it is gone)"
    if state.get("newest") is None:
        return "starting: no version is published yet"
    if not alive:
        return "no generator is alive" if state["generators"] else "waiting for the first generator"
    if is_paused(state):
        return "paused: no version is published; asyncrl tune RUN weights.paused=false goes on"
    return "running"


def is_paused(state: State) -> bool:
    """True while weights.paused is tuned: the learner stands still as soon as it needs a version."""
    return ((state.get("tuned") or {}).get("values") or {}).get("weights.paused") == "true"


def _since(state: State, before: State | None) -> float | None:
    """Seconds between the two, None when they cannot be compared."""
    if before is None or "time" not in state:
        return None
    span = float(state["time"]) - float(before.get("time", state["time"]))
    return span if span > 0 else None


def _pace(state: State) -> Values:
    update_s, total = state.get("update_s"), state.get("total_updates") or 0
    left = max(0, total - state["update"])
    eta = left * update_s if total and update_s is not None and not is_paused(state) else None
    return {"seconds_each": update_s, "eta_s": 0.0 if total and not left else eta}


def _generators(state: State, before: State | None, values: Mapping[str, Any]) -> dict[str, Values]:
    newest = state.get("newest")
    earlier = before["generators"] if before is not None else {}
    quarantine = state.get("quarantine") or {}
    out = {}
    for name, g in sorted(state["generators"].items(), key=lambda item: _natural(item[0])):
        gauges, held = g.get("gauges") or {}, g.get("held")
        rates = _rates(gauges, (earlier.get(name) or {}).get("gauges") or {})
        same = held is not None and newest is not None and held[0] == newest[0]
        tokens, busy = rates if rates else (None, None)
        out[name] = {
            "version": held,
            "behind": newest[1] - held[1] if held is not None and newest is not None and same else None,
            "tokens_per_s": _or(tokens, _number(values, f"generator/{name}/tokens_per_s")),
            "busy": _or(busy, _number(values, f"generator/{name}/busy_fraction")),
            "in_flight": gauges.get("in_flight"),
            "loading": bool(gauges.get("loading")),
            "failures": g.get("failures", 0),
            "load_failures": gauges.get("load_failures", 0),
            "alive": bool(g.get("alive")),
            "seen_s": g.get("seen_s"),
            "drift_z": _number(values, f"sentinel/{name}/drift_z"),
            "log_ratio_z": _number(values, f"sentinel/{name}/log_ratio_z"),
            "quarantined": (quarantine.get(name) or {}).get("phase"),
        }
    return out


def _rates(now: Mapping[str, float], before: Mapping[str, float]) -> tuple[float, float] | None:
    """(tokens per second, busy share) between two heartbeats, None without two of one process."""
    span = now.get("time", 0.0) - before.get("time", math.inf)
    tokens = now.get("tokens", 0.0) - before.get("tokens", 0.0)
    if not before or span < 0.5 or tokens < 0:
        return None
    return tokens / span, min(1.0, max(0.0, now.get("busy_s", 0.0) - before.get("busy_s", 0.0)) / span)


def _idle(state: State, before: State | None, values: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """Why lease requests got less than asked for, as shares of them, and over which time: the first that has any."""
    now = state["idle"]
    record = {k.removeprefix("replay/idle/"): float(v) for k, v in values.items() if k.startswith("replay/idle/")}
    spans = [("the last look", before["idle"])] if before is not None else []
    spans += [("the last record", record)] if values else []
    for over, earlier in [*spans, ("the start", {})]:
        grown = {k: v - earlier.get(k, 0) for k, v in now.items() if v > earlier.get(k, 0)}
        if grown:
            total = sum(grown.values())
            shares = {k: v / total for k, v in sorted(grown.items(), key=lambda item: -item[1])}
            return shares, over
    return {}, ""


def _settings(state: State) -> dict[str, Values]:
    """Live settings that differ from the config: {"value", "config"} by key."""
    tuned = state.get("tuned") or {"values": {}, "config": {}}
    return {
        key: {"value": json.loads(text), "config": json.loads(tuned["config"][key])}
        for key, text in sorted(tuned["values"].items())
    }


def _accuracy(state: State) -> Values | None:
    """The last finished evaluation."""
    done = state.get("evaluations") or []
    if not done:
        return None
    e = max(done, key=lambda e: (e.get("epoch", 0), e.get("version", 0)))
    return {
        "sampled": _number(e, "sampled_accuracy"),
        "greedy": _number(e, "greedy_accuracy"),
        "version": e.get("version"),
        "count": e.get("count"),
        "status": e.get("status"),
        "sets": dict(e.get("sets") or {}),
    }


def _under(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    found = {k.removeprefix(prefix): float(v) for k, v in values.items() if k.startswith(prefix) and v > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) else None


def _or(value: float | None, other: float | None) -> float | None:
    return value if value is not None else other


def _natural(name: str) -> list[tuple[int, str]]:
    """g2 before g10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
