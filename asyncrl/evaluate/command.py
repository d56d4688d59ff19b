"""`asyncrl eval`. What it runs is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="MODEL_OR_RUN", help="A Hugging Face folder, or a run folder.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG... [KEY=VALUE...]", help="As for run; default for a run folder: the config of the run."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the answers; default: RUN/eval/STEP or eval/NAME of the model."),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(metavar="STEP", help="Of a run: final, best, last or an update with a checkpoint."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=0, max=1024, help="Sampled responses per prompt; default: eval.samples.")
    ] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--no-greedy", help="Also decode greedily; default: eval.greedy.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N prompts of each set.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME", help="Only this set of task.eval; several.")
    ] = None,
    overlap_check: Annotated[
        bool,
        typer.Option(
            "--overlap-check/--no-overlap-check",
            help="Read the training data, too, and refuse held-out prompts that are in it.",
        ),
    ] = True,
) -> None:
    """Evaluate a model on the held-out sets of a config: every answer as JSONL, and a table. The same command again
    goes on where it was."""
    # Config and files first: nothing heavy is imported for a command that cannot run.
    from asyncrl.evaluate.questions import Chosen
    from asyncrl.evaluate.subject import subject
    from asyncrl.process import ensure_environment

    what = subject(target, arguments or [], out, step)
    ensure_environment(what.config.generator.threads)
    from asyncrl.evaluate.run import run

    raise typer.Exit(run(what, Chosen(samples, greedy, limit, tuple(sets or ())), overlap_check))


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("eval")(evaluate)
