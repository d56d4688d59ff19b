"""The drift sentinel: judges each generator by its last responses against the rest of the fleet. On rank 0.

Residuals are made when responses come, against what the rest sampled in the last POOL updates at the same lag and
length (algos.outlier), so that neither the training nor a generator's own pace moves them. Knows the update's table and
the state of replay; sends nothing itself. A learner that is started again begins with empty windows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.algos.outlier import Rows, Summary, fleet_z, residuals, robust_z, summarise
from asyncrl.learner.table import Table
from asyncrl.sections.sentinel import SentinelSection
from asyncrl.types import fewest_sound
from asyncrl.wire import AlarmMsg

POOL = 8
"""Updates whose responses are a reference."""
POOL_ROWS = 16384
LEAST_SCALE = 0.01
"""Of |log-ratio|: below it two engines that compute alike differ by rounding only."""
READMIT_SHARE = 0.65
"""A probe is clean below this share of z. It has half a window of responses, where a fault at z has 0.7 z."""


class Order(NamedTuple):
    """What replay is to be told: quarantine a generator (sound is False) or let it in again. boot: of its process."""

    generator_id: str
    sound: bool
    reason: str
    boot: str = ""


class Part(NamedTuple):
    """Responses of an update, as far as they are judged. names [n] of generators; groups [n] numbers of prompts;
    values [n] by signal, NaN where a response has none."""

    names: NDArray[np.str_]
    groups: NDArray[np.int64]
    lag: NDArray[np.float64]
    length: NDArray[np.float64]
    values: dict[str, NDArray[np.float64]]

    def where(self, rows: NDArray[np.bool_]) -> Part:
        """Some of them."""
        values = {k: v[rows] for k, v in self.values.items()}
        return Part(self.names[rows], self.groups[rows], self.lag[rows], self.length[rows], values)


def part_of(table: Table, first_group: int = 0) -> Part:
    """The responses with a loss token. Under replayed routes the drift is that of the replayed pass, for all alike."""
    names, columns = table.names, table.columns
    used = columns["tokens"] > 0
    numbers = {g: first_group + i for i, g in enumerate(dict.fromkeys(n[1] for n in names))}
    return Part(
        np.asarray([n[2] for n in names], np.str_),
        np.asarray([numbers[n[1]] for n in names], np.int64),
        columns["lag_sum"] / np.maximum(columns["tokens"], 1),
        columns["tokens"],
        {"drift": columns["drift"], "log_ratio": columns["abs_log_ratio"]},
    ).where(used)


def signal_of(part: Part, signal: str, scale: float) -> NDArray[np.float64]:
    """The numbers that are compared. |log-ratio| x as x / (x + scale), the scale being the median: single responses
    reach 60 times that, and would be the whole mean."""
    value = part.values[signal]
    return value if signal == "drift" else value / (value + scale)


def scale_of(part: Part) -> float:
    """The median |log-ratio|."""
    value = part.values["log_ratio"]
    return max(LEAST_SCALE, float(np.median(value))) if len(value) else LEAST_SCALE


def joined(parts: Sequence[Part]) -> Part:
    """All of them, in order."""
    values = {k: np.concatenate([p.values[k] for p in parts]) for k in parts[0].values}
    return Part(
        np.concatenate([p.names for p in parts]),
        np.concatenate([p.groups for p in parts]),
        np.concatenate([p.lag for p in parts]),
        np.concatenate([p.length for p in parts]),
        values,
    )


class Window:
    """The last responses of one generator: residual, signal and group of each."""

    def __init__(self, size: int) -> None:
        self._rows: deque[tuple[float, float, int]] = deque(maxlen=size)

    def add(self, residual: NDArray[np.float64], signal: NDArray[np.float64], groups: NDArray[np.int64]) -> None:
        """Add responses; those without a reference have no residual and are left out."""
        known = ~np.isnan(residual)
        self._rows.extend(zip(residual[known].tolist(), signal[known].tolist(), groups[known].tolist(), strict=True))

    def resize(self, size: int) -> None:
        """Hold the last `size` responses from now on."""
        self._rows = deque(self._rows, maxlen=size)

    def summary(self) -> Summary:
        """What is in it."""
        rows = np.asarray(self._rows, np.float64).reshape(-1, 3)
        return summarise(rows[:, 0], rows[:, 1], rows[:, 2].astype(np.int64))


class Sentinel:
    """Windows of a fleet, and what follows from them."""

    def __init__(self, settings: SentinelSection) -> None:
        self._s = settings
        self._pool: deque[Part] = deque(maxlen=POOL)
        self._windows: dict[str, dict[str, Window]] = {}
        self._boots: dict[str, str] = {}
        self._out: set[str] = set()
        self._since: dict[str, int] = {}
        self._alarms: list[AlarmMsg] = []
        self._num_groups = 0
        self._z: dict[str, dict[str, float]] = {}

    def follow(self, settings: SentinelSection) -> bool:
        """Take over new settings. False while they switch it off: then nothing is kept, and no alarm is on."""
        if settings == self._s:
            return settings.enabled
        if not settings.enabled:
            self._pool.clear()
            self._windows, self._z, self._since, self._alarms = {}, {}, {}, []
        for windows in self._windows.values():
            for signal in set(windows) - set(settings.signals):
                del windows[signal]
            for window in windows.values():
                window.resize(settings.window)
        self._s = settings
        return settings.enabled

    def alarms(self) -> list[AlarmMsg]:
        """Those that are on: of generators that are faulty, out, or cannot be told apart."""
        return list(self._alarms)

    def scalars(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Metrics of the last update."""
        out = {f"sentinel/{g}/{signal}_z": z for g, zs in self._z.items() for signal, z in zs.items()}
        alive = [g for g, s in state["generators"].items() if s["alive"]]
        return out | {f"sentinel/{g}/quarantined": float(g in self._out) for g in alive}

    def observe(self, update: int, table: Table, probes: Table | None, state: Mapping[str, Any]) -> list[Order]:
        """The responses of an update, those of probes, and the state of replay; what replay is to be told."""
        self._follow(state)
        part = part_of(table, self._num_groups)
        self._num_groups += len(table)
        part = part.where(~np.isin(part.names, list(self._out)))
        self._pool.append(part)
        pool = self._trimmed()
        self._fill(pool, len(part.names))
        summaries = self._summaries()
        self._z = self._judged(summaries)
        orders = [self._probe(g, probes, pool, summaries) for g in sorted(self._out)] if probes is not None else []
        faulty = {g: why for g in self._z if (why := self._fault(g))}
        orders += self._act(faulty, state)
        self._note(update, faulty, orders, state)
        return [o for o in orders if o is not None]

    def _follow(self, state: Mapping[str, Any]) -> None:
        """Windows of generators that came back, or are another process now, begin anew."""
        out = set(state.get("quarantine", {}))
        for name, generator in state["generators"].items():
            boot = generator.get("boot", "")
            if (name in self._out and name not in out) or self._boots.get(name, boot) != boot:
                self._windows.pop(name, None)
            self._boots[name] = boot
        for name in out | {n for n in self._windows if n not in state["generators"]}:
            self._windows.pop(name, None)
        self._out = out

    def _trimmed(self) -> Part:
        while len(self._pool) > 1 and sum(len(p.names) for p in self._pool) > POOL_ROWS:
            self._pool.popleft()
        for i, part in enumerate(self._pool):
            known = ~np.isin(part.names, list(self._out))
            if not known.all():
                self._pool[i] = part.where(known)
        return joined(list(self._pool))

    def _fill(self, pool: Part, num_new: int) -> None:
        """Residuals of the last num_new responses, into the windows of their generators."""
        for signal in self._s.signals:
            value = signal_of(pool, signal, scale_of(pool))
            known = ~np.isnan(value)
            new = np.arange(len(value)) >= len(value) - num_new
            _, member = np.unique(pool.names, return_inverse=True)
            rows = Rows(member[known], value[known], pool.lag[known], pool.length[known])
            found = np.full(len(value), np.nan)
            found[known] = residuals(rows, new[known])
            for name in np.unique(pool.names[new]).tolist():
                mine = new & (pool.names == name)
                self._window(name, signal).add(found[mine], value[mine], pool.groups[mine])

    def _window(self, name: str, signal: str) -> Window:
        return self._windows.setdefault(name, {}).setdefault(signal, Window(self._s.window))

    def _summaries(self) -> dict[str, dict[str, Summary]]:
        """By signal and generator, of those with enough responses."""
        out: dict[str, dict[str, Summary]] = {signal: {} for signal in self._s.signals}
        for name, windows in self._windows.items():
            for signal, window in windows.items():
                summary = window.summary()
                if summary.num >= self._s.min_responses:
                    out[signal][name] = summary
        return out

    def _judged(self, summaries: Mapping[str, Mapping[str, Summary]]) -> dict[str, dict[str, float]]:
        """z by generator and signal.

        Of two, each is the other's only reference: the first updates, in which one of them may send nearly everything,
        made large z of small samples. So both windows must be full.
        """
        out: dict[str, dict[str, float]] = {}
        for signal, fleet in summaries.items():
            few = len(fleet) < 2 or (len(fleet) == 2 and min(s.num for s in fleet.values()) < self._s.window)
            for name, z in () if few else fleet_z(fleet).items():
                out.setdefault(name, {})[signal] = z
        return {name: with_joint(zs) for name, zs in out.items()}

    def _fault(self, name: str) -> str:
        """What is wrong with a generator in words, "" when it is sound."""
        high = {signal: z for signal, z in self._z[name].items() if z > self._s.z}
        return _words(high)

    def _probe(
        self, name: str, probes: Table | None, pool: Part, summaries: Mapping[str, Mapping[str, Summary]]
    ) -> Order | None:
        """The verdict on what a quarantined generator sampled as a probe; None without one or without a reference."""
        if probes is None:
            return None
        part = part_of(probes, -len(probes) - 1)
        part = part.where(part.names == name)
        if not len(part.names):
            return None
        both, zs = joined([pool, part]), dict[str, float]()
        for signal in self._s.signals:
            value = signal_of(both, signal, scale_of(pool))
            known, mine = ~np.isnan(value), both.names == name
            if not (known & mine).any():
                continue
            rows = Rows(mine[known].astype(np.int64), value[known], both.lag[known], both.length[known])
            residual = residuals(rows, mine[known])
            judged = ~np.isnan(residual)
            own = summarise(residual[judged], rows.value[judged], both.groups[known][judged])
            others = [s for other, s in summaries[signal].items() if other != name] or _bare(rows, both, known, mine)
            zs[signal] = robust_z(own, others)
        zs = {k: z for k, z in zs.items() if not math.isnan(z)}
        if not zs:
            return None
        self._z[name] = zs = with_joint(zs)
        high = {k: z for k, z in zs.items() if z > READMIT_SHARE * self._s.z}
        num = sum(n[2] == name for n in probes.names)
        words = f"a probe of {num} responses"
        text = f"{words} is clean" if not high else f"{words} still has {_words(high)}"
        # Updates go on while it is sampled: what is too old to train is too old to judge.
        text += f"; {len(part.names)} of them were young enough" * (len(part.names) < num)
        return Order(name, not high, text, self._boots.get(name, ""))

    def _act(self, faulty: Mapping[str, str], state: Mapping[str, Any]) -> list[Order | None]:
        """Quarantine the worst ones, as long as enough generators remain."""
        if self._s.action == "alarm" or len(self._z.keys() - self._out) < self._s.min_generators:
            return []
        alive = {g for g, s in state["generators"].items() if s["alive"]}
        left = len(alive - self._out) - fewest_sound(len(alive))
        worst = sorted(
            (g for g in faulty if g in alive and g not in self._out), key=lambda g: -max(self._z[g].values())
        )
        return [Order(g, False, faulty[g], self._boots.get(g, "")) for g in worst[: max(0, left)]]

    def _note(
        self, update: int, faulty: Mapping[str, str], orders: Sequence[Order | None], state: Mapping[str, Any]
    ) -> None:
        """The alarms that are on from now."""
        told = {o.generator_id: o for o in orders if o is not None}
        texts: dict[str, tuple[str, str]] = {}
        judged = len(self._z.keys() - self._out)
        for name, why in faulty.items():
            if name not in self._out:
                texts[name] = _faulty(name, why, self._s, judged, name in told)
        for name, case in state.get("quarantine", {}).items():
            if not (name in told and told[name].sound):
                texts[name] = _quarantined(name, case)
        self._since = {name: self._since.get(name, update) for name in texts}
        self._alarms = [AlarmMsg(f"generator/{n}", self._since[n], *texts[n]) for n in sorted(texts)]


