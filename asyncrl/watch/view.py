"""Draws a Screen in a terminal, with rich; readable without colour. Knows nothing of where its lines come from."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.watch.status import COLUMNS, Level, Line, Row, Screen

BAR = 24
"""Characters of the progress bar."""

_STYLES: dict[Level, str] = {"": "", "good": "green", "warn": "yellow", "bad": "bold red"}
_MARKED = ("warn", "bad")


def render(screen: Screen, notes: Sequence[str] = (), max_rows: int | None = None) -> RenderableType:
    """The whole screen. notes: lines above all else. max_rows: generators at most, those with trouble first."""
    parts: list[RenderableType] = [Text(note, style="bold yellow") for note in notes]
    parts.append(Text(screen.title, style="bold", overflow="fold"))
    parts.append(_lines(screen))
    rows = screen.rows
    if max_rows is not None and len(rows) > max_rows:
        rows = sorted(rows, key=lambda row: row.level not in _MARKED)[:max_rows]
    if rows:
        parts += [Text(""), _table(rows)]
    if len(rows) < len(screen.rows):
        parts.append(Text(f"  and {len(screen.rows) - len(rows)} more generators", style="dim"))
    return Group(*parts)


def _lines(screen: Screen) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=1, no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    _add(grid, screen.phase)
    bar = f"[{bar_of(screen.share)}] " if screen.share is not None else ""
    grid.add_row("", Text("updates", style="bold"), Text(bar + screen.progress))
    for alarm, remedy in screen.alarms:
        style = _STYLES[alarm.level]
        grid.add_row(Text("!", style=style), Text("alarm", style=style), Text(f"{alarm.label}: {alarm.text}"))
        grid.add_row("", "", Text(f"to do: {remedy}"))
    for line in screen.lines:
        _add(grid, line)
    return grid


def _add(grid: Table, line: Line) -> None:
    style = _STYLES[line.level]
    mark = "!" if line.level in _MARKED else ""
    grid.add_row(Text(mark, style=style), Text(line.label, style="bold"), Text(line.text, style=style))


def bar_of(share: float) -> str:
    """A bar that needs neither colour nor a special font."""
    full = round(BAR * share)
    return "#" * full + "." * (BAR - full)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", width=1, no_wrap=True)
    for name in COLUMNS:
        edge = name in (COLUMNS[0], COLUMNS[-1])
        table.add_column(name, justify="left" if edge else "right", no_wrap=not edge, overflow="fold")
    for row in rows:
        style = _STYLES[row.level]
        mark = "!" if row.level in _MARKED else ""
        table.add_row(
            Text(mark, style=style), *(Text(cell) for cell in row.cells[:-1]), Text(row.cells[-1], style=style)
        )
    return table
