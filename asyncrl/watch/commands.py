"""The commands that watch and steer a run. What they run is imported only when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run folder, or tcp://HOST:PORT of its replay.")]

Keys = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Key folder; default: what the config of the run folder says.")
]

Client = Annotated[
    str | None, typer.Option(metavar="NAME", help="Whose key of that folder; default: as the config says, or client.")
]


def tune(
    run: Run,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE...]", help="New values; none: print what is tuned now.")
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Take back the last change, or with a number behind it the last N ones.")
    ] = False,
    keys: Keys = None,
    client: Client = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for an answer.")] = 15.0,
) -> None:
    """Change settings of a running job; without KEY=VALUE, print what is tuned and what can be."""
    from asyncrl.watch.client import find
    from asyncrl.watch.tune import num_undone
    from asyncrl.watch.tune import tune as steer

    # `--undo` takes an optional number, which an option cannot have: it comes as an argument.
    count = num_undone(changes or []) if undo else 0
    raise typer.Exit(steer(find(run, keys, client), [] if undo else changes or [], count, timeout))


def status(
    run: Run,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C or the end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the state of the run and what follows from it.")
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.2, help="With --watch: from one look to the next.")
    ] = 2.0,
    keys: Keys = None,
    client: Client = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for an answer.")] = 15.0,
) -> None:
    """Show how a run is: roles, versions, lag, queue, rates, alarms, time to go."""
    from asyncrl.watch.client import find
    from asyncrl.watch.show import show
    from asyncrl.watch.show import watch as look_on

    target = find(run, keys, client)
    raise typer.Exit(look_on(target, as_json, interval) if watch else show(target, as_json, timeout))


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(status)
    app.command()(tune)
