"""`asyncrl samples`. What it runs is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.samples.source import Order

TERMINAL, PAGE = 8, 200
"""Responses that are shown unless --limit says how many."""


def samples(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, with dumps (logging.dump_every).")],
    update: Annotated[
        list[int] | None, typer.Option(metavar="U", help="Update of a dump; several. Default: all.")
    ] = None,
    worst_drift: Annotated[bool, typer.Option("--worst-drift", help="The highest router drift first.")] = False,
    stale: Annotated[bool, typer.Option("--stale", help="The largest lag first.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="The longest first.")] = False,
    reward: Annotated[float | None, typer.Option(metavar="X", help="Only those with this reward.")] = None,
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Only those that the drift filter dropped, or would drop.")
    ] = False,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="Only those of this data source.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"At most so many; default: {TERMINAL}, on a page {PAGE}.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one self-contained page instead.")] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the folder with the tokenizer lies now.")
    ] = None,
) -> None:
    """Show responses that a run was trained on: text, reward, lag, drift, and every token's log pi/mu."""
    orders: list[tuple[bool, Order]] = [(worst_drift, "drift"), (stale, "lag"), (longest, "length")]
    chosen = [order for yes, order in orders if yes]
    if len(chosen) > 1:
        raise ConfigError("give one of --worst-drift, --stale and --longest: each is an order of its own")
    import sys

    from rich.console import Console

    from asyncrl.samples.page import page
    from asyncrl.samples.pieces import visible
    from asyncrl.samples.source import Wanted, find
    from asyncrl.samples.terminal import show
    from asyncrl.samples.words import heading

    limit = limit or (TERMINAL if html is None else PAGE)
    order: Order = chosen[0] if chosen else "newest"
    wanted = Wanted(run_dir, tuple(update or ()), order, reward, dropped, source, limit, model)
    found = find(wanted)
    if html is None:
        # A terminal without Unicode gets codes, not an error.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        show(found, wanted, Console(highlight=False, markup=False, emoji=False))
        return
    try:
        html.write_text(page(found, wanted), encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{html} cannot be written ({exc}); give another file with --html") from exc
    for note in found.notes:
        print(f"note: {visible(note)}")
    print(f"{visible(heading(found, wanted))}: {html}")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(samples)
