"""`asyncrl drift`. What it runs is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def drift(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, with dumps (logging.dump_every).")],
    update: Annotated[
        list[int] | None, typer.Option(metavar="U", help="Update of a dump; several are pooled. Default: all.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP",
            help="Policy to compare with: an update, last, final or start; several. Default: the newest.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the report; default: RUN/drift.")] = None,
    q: Annotated[list[float] | None, typer.Option(min=0, max=0.99, help="Rates of the filter to try; several.")] = None,
    buckets: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of length buckets to try; several.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the start model lies now; default: model.path of the run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON and nothing else.")] = False,
) -> None:
    """Say what the router drift of a run is made of, from its dumps: a report with pictures."""
    from asyncrl.process import ensure_environment

    ensure_environment(1)
    from asyncrl.lens.look import NUMBERS, RATES, Look
    from asyncrl.lens.page import plain
    from asyncrl.lens.report import FOLDER, write
    from asyncrl.lens.tables import tables

    wanted = Look(
        run_dir, tuple(update or ()), tuple(against or ()), model, tuple(q or RATES), tuple(buckets or NUMBERS)
    )
    written = write(wanted, out or run_dir / FOLDER)
    if as_json:
        print(written.text)
        return
    for note in written.numbers["notes"]:
        print(f"note: {note}")
    print(plain(t for t in tables(written.numbers) if t.short))
    print(f"\n{written.numbers['sanity']['text']}\nreport: {written.page}")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(drift)
