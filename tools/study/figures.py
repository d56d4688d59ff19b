"""The curves and dots of the study as PNG. Knows results, no prose."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import fmean, median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from study.plan import METHODS
from study.results import Result
from study.tables import estimate, grouped, probe_values

Methods = Mapping[str, Mapping[int, Result]]

_PALETTE = plt.get_cmap("tab20").colors
COLOURS = dict(zip(METHODS, cycle(_PALETTE[::2] + _PALETTE[1::2]), strict=False))
LOGARITHMIC = ("kl_k3", "gradient norm")
SMOOTH = 5
"""Updates that a curve is averaged over."""


def png(figure: Figure) -> str:
    """The figure as the src of an image; it is closed."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=80, bbox_inches="tight")
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def curves(regime: str, methods: Methods) -> Figure:
    """Reward, kl, F(2), gradient norm, drift and lag against the update: mean and range over seeds."""
    names = ("reward", "kl_k3", "F(2)", "gradient norm", "drift", "lag")
    figure, axes = plt.subplots(2, 3, figsize=(15, 7), sharex=True)
    for axis, name in zip(axes.flat, names, strict=True):
        for method, by_seed in methods.items():
            lines = [smooth(dict(r.curves[name])) for r in by_seed.values()]
            shared = sorted(set.intersection(*(set(line) for line in lines)))
            axis.plot(shared, [fmean(line[u] for line in lines) for u in shared], label=method, color=COLOURS[method])
            low, high = ([f(line[u] for line in lines) for u in shared] for f in (min, max))
            axis.fill_between(shared, low, high, color=COLOURS[method], alpha=0.1, linewidth=0)
        axis.set_title(name)
        axis.grid(alpha=0.3)
        if name in LOGARITHMIC:
            axis.set_yscale("log")
            # At update 0 there is no mismatch but rounding.
            axis.set_ylim(bottom=max(1e-4, axis.get_ylim()[0]))
        if name == "F(2)":
            axis.axhline(0.1, color="black", linewidth=0.8, linestyle=":")
    axes[0, 0].legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("update")
    figure.suptitle(regime)
    return figure


def smooth(curve: Mapping[int, float]) -> dict[int, float]:
    """Mean over the SMOOTH updates up to each one."""
    keys = sorted(curve)
    return {u: fmean(curve[k] for k in keys[max(0, i - SMOOTH + 1) : i + 1]) for i, u in enumerate(keys)}


def accuracies(parts: Sequence[tuple[str, Methods]]) -> Figure:
    """Held-out accuracy against the update with standard errors over seeds, and the last ones seed by seed."""
    figure, axes = plt.subplots(2, len(parts), figsize=(7 * len(parts), 8), squeeze=False)
    for column, (title, methods) in enumerate(parts):
        top, bottom = axes[0, column], axes[1, column]
        for i, (method, by_seed) in enumerate(methods.items()):
            runs = list(by_seed.values())
            # By number: an evaluation may be of a version a little later than the others'.
            count = min(len(r.evals) for r in runs)
            shared = [int(median(r.evals[k][0] for r in runs)) for k in range(count)]
            found = [estimate([r.evals[k][1] for r in runs]) for k in range(count)]
            errors = [0.0 if e.n < 2 else e.se for e in found]
            top.errorbar([u + 0.4 * i for u in shared], [e.mean for e in found], errors, label=method,
                         color=COLOURS[method], capsize=2)  # fmt: skip
            bottom.plot([i] * len(runs), [r.last for r in runs], "o", color=COLOURS[method], alpha=0.7)
            bottom.plot([i - 0.25, i + 0.25], [fmean(r.last for r in runs)] * 2, color=COLOURS[method])
        top.set(title=f"{title}: held-out accuracy, sampled", xlabel="update", ylim=(0, 1))
        bottom.set(title="after the last update, one dot per seed", ylim=(0, 1))
        bottom.set_xticks(range(len(methods)), list(methods), rotation=30, ha="right")
        top.grid(alpha=0.3)
        bottom.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    return figure


def probe_dots(batches: Sequence[dict[str, Any]], q: float) -> Figure:
    """Cosine under each filter minus the one without any, with standard errors over batches; both gates."""
    values = probe_values(batches)
    figure, axes = plt.subplots(1, 2, figsize=(15, 0.45 * len(values) + 2), sharey=True, sharex=True)
    colours = {"random": "grey", "drift": "tab:blue", "log_ratio": "tab:orange", "lag": "tab:green",
               "truth": "black", "oracle": "tab:red"}  # fmt: skip
    for axis, gate in zip(axes, ("top_q", "outlier"), strict=True):
        for y, filters in enumerate(values.values()):
            dots: dict[str, list[float]] = {}
            for (signal, its_gate, its_q), v in filters.items():
                if (its_gate == gate and (gate == "outlier" or its_q == q)) or signal == "truth":
                    dots[signal] = v["gain"]
                    if signal == "drift":
                        dots["random"] = v["control"]
                if signal == "oracle" and its_q == q and gate == "top_q":
                    dots[signal] = v["gain"]
            for i, (signal, gains) in enumerate(dots.items()):
                e = estimate(gains)
                axis.errorbar(e.mean, y + 0.12 * (i - len(dots) / 2), xerr=e.se if e.n > 1 else 0, fmt="o",
                              color=colours[signal], markersize=4, label=signal)  # fmt: skip
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(
            title=f"gate {gate}" + (f", q {q:g}" if gate == "top_q" else ", 4 MAD"),
            xlabel="cosine minus that without a filter",
        )
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(values)), list(values))
    axes[0].invert_yaxis()
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    axes[1].legend(handles.values(), handles.keys(), fontsize=8)
    figure.tight_layout()
    return figure


def all_figures(results: Sequence[Result], batches: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(caption, image) of everything there is."""
    out = []
    parts = [(", ".join(key), methods) for key, methods in grouped(results).items()]
    if parts:
        out.append(("Held-out accuracy (400 problems), sampled at temperature 1", png(accuracies(parts))))
    out += [(f"Training curves: {title}", png(curves(title, methods))) for title, methods in parts]
    if batches:
        out.append(
            (
                "Gradient probe: what a filter does to the direction of the batch gradient",
                png(probe_dots(batches, 0.125)),
            )
        )
    return out
