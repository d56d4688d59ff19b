"""One small SVG per method: its run of one seed beside those of GRPO and TIS. Knows results, no prose."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.figures import LOGARITHMIC, smooth
from study.methods import Methods
from study.results import Result

PANELS = ("held-out accuracy", "kl_k3", "gradient norm")
BESIDE: Mapping[str, tuple[str, str]] = {"grpo": ("0.55", "--"), "tis": ("0.55", "-")}
"""Colour and dashes of the runs that every figure shows for comparison."""
COLOUR = "#1f6fb4"

# Letters stay letters, which is smaller; the same runs give the same bytes.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "asyncrl", "font.size": 8, "font.sans-serif": ["DejaVu Sans"]}
BARE = {"Date": None, "Creator": None, "Format": None, "Type": None}


def write_figures(methods: Methods, folder: Path) -> list[Path]:
    """folder/METHOD.svg of every method that has a run; files of others are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for method in methods:
        with matplotlib.rc_context(STYLE):
            figure = figure_of(method, methods)
            file = folder / f"{method}.svg"
            figure.savefig(file, format="svg", bbox_inches="tight", metadata=BARE)
            plt.close(figure)
        file.write_text(shortened(file.read_text()))
        written.append(file)
    return written


def shortened(svg: str) -> str:
    """The picture with coordinates to a tenth of a point, and no blanks at the ends of lines."""
    rounded = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", svg)
    return "\n".join(line.rstrip() for line in rounded.splitlines()) + "\n"


def figure_of(method: str, methods: Methods) -> Figure:
    """Accuracy, kl_k3 and gradient norm against the update: the first seed, others thin, GRPO and TIS grey."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9, 2.1))
    first = min(methods[method])
    for axis, panel in zip(axes, PANELS, strict=True):
        for other, (colour, dashes) in BESIDE.items():
            if other != method and first in methods.get(other, {}):
                _line(axis, panel, methods[other][first], color=colour, linestyle=dashes, linewidth=1, label=other)
        for seed, run in methods[method].items():
            if seed != first:
                _line(axis, panel, run, color=COLOUR, linewidth=0.5, alpha=0.5)
        _line(axis, panel, methods[method][first], color=COLOUR, linewidth=1.6, label=method)
        axis.set(title=panel, xlabel="update")
        axis.grid(alpha=0.3)
        if panel in LOGARITHMIC:
            axis.set_yscale("log")
            # At update 0 there is no mismatch but rounding.
            axis.set_ylim(bottom=max(1e-4, axis.get_ylim()[0]))
        else:
            axis.set_ylim(0, 1)
    axes[0].legend(fontsize=7, loc="lower center")
    figure.tight_layout()
    return figure


def _line(axis: Axes, panel: str, run: Result, **style: object) -> None:
    """One run in one panel; per-update numbers are averaged over a few updates."""
    line = {e[0]: e[1] for e in run.evals} if panel == PANELS[0] else smooth(dict(run.curves[panel]))
    axis.plot(list(line), [round(v, 5) for v in line.values()], **style)
