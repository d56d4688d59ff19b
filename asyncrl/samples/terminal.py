"""Responses in the terminal. Every text of a model stands in a frame and is escaped, so that it can fake nothing."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.samples.pieces import MARKS, visible
from asyncrl.samples.source import Found, Part, Sample, Wanted
from asyncrl.samples.words import LEGEND, STEPS, facts, heading, largest, level, number, summary

COLOURS = {
    1: "on grey19", 2: "on dark_blue", 3: "white on blue3", 4: "bold white on dodger_blue2",
    -1: "on grey23", -2: "on dark_red", -3: "white on red3", -4: "bold white on bright_red",
}  # fmt: skip
"""Of a token by `words.level`; weak ones are hardly visible, as they should be."""

UNSAMPLED = "dim italic"
"""Of what the policy did not sample: observations of an environment, an end token that the engine put there."""


def show(found: Found, wanted: Wanted, console: Console) -> None:
    """Print all of it."""
    for note in found.notes:
        console.print(Text(f"note: {visible(note)}"))
    console.print(Text(visible(heading(found, wanted)), style="bold"))
    console.print(Text(summary(found.samples)))
    if any(s.ratio is not None for s in found.samples):
        console.print(_legend())
    for place, sample in enumerate(found.samples, 1):
        console.print(_panel(sample, place))


def _legend() -> Text:
    line = Text(LEGEND + ": ")
    for at in range(-len(STEPS), len(STEPS) + 1):
        if at:
            sign = "<= -" if at < 0 else ">= +"
            line.append(f" {sign}{STEPS[abs(at) - 1]:g} ", style=COLOURS[at])
    line.append(f". {MARKS[0]}...{MARKS[1]}: not sampled by the policy.")
    return line


def _panel(s: Sample, place: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts(s):
        table.add_row(name, Text(visible(value)))
    if far := largest(s):
        table.add_row("furthest tokens", Text(", ".join(map(_named, far))))
    body = Group(
        Panel(Text(visible(s.prompt), overflow="fold"), title="prompt", title_align="left", border_style="dim"),
        Panel(answer(s.parts), title="response", title_align="left", border_style="dim"),
        table,
    )
    title = Text(f"{place}. update {s.update}  {visible(s.name)}  reward {number(s.reward)}")
    return Panel(body, title=title, title_align="left")


def answer(parts: list[Part]) -> Text:
    """The text of a response, coloured, with what was not sampled between marks."""
    line, inside = Text(overflow="fold"), False
    for part in parts:
        if part.sampled == inside:
            line.append(MARKS[1] if inside else MARKS[0], style=UNSAMPLED)
            inside = not inside
        line.append(visible(part.text), style=UNSAMPLED if inside else COLOURS.get(level(part.ratio), ""))
    if inside:
        line.append(MARKS[1], style=UNSAMPLED)
    return line


def _named(part: Part) -> str:
    return f"{visible(part.text)!r} at {part.start}: {part.ratio:+.2f}"
