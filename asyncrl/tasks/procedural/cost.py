"""What it costs to make the items of slow procedures: measured CPU seconds per draw. Pure; imports nothing slow."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.tasks.procedural import grids
from asyncrl.tasks.procedural.names import ZEBRA_GRID

HELD_OUT_DRAWS, TRAIN_DRAWS = 4.0, 4 / 3
"""Draws per item: by its text one in four may be held out, the others may be trained on."""

DRAW_S: Mapping[str, float] = {
    "futoshiki": 0.3,
    "zebra_puzzles": 0.09,
    "sudoku": 0.03,
    "polynomial_equations": 0.012,
    "game_of_life": 0.005,
    "game_of_life_halting": 0.005,
    "rearc": 0.008,
}
"""Of datasets without options; all others take less than 0.002 s."""

_FEWEST = min(grids.SIZES)
_GRID_S: tuple[tuple[float, ...], ...] = (
    # a row for 2, 3, ... houses; a column for 2, 3, ... features
    (0.004, 0.009, 0.015, 0.024, 0.034),
    (0.009, 0.02, 0.036, 0.061, 0.086),
    (0.021, 0.046, 0.086, 0.142, 0.203),
    (0.048, 0.122, 0.203, 0.369, 0.537),
    (0.171, 0.41, 0.672, 1.016, 1.5),
)


def item_s(name: str, options: Mapping[str, object], held_out: bool) -> float:
    """CPU seconds per item of a procedure, about; 0.0 where they are few, or unknown because of options.

    Raises TaskError for a size of zebra_grid that there is not.
    """
    if name == ZEBRA_GRID:
        houses, features = grids.read_size(options, "source")
        draw_s = _GRID_S[houses - _FEWEST][features - _FEWEST]
    else:
        draw_s = 0.0 if options else DRAW_S.get(name, 0.0)
    return draw_s * (HELD_OUT_DRAWS if held_out else TRAIN_DRAWS)
