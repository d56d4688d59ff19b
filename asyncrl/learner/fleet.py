"""From replay's state to metric values: queue, drops, generators, rates between two records."""

from __future__ import annotations

import math
from typing import Any

from asyncrl.learner.overlap import Overlap

_PASSED_ON = (
    "loads", "load_s", "load_failures", "in_flight", "reward_errors", "timeouts", "waits", "resampled",
    "retractions", "cached_tokens", "stale_prefix", "unsure_tokens",
)  # fmt: skip
"""Gauges and counters of a generator that are metrics as they are, where it has them."""


class FleetRates:
    """Turns cumulative counters into rates between two calls."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}
        self._idle: dict[str, float] = {}
        self._failed_loads = 0.0
        self.overlap = Overlap()

    def scalars(self, state: dict[str, Any], seconds: float) -> dict[str, float]:
        """Metrics of one record; seconds is the time since the last one."""
        out = {
            "replay/queue_depth": float(state["queue_depth"]),
            "replay/leased": float(state["leased"]),
            "replay/bytes": float(state["bytes"]),
        }
        for name, value in (("replay/kept", state.get("kept")), ("replay/peak_bytes", state.get("peak_bytes"))):
            out |= {name: float(value)} if value is not None else {}
        waits = state.get("waits") or {}
        out |= {"staleness/waits": float(waits.get("count", 0)), "staleness/wait_s": float(waits.get("seconds", 0.0))}
        out |= {f"replay/dropped/{k}": float(v) for k, v in state["counters"].items()}
        out |= {f"replay/idle/{k}": float(v) for k, v in state["idle"].items()}
        for side in ("left_out", "trained"):
            sums = state.get(side) or {}
            count = sums.get("count", 0)
            for key in ("length", "reward", "lag"):
                if count and key in sums:
                    out[f"staleness/{side}/{key}"] = sums[key] / count
            out[f"staleness/{side}/count"] = float(count)
        tokens = busy = 0.0
        alive = 0
        for name, g in sorted(state["generators"].items()):
            rates = self._generator(name, g, seconds)
            out |= {f"generator/{name}/{k}": v for k, v in rates.items()}
            tokens += rates["tokens_per_s"]
            if g.get("alive"):
                alive += 1
                busy += rates["busy_fraction"]
            self.overlap.busy((float(a), float(b)) for a, b in g.get("busy", ()))
        out["throughput/generator_tokens_per_s"] = tokens
        out["throughput/generator_busy_fraction"] = busy / alive if alive else 0.0
        out["generator/alive"] = float(alive)
        out["generator/failed_loads"] = self._failed_loads
        overlap = self.overlap.fraction()
        if not math.isnan(overlap):
            out["throughput/overlap_fraction"] = overlap
        return out

    def _generator(self, name: str, g: dict[str, Any], seconds: float) -> dict[str, float]:
        gauges = {k: float(v) for k, v in g.get("gauges", {}).items()}
        last = self._last.get(name, {})
        failures = gauges.get("load_failures", 0.0)
        known = self._last.get(name, {}).get("load_failures", 0.0)
        self._failed_loads += failures - known if failures >= known else failures
        # A restarted generator counts from zero again.
        if gauges.get("tokens", 0.0) < last.get("tokens", 0.0):
            last = {}
        # Gauges carry the sender's own clock, so rates do not depend on when they arrived.
        span = gauges.get("time", 0.0) - last.get("time", gauges.get("time", 0.0) - max(seconds, 1e-9))
        self._last[name] = gauges
        held = g.get("held") or (0, 0)
        out = {"version": float(held[1]), "alive": float(bool(g.get("alive")))}
        for key, rate in (("tokens", "tokens_per_s"), ("busy_s", "busy_fraction")):
            delta = gauges.get(key, 0.0) - last.get(key, 0.0)
            out[rate] = delta / span if span > 1e-6 else self._rate(name, rate)
            self._last.setdefault(f"{name}#rates", {})[rate] = out[rate]
        for key in _PASSED_ON:
            if key in gauges:
                out[key] = gauges[key]
        return out

    def _rate(self, name: str, rate: str) -> float:
        return self._last.get(f"{name}#rates", {}).get(rate, 0.0)
