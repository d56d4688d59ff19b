"""What one screen of `asyncrl status` says, as lines of text: from replay's state and what was derived of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Values = Mapping[str, Any]
Level = Literal["", "good", "warn", "bad"]
"""How a line is meant: without colour, warn and bad ones are marked with `!`."""

F2_BAD = 0.1
"""Sustained values of F(2) above this are the alarm of docs/metrics.md."""

SEEN_S = 5.0
"""A generator beats once a second; one that was heard longer ago than this is worth a word."""

IDLE = "nothing was asked for"
"""What a replay says of which no take was asked (asyncrl.replay.queue)."""

SHOWN = 0.01
"""Smaller shares of the time are left out."""

COLUMNS = ("generator", "version", "tok/s", "busy", "in flight", "failed", "drift z", "now")
"""Of the table of generators."""


class Line(NamedTuple):
    """One line: what it is about, what is known, and whether it should worry."""

    label: str
    text: str
    level: Level = ""


class Row(NamedTuple):
    """One generator, by COLUMNS."""

    cells: tuple[str, ...]
    level: Level


class Screen(NamedTuple):
    """All of it. share: of the updates that are made, None without an end; alarms: (what, remedy)."""

    title: str
    phase: Line
    share: float | None
    progress: str
    lines: list[Line]
    alarms: list[tuple[Line, str]]
    rows: list[Row]


def screen(name: str, address: str, state: Values, derived: Values) -> Screen:
    """The screen of a run by that name, at that address."""
    d = derived
    updates = d["updates"]
    total = updates["total"]
    level: Level = "good" if d["well"] else "bad"
    up = f"  replay up {duration(state['uptime_s'])}" if state.get("uptime_s") is not None else ""
    again = f", started again {state['restarts']} times" if state.get("restarts") else ""
    return Screen(
        title=f"{state.get('run') or name}  {address}{up}{again}",
        phase=Line("run", d["phase"], level),
        share=min(1.0, updates["done"] / total) if total else None,
        progress=_progress(updates),
        lines=[line for line in _lines(state, d) if line is not None],
        alarms=[_alarm(a) for a in d["alarms"]],
        rows=[_row(n, g) for n, g in d["generators"].items()],
    )


def _progress(updates: Values) -> str:
    done, total, each, eta = (updates[k] for k in ("done", "total", "seconds_each", "eta_s"))
    words = [f"{done}/{total}" if total else f"{done}"]
    if each is not None:
        words.append(f"{number(each)} s each")
    if eta:
        words.append(f"{duration(eta)} to go")
    return ", ".join(words)


def _lines(state: Values, d: Values) -> list[Line | None]:
    """Lines from the roles to what was dropped; None for one that has nothing to say."""
    return [
        Line("first failure", state["first_failure"], "warn") if state.get("first_failure") else None,
        _versions(state, d),
        _lag(d),
        Line("queue", _queue(state, d), ""),
        _learner(state, d),
        _fleet(d),
        *_record(d),
        *_accuracy(d),
        Line("dropped", _counts(d["dropped"]), "") if d["dropped"] else None,
        _tuned(state, d),
        *(Line("quarantine", f"{n}: {q['reason']} ({q['phase']})", "bad") for n, q in d["quarantine"].items()),
    ]


def _versions(state: Values, d: Values) -> Line:
    newest = state.get("newest")
    if newest is None:
        return Line("version", f"run epoch {state['epoch']}, none is published yet")
    held: dict[str, int] = {}
    for g in d["generators"].values():
        if g["alive"] and g["version"] is not None:
            held[version(g["version"])] = held.get(version(g["version"]), 0) + 1
    words = ", ".join(f"{v} by {n}" for v, n in sorted(held.items(), key=lambda item: -item[1])) or "by none"
    return Line("version", f"newest {version(newest)} (epoch.update), held: {words}")


def _lag(d: Values) -> Line:
    lag = d["lag"]
    if lag["mean"] is None:
        return Line("lag", f"no record yet; at most {lag['limit']}")
    words = [f"{k} {number(lag[k])}" for k in ("mean", "p90", "max") if lag[k] is not None]
    return Line("lag", f"{', '.join(words)} of at most {lag['limit']} updates")


def _queue(state: Values, d: Values) -> str:
    cap = state.get("capacity_bytes")
    words = f"{state['queue_depth']} groups queued, {state['leased']} being sampled, {state['taken']} taken"
    words += f", {state['kept']} kept by generators" * bool(state.get("kept"))
    words += f"; {size(state['bytes'])}" + (f" of {size(cap)}" if cap else "")
    if not state.get("finished") and d["phase"] != "running" and state.get("waiting", IDLE) != IDLE:
        words += f"; the last take waits or waited for: {state['waiting']}"
    return words


def _learner(state: Values, d: Values) -> Line:
    who = state.get("learner") or {}
    if who.get("seen_s") is None:
        return Line("learner", "not heard yet", "warn")
    words = [f"{who['ranks']} rank{'s' * (who['ranks'] != 1)}", *_rate(d, "learner")]
    idle = _shares(d["idle"]["learner"])
    words.append(f"idle: {idle}" if idle else "")
    words.append(f"heard {duration(who['seen_s'])} ago")
    return Line("learner", ", ".join(w for w in words if w), "bad" if d["phase"].startswith("silent") else "")


def _fleet(d: Values) -> Line:
    fleet = d["generators"].values()
    alive = sum(g["alive"] for g in fleet)
    words = [f"{alive} of {len(fleet)} alive", *_rate(d, "generators")]
    idle = d["idle"]
    if idle["generators"]:
        words.append(f"no lease because {_shares(idle['generators'])} (since {idle['generators_over']})")
    words += [f"{len(d['quarantine'])} in quarantine"] if d["quarantine"] else []
    level: Level = "bad" if not alive else "warn" if alive < len(fleet) or d["quarantine"] else ""
    return Line("generators", ", ".join(words), level)


def _rate(d: Values, side: str) -> list[str]:
    tokens, busy = d["tokens_per_s"][side], d["busy"][side]
    words = [f"{tokens:,.0f} tok/s"] if tokens is not None else []
    return [*words, f"busy {share(busy)}"] if busy is not None else words


def _record(d: Values) -> list[Line | None]:
    x = d["learning"]
    if d["record_age_s"] is None:
        return [Line("learning", "no record yet")]
    shown = (("reward", "reward"), ("entropy", "entropy"), ("length", "response_length"), ("grad norm", "grad_norm"))
    learning = [f"{word} {number(x[key])}" for word, key in shown if x[key] is not None]
    mismatch = [f"{word} {number(x[key])}" for word, key in (("KL k1", "kl_k1"), ("k3", "kl_k3")) if x[key] is not None]
    mismatch += [f"F(2) {share(x['f_2'])}"] if x["f_2"] is not None else []
    mismatch += [f"ESS {share(x['ess'])}"] if x["ess"] is not None else []
    mismatch += [f"drift {number(x['drift'])}"] if x["drift"] is not None else []
    skipped = x["skipped_updates"]
    learning += [f"{skipped:.0f} skipped"] if skipped else []
    return [
        Line("learning", f"{', '.join(learning)}; record of {duration(d['record_age_s'])} ago"),
        Line("mismatch", ", ".join(mismatch), "bad" if (x["f_2"] or 0.0) > F2_BAD else "") if mismatch else None,
    ]


def _accuracy(d: Values) -> list[Line | None]:
    """All sets in one line, and one for each where there are several, or several samples."""
    a = d["accuracy"]
    if a is None:
        return []
    words = [f"{word} {share(a[word])}" for word in ("sampled", "greedy") if a[word] is not None]
    cut = ", cut short" * (a["status"] == "cut short")
    lines: list[Line | None] = [Line("held-out", f"accuracy {', '.join(words)} at update {a['version']}{cut}")]
    several = len(a["sets"]) > 1 or any("avg_at_1" not in numbers for numbers in a["sets"].values())
    return lines + [Line("", f"{name}: {_set(numbers)}") for name, numbers in a["sets"].items()] * several


def _set(numbers: Mapping[str, float]) -> str:
    """One held-out set: avg@k with its interval, the largest pass@k, maj@k, greedy, what was cut off."""
    at = {m: sorted(int(k[len(m) :]) for k in numbers if k.startswith(m)) for m in ("avg_at_", "pass_at_", "maj_at_")}
    words = []
    for measure, found in at.items():
        if found and (measure == "avg_at_" or found[-1] > 1):
            words.append(f"{measure.removesuffix('_at_')}@{found[-1]} {share(numbers[f'{measure}{found[-1]}'])}")
    words += [f"greedy {share(numbers['greedy'])}"] if "greedy" in numbers else []
    if words and "ci_low" in numbers and "ci_high" in numbers:
        words[0] += f" ({share(numbers['ci_low'])} to {share(numbers['ci_high'])})"
    words += [f"truncated {share(numbers['truncated'])}"] if numbers.get("truncated") else []
    words += [f"{numbers['failed']:.0f} without an answer"] if numbers.get("failed") else []
    return ", ".join(words) or "no answer"


def _tuned(state: Values, d: Values) -> Line | None:
    words = []
    for key, s in d["settings"].items():
        words.append(f"{key}={json.dumps(s['value'])} (config: {json.dumps(s['config'])})")
    tuned = state.get("tuned") or {}
    late = "; the newest change waits for the next take" * (tuned.get("seq", 0) > tuned.get("in_force", 0))
    return Line("tuned", ", ".join(words) + late) if words else None


def _alarm(a: Values) -> tuple[Line, str]:
    return Line(f"{a['name']}", f"{a['text']} (since update {a['since']})", "bad"), str(a["remedy"])


def _row(name: str, g: Values) -> Row:
    now, level = _now(g)
    cells = (
        name,
        version(g["version"]) if g["version"] is not None else "-",
        f"{g['tokens_per_s']:,.0f}" if g["tokens_per_s"] is not None and g["alive"] else "-",
        share(g["busy"]) if g["busy"] is not None and g["alive"] else "-",
        f"{g['in_flight']:.0f}" if g["in_flight"] is not None and g["alive"] else "-",
        f"{g['failures']:.0f}",
        f"{g['drift_z']:.1f}" if g["drift_z"] is not None else "-",
        now,
    )
    return Row(cells, level)


def _now(g: Values) -> tuple[str, Level]:
    """What a generator does, and whether it should worry."""
    if g["quarantined"]:
        return f"quarantine: {g['quarantined']}", "bad"
    if not g["alive"]:
        return f"dead for {duration(g['seen_s'] or 0.0)}", "bad"
    words = "loading weights" if g["loading"] else "alive"
    words += f", {g['behind']:.0f} behind" if g["behind"] else ""
    if g["seen_s"] is not None and g["seen_s"] > SEEN_S:
        return f"{words}, heard {duration(g['seen_s'])} ago", "warn"
    return words, ""


def _counts(counters: Mapping[str, float]) -> str:
    return ", ".join(f"{k} {v:,}" for k, v in sorted(counters.items(), key=lambda item: -item[1]))


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{k} {share(v)}" for k, v in shares.items() if v >= SHOWN)


def version(value: Any) -> str:
    """(epoch, update) as docs write it."""
    return f"{value[0]}.{value[1]}"


def number(value: float) -> str:
    """Four significant digits at most."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def share(value: float) -> str:
    """As percent."""
    percent = 100 * value
    if 99 < percent < 100:
        return f"{percent:.4g}%"
    return f"{percent:.0f}%" if percent >= 10 or percent == 0 else f"{percent:.2g}%"


def size(num_bytes: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds in words of one or two units."""
    s = round(seconds)
    if s < 120:
        return f"{s} s"
    if s < 7200:
        return f"{s // 60} min" + (f" {s % 60} s" if s < 600 else "")
    hours = s // 3600
    return f"{hours} h {s % 3600 // 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
