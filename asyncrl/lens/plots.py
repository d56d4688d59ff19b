"""The pictures of a report. Sole user of matplotlib, which draws into files only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.lens.measure import Responses

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
except ImportError as exc:  # pragma: no cover - an installation without it
    raise ConfigError(
        f"asyncrl drift draws with matplotlib, which cannot be imported ({exc}); install it with pip install matplotlib"
    ) from exc

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9730d", "#2a8a57", "#8a8f98"
COLOURS = (BLUE, ORANGE, GREEN, "#8a4fbf", "#b8324f", "#5f6b2d")
matplotlib.rcParams.update({"font.size": 9.5, "axes.titlesize": 10})
SIZE = (7.2, 4.0)
DPI = 130
LEAST_RATIO = 1e-4
"""Smaller values of a logarithmic axis are drawn here."""
MAX_POINTS = 4000
"""Points of a scatter plot; of more responses an even part is drawn."""

Numbers = Mapping[str, Any]


def draw(numbers: Numbers, pool: Responses, folder: Path) -> dict[str, Path]:
    """Write every picture that the numbers allow as PNG into a folder; paths by name, in the order of a report."""
    wanted: dict[str, Callable[[Any], None] | None] = {
        "drift_by_lag": lambda axes: _by(axes, numbers, pool, "lag"),
        "drift_by_age": lambda axes: _age(axes, numbers),
        "drift_by_length": lambda axes: _by(axes, numbers, pool, "length"),
        "drift_by_layer": lambda axes: _by_layer(axes, numbers),
        "drift_by_reward": lambda axes: _by(axes, numbers, pool, "reward"),
        "drift_by_log_ratio": lambda axes: _log_ratio(axes, pool),
        "agreement": (lambda axes: _agreement(axes, numbers)) if numbers["agreement"] else None,
        "agreement_by_lag": (lambda axes: _agreement_by_lag(axes, numbers)) if numbers["agreement"] else None,
    }
    out = {name: _one(folder / f"{name}.png", paint) for name, paint in wanted.items() if paint is not None}
    out["what_if"] = _what_if(folder / "what_if.png", numbers)
    if numbers["usage"]:
        out["usage"] = _usage(folder / "usage.png", numbers)
    return out


def _one(file: Path, paint: Callable[[Any], None]) -> Path:
    figure, axes = plt.subplots(figsize=SIZE)
    paint(axes)
    return _save(figure, file)


def _save(figure: Any, file: Path) -> Path:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=DPI)
    plt.close(figure)
    return file


def _by(axes: Any, numbers: Numbers, pool: Responses, what: str) -> None:
    """Every response as a dot, and the mean of every bin, also under the other policies."""
    values = {"lag": pool.lag, "length": pool.length, "reward": pool.reward}[what]
    rows = np.flatnonzero(pool.defined)
    rows = rows[:: max(1, len(rows) // MAX_POINTS)]
    lines = numbers[f"by_{what}"]
    at = [line["value"] for line in lines]
    step = float(np.diff(at).min()) if len(at) > 1 else 1.0
    # What has few values is spread a little to the sides, by a rule and not at random.
    spread = (np.arange(len(rows)) * 0.618 % 1 - 0.5) * (0.5 * step if len(np.unique(values)) <= 12 else 0.6)
    axes.plot(values[rows] + spread, pool.drift[rows], ".", ms=2.5, alpha=0.3, color=GREY, zorder=1, label="a response")
    axes.fill_between(at, [ln["p50"] for ln in lines], [ln["p90"] for ln in lines], color=BLUE, alpha=0.15, lw=0,
                      label="median to 90th percentile")  # fmt: skip
    axes.plot(at, [ln["drift"] for ln in lines], "o-", color=BLUE, label="mean, policy of the update")
    # Under another policy the lag at use says little about how far that policy is.
    for i, other in enumerate(numbers["against"] if what != "lag" else ()):
        means = [ln["against"][other] for ln in lines]
        axes.plot(at, means, "s--", color=_other(i), label=f"mean, policy of {_step(other)}")
    names = {"lag": "lag (updates)", "length": "response length (tokens)", "reward": "reward"}
    axes.set(xlabel=names[what], ylabel="drift", ylim=(0, _top(pool, numbers)))
    _legend(axes)


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _other(i: int) -> str:
    """Of a policy that is compared with; the first colour is that of the policy of the update."""
    return _colour(1 + i % (len(COLOURS) - 1))


def _legend(axes: Any) -> None:
    """Above the axes, where it covers nothing."""
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2)


def _age(axes: Any, numbers: Numbers) -> None:
    """One point per dump and policy: how far the policy is from the weights that sampled, and the mean drift."""
    own, others = numbers["dumps"], numbers["against"]
    axes.plot([d["lag"] for d in own], [d["drift"] for d in own], "o", color=BLUE, label="policy of the update")
    for i, other in enumerate(others):
        points = [(d["age"][other], d["against"][other]) for d in own]
        axes.plot(*zip(*points, strict=True), "s", color=_other(i), label=f"policy of {_step(other)}")
    axes.set(xlabel="updates between the weights that sampled and the policy", ylabel="mean drift of a dump")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _top(pool: Responses, numbers: Numbers) -> float:
    """Upper end of a drift axis: nearly all dots, and every mean."""
    lines = [*numbers["by_lag"], *numbers["by_length"], *numbers["by_reward"]]
    means: list[float] = [m for ln in lines for m in (ln["p90"], *ln["against"].values()) if np.isfinite(m)]
    return 1.1 * max(float(np.nanquantile(pool.drift, 0.995)), *means, 1e-3)


def _step(step: str) -> str:
    return (
        f"update {step}"
        if step.isdigit()
        else {"final": "the end of the run", "start": "the start model"}.get(step, step)
    )


def _by_layer(axes: Any, numbers: Numbers) -> None:
    lines, others = numbers["by_layer"], numbers["against"]
    at, width = np.arange(len(lines)), 0.8 / (1 + len(others))
    axes.bar(at, [ln["drift"] for ln in lines], width, color=BLUE, label="policy of the update")
    for i, other in enumerate(others):
        heights = [ln["against"][other] for ln in lines]
        axes.bar(at + (1 + i) * width, heights, width, color=_other(i), label=f"policy of {_step(other)}")
    _layers(axes, [ln["layer"] for ln in lines], at + 0.4 - width / 2)
    axes.set(xlabel="MoE layer", ylabel="mean drift")
    _legend(axes)


def _layers(axes: Any, layers: list[int], at: Any) -> None:
    """Ticks of layers, not more than 24 of them."""
    every = max(1, -(-len(layers) // 24))
    axes.set_xticks(np.asarray(at)[::every], [str(n) for n in layers][::every])


def _log_ratio(axes: Any, pool: Responses) -> None:
    rows = np.flatnonzero(pool.defined & ~np.isnan(pool.ratio))
    rows = rows[:: max(1, len(rows) // MAX_POINTS)]
    ratio = np.maximum(pool.ratio[rows], LEAST_RATIO)
    dots = axes.scatter(ratio, pool.drift[rows], s=5, c=pool.lag[rows], cmap="viridis", alpha=0.6, lw=0)
    axes.figure.colorbar(dots, ax=axes, label="lag (updates)")
    axes.set(xscale="log", xlabel=f"mean |log pi/mu| of the response (at least {LEAST_RATIO:g})", ylabel="drift")


def _agreement(axes: Any, numbers: Numbers) -> None:
    at = np.arange(len(numbers["layers"]))
    for i, pair in enumerate(_pairs(numbers)):
        shares = [ln["equal_sets"] for ln in pair["layers"]]
        axes.plot(at, shares, "o-", color=_colour(i), label=_pair(pair))
    _layers(axes, numbers["layers"], at)
    axes.set(xlabel="MoE layer", ylabel="tokens with equal expert sets")
    _legend(axes)


def _pairs(numbers: Numbers) -> list[Numbers]:
    """The pairs that a picture has room for: those with the rollout, else all."""
    return [p for p in numbers["agreement"] if "rollout" in p["between"]] or list(numbers["agreement"])


def _pair(pair: Numbers) -> str:
    words = {"own": "policy of the update", "rollout": "rollout"}
    one, two = (words.get(side, f"policy of {_step(side)}") for side in pair["between"])
    return f"{one} and {two}"


def _agreement_by_lag(axes: Any, numbers: Numbers) -> None:
    for i, pair in enumerate(_pairs(numbers)):
        lines = pair["by_lag"]
        shares = [ln["equal_sets"] for ln in lines]
        axes.plot([ln["value"] for ln in lines], shares, "o-", color=_colour(i), label=_pair(pair))
    axes.set(xlabel="lag (updates)", ylabel="tokens and layers with equal expert sets")
    _legend(axes)


def _what_if(file: Path, numbers: Numbers) -> Path:
    """Four panels over q, one line per number of buckets."""
    figure, grid = plt.subplots(2, 2, figsize=(9.6, 6.4))
    lines = [ln for ln in numbers["what_if"] if ln["count"]]
    panels = {
        "length (tokens)": lambda ln: ln["dropped"]["length"] - ln["kept"]["length"],
        "reward": lambda ln: ln["dropped"]["reward"] - ln["kept"]["reward"],
        "mean |log pi/mu|": lambda ln: ln["dropped"]["abs_log_ratio"] - ln["kept"]["abs_log_ratio"],
    }
    for axes, (name, value) in zip(grid.flat, panels.items(), strict=False):
        _over_q(axes, lines, value)
        axes.axhline(0, color=GREY, lw=0.8)
        axes.set(title=f"{name}: dropped minus kept", xlabel="q")
    axes = grid.flat[3]
    _over_q(axes, lines, lambda ln: ln["overlap"])
    chance = {ln["q"]: ln["by_chance"] for ln in lines}
    axes.plot(list(chance), list(chance.values()), "--", color=GREY, label="by chance")
    axes.set(title="overlap with the top q by |log pi/mu|", xlabel="q", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    return _save(figure, file)


def _over_q(axes: Any, lines: list[Numbers], value: Callable[[Numbers], float]) -> None:
    for i, buckets in enumerate(dict.fromkeys(ln["buckets"] for ln in lines)):
        mine = [ln for ln in lines if ln["buckets"] == buckets]
        word = "bucket" if buckets == 1 else "buckets"
        axes.plot([ln["q"] for ln in mine], [value(ln) for ln in mine], "o-", ms=4, color=_colour(i),
                  label=f"{buckets} {word}")  # fmt: skip


def _usage(file: Path, numbers: Numbers) -> Path:
    """Change of every expert's share, layer by layer, one panel per policy."""
    found = numbers["usage"]
    figure, grid = plt.subplots(len(found), 1, figsize=(8.4, 0.8 + 2.6 * len(found)), squeeze=False)
    for axes, one in zip(grid.flat, found, strict=True):
        change = np.asarray([np.subtract(ln["after"], ln["before"]) for ln in one["layers"]])
        limit = max(float(np.abs(change).max()), 1e-6)
        picture = axes.imshow(100 * change, cmap="RdBu_r", vmin=-100 * limit, vmax=100 * limit, aspect="auto")
        layers = [ln["layer"] for ln in one["layers"]]
        every = max(1, -(-len(layers) // 16))
        axes.set_yticks(np.arange(len(layers))[::every], [str(n) for n in layers][::every])
        dead = [(e, i) for i, ln in enumerate(one["layers"]) for e in ln["newly_dead"]]
        if dead:
            axes.plot(*zip(*dead, strict=True), "kx", ms=6)
        axes.set(
            title=f"from the policies of the dumps to that of {_step(one['after'])}",
            xlabel="expert",
            ylabel="MoE layer",
        )
        figure.colorbar(picture, ax=axes, label="change of share (points)")
    return _save(figure, file)
