"""From replay's state to metric values: queue, drops, generators, rates between two records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncrl.learner.idle import generator_idle
from asyncrl.learner.overlap import Overlap

_PASSED_ON = (
    "loads", "load_s", "load_failures", "in_flight", "reward_errors", "timeouts", "waits", "resampled",
    "retractions", "cached_tokens", "stale_prefix", "unsure_tokens", "verifier_errors", "verifier_timeouts",
    "reused_tokens", "conversations",
)  # fmt: skip
"""Gauges and counters of a generator that are metrics as they are, where it has them."""

_SUMMED = {f"verifier_{what}": f"verifier/{what}" for what in ("errors", "timeouts", "restarts")}
"""Counters of a generator -> metrics that sum them over all generators, those that ended included."""

_FOR_AGE = ("stale", "overtaken", "stale_response", "doomed_lease")
"""Reasons to drop that have a value in every record, so that a chart says "none" and not nothing."""


class FleetRates:
    """Turns cumulative counters into rates between two calls."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}
        self._before: dict[str, dict[str, float]] = {}
        self._failed_loads = 0.0
        self._sums = dict.fromkeys(_SUMMED.values(), 0.0)
        self.overlap = Overlap()

    def begin(self, state: Mapping[str, Any]) -> None:
        """The state before the first record, so that its counts are of this learner's time only."""
        for what in ("counters", "idle", "take_waits"):
            self.since(what, state.get(what) or {})

    def scalars(self, state: dict[str, Any], seconds: float) -> dict[str, float]:
        """Metrics of one record; seconds is the time since the last one."""
        dropped, refused = self.since("counters", state["counters"]), self.since("idle", state["idle"]) or {}
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
        for name, count in (state.get("data") or {}).items():
            source, _, reason = name.partition("/")
            # Held-out sets have a name more: eval/<set>/<reason>.
            if source and reason and "/" not in reason:
                out[f"data/{reason}"] = out.get(f"data/{reason}", 0.0) + count
        if dropped is not None:
            out |= {f"replay/dropped_now/{k}": v for k, v in (dict.fromkeys(_FOR_AGE, 0.0) | dropped).items()}
            out |= {f"replay/refused_per_s/{k}": v / max(seconds, 1e-9) for k, v in refused.items()}
        for side in ("left_out", "trained"):
            sums = state.get(side) or {}
            count = sums.get("count", 0)
            for key in ("length", "reward", "lag"):
                if count and key in sums:
                    out[f"staleness/{side}/{key}"] = sums[key] / count
            out[f"staleness/{side}/count"] = float(count)
        tokens = 0.0
        living: list[dict[str, float]] = []
        for name, g in sorted(state["generators"].items()):
            rates = self._generator(name, g, seconds)
            out |= {f"generator/{name}/{k}": v for k, v in rates.items() if k != "loading"}
            tokens += rates["tokens_per_s"]
            if g.get("alive"):
                living.append(rates)
            self.overlap.busy((float(a), float(b)) for a, b in g.get("busy", ()))
        out["throughput/generator_tokens_per_s"] = tokens
        out["generator/alive"] = float(len(living))
        out |= _spread(living, refused)
        out["generator/failed_loads"] = self._failed_loads
        out |= self._sums
        overlap = self.overlap.fraction()
        if not math.isnan(overlap):
            out["throughput/overlap_fraction"] = overlap
        return out

    def since(self, what: str, counters: Mapping[str, float]) -> dict[str, float] | None:
        """How much each counter grew since the last call for `what`; None in the first, which has nothing before it."""
        before, self._before[what] = self._before.get(what), {k: float(v) for k, v in counters.items()}
        if before is None:
            return None
        # A replay that was started again may have lost the last counts.
        return {k: max(0.0, v - before.get(k, 0.0)) for k, v in self._before[what].items()}

    def _generator(self, name: str, g: dict[str, Any], seconds: float) -> dict[str, float]:
        gauges = {k: float(v) for k, v in g.get("gauges", {}).items()}
        last = self._last.get(name, {})
        failures = gauges.get("load_failures", 0.0)
        known = self._last.get(name, {}).get("load_failures", 0.0)
        self._failed_loads += failures - known if failures >= known else failures
        for key, summed in _SUMMED.items():
            now, before = gauges.get(key, 0.0), self._last.get(name, {}).get(key, 0.0)
            self._sums[summed] += now - before if now >= before else now
        # A restarted generator counts from zero again.
        if gauges.get("tokens", 0.0) < last.get("tokens", 0.0):
            last = {}
        # Gauges carry the sender's own clock, so rates do not depend on when they arrived.
        span = gauges.get("time", 0.0) - last.get("time", gauges.get("time", 0.0) - max(seconds, 1e-9))
        self._last[name] = gauges
        held = g.get("held") or (0, 0)
        out = {"version": float(held[1]), "alive": float(bool(g.get("alive")))}
        out["failures"] = float(g.get("failures", 0))
        for key, rate in (("tokens", "tokens_per_s"), ("busy_s", "busy_fraction"), ("load_s", "loading")):
            delta = gauges.get(key, 0.0) - last.get(key, 0.0)
            out[rate] = delta / span if span > 1e-6 else self._rate(name, rate)
            # The sender reads its counters a moment before its clock.
            out[rate] = out[rate] if rate == "tokens_per_s" else min(1.0, out[rate])
            self._last.setdefault(f"{name}#rates", {})[rate] = out[rate]
        for key in _PASSED_ON:
            if key in gauges:
                out[key] = gauges[key]
        return out

    def _rate(self, name: str, rate: str) -> float:
        return self._last.get(f"{name}#rates", {}).get(rate, 0.0)


def _spread(living: list[dict[str, float]], refused: Mapping[str, float]) -> dict[str, float]:
    """Over the living generators: means of what their time goes to, and the slowest and fastest of them."""
    out = {"throughput/generator_busy_fraction": 0.0}
    idle: dict[str, float] = {}
    for g in living:
        out["throughput/generator_busy_fraction"] += g["busy_fraction"] / len(living)
        for reason, share in generator_idle(g["busy_fraction"], g["loading"], refused).items():
            idle[reason] = idle.get(reason, 0.0) + share / len(living)
    out |= {f"throughput/generator_idle/{k}": v for k, v in idle.items()}
    for key in ("version", "tokens_per_s") if living else ():
        values = [g[key] for g in living]
        out[f"generator/{key}_lowest"], out[f"generator/{key}_highest"] = min(values), max(values)
        out[f"generator/{key}_mean"] = sum(values) / len(values)
    return out