def with_joint(zs: dict[str, float]) -> dict[str, float]:
    """Also the sum of two by sqrt(2), which is a z again: the signals are nearly independent (Stouffer's method)."""
    return zs | ({"joint": sum(zs.values()) / math.sqrt(2)} if len(zs) == 2 else {})


def _bare(rows: Rows, both: Part, known: NDArray[np.bool_], mine: NDArray[np.bool_]) -> list[Summary]:
    """Others without windows yet: all of the pool as one member that is its own reference."""
    rest = ~mine[known]
    value = rows.value[rest]
    if len(value) < 2:
        return []
    groups: NDArray[np.int64] = both.groups[known][rest]
    summary = summarise(value - value.mean(), value, groups)
    return [summary._replace(mean=0.0)]


def _words(high: Mapping[str, float]) -> str:
    names = {"drift": "router drift", "log_ratio": "|log-ratio|", "joint": "both together"}
    return " and ".join(f"{names[k]} far above the rest of the fleet at equal lag (z {z:.1f})" for k, z in high.items())


def _faulty(name: str, why: str, s: SentinelSection, judged: int, told: bool) -> tuple[str, str]:
    """Text and remedy of a faulty generator that is not in quarantine yet."""
    text = f"generator {name}: {why}; its weights or its routers are not what the learner published"
    if told:
        return f"{text}; it is quarantined now", "wait for its re-sync and probe" if s.action == "resync" else _RESTART
    if s.action == "alarm":
        return text, f"restart {name}, or set sentinel.action=resync"
    if judged < s.min_generators:
        return (
            f"{text}, or those of the other one: {judged} generators can be compared, and it takes "
            f"sentinel.min_generators={s.min_generators} to tell which one is wrong"
        ), "restart both, the one with the higher drift first"
    return f"{text}; it stays in, because half of the living generators must remain", f"restart {name}"


_RESTART = "restart it: a new process is probed and let in again"


def _quarantined(name: str, case: Mapping[str, Any]) -> tuple[str, str]:
    text = f"generator {name} is in quarantine ({case['phase']}): {case['reason']}"
    if case["phase"] == "set_aside":
        return f"{text}; {case['resyncs']} re-syncs did not help", _RESTART
    return f"{text}; re-syncs so far: {case['resyncs']}", "wait for its probe, or restart it"
