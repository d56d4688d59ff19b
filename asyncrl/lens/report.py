"""Writes a report: pictures, one self-contained page, and all numbers as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.errors import ConfigError
from asyncrl.lens.look import Look, look
from asyncrl.lens.measure import walk
from asyncrl.lens.page import page

PAGE, NUMBERS = "report.html", "numbers.json"
FOLDER = "drift"
"""Of a run folder, unless another one is given."""


class Written(NamedTuple):
    """A report. text: the numbers as strict JSON."""

    page: Path
    numbers: dict[str, Any]
    text: str


def write(wanted: Look, folder: Path) -> Written:
    """Look, and write the report into a folder, over an older one. ConfigError with its remedy."""
    # First: what lacks for the pictures is said before minutes of forwards.
    from asyncrl.lens.plots import draw

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be made ({exc}); give another folder with --out") from exc
    numbers, pool = look(wanted)
    text = json.dumps(walk(numbers, lambda x: x if math.isfinite(x) else None), indent=1, allow_nan=False)
    try:
        pictures = draw(numbers, pool, folder)
        (folder / NUMBERS).write_text(text + "\n", encoding="utf-8")
        (folder / PAGE).write_text(page(numbers, pictures), encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"the report cannot be written into {folder} ({exc}); give another one with --out") from exc
    return Written(folder / PAGE, numbers, text)
