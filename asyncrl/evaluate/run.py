"""One evaluation from the command line to its table."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from asyncrl import preflight_sglang
from asyncrl.config import Config
from asyncrl.errors import ConfigError, TaskError
from asyncrl.evaluate import table
from asyncrl.evaluate.answers import FILE, Answers, lock_of
from asyncrl.evaluate.questions import NO_SETS, Chosen, Questions, identity, questions, without_training
from asyncrl.evaluate.subject import Subject, fingerprint, is_exported, policy
from asyncrl.models.describe import max_length
from asyncrl.tasks import build
from asyncrl.tasks.held_out import names_answers

log = logging.getLogger(__name__)

SAID_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def run(what: Subject, chosen: Chosen, overlap_check: bool = True, console: Console | None = None) -> int:
    """Ask what is missing, write the tables and print one. The exit status.

    0: every answer is there and has a reward. 1: some have none, since their verifier failed. 128 + n: signal n came.
    ConfigError before anything starts, also for unusable data; EngineError and TaskError when something fails then.
    """
    console = console or Console()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    _check(what.config)
    with contextlib.ExitStack() as stack:
        # Before a policy of another process is removed.
        lock = stack.enter_context(lock_of(what.out)) if is_exported(what) else None
        model = stack.enter_context(policy(what))
        asked = _questions(what.config, model, chosen, overlap_check)
        name = f"{what.run_dir} at {what.step}" if what.run_dir is not None else str(model)
        about: dict[str, Any] = {"evaluated": name, "model": str(model), "step": what.step}
        with Answers(what.out, identity(what.config, fingerprint(model), asked), about, lock) as answers:
            status = _ask(what, model, asked, answers, console)
            answers.compact()
            if status:
                _say_stopped(answers, asked, console)
                return status
            return _tell(what.out, asked, answers, about, console, names_answers(what.config.task))


def _check(config: Config) -> None:
    """What can be refused before a checkpoint is exported and data is read."""
    if config.task.name == "sources" and not config.task.eval:
        raise ConfigError(f"task.eval=[]: {NO_SETS}")
    if config.generator.engine == "sglang" and (faults := preflight_sglang.faults(config, weights=True, starts=True)):
        raise ConfigError("\n".join(faults))


def _check_lengths(config: Config, model: Path, asked: Questions) -> None:
    """The engine would refuse it in the middle."""
    longest = max(len(p.token_ids) for prompts in asked.prompts.values() for p in prompts)
    new, served = config.sampling.max_new_tokens, config.generator.engine == "sglang"
    limit = max_length(str(model), at_most=None) if served else max_length(str(model))
    if longest + new > limit:
        raise ConfigError(
            f"sampling.max_new_tokens={new} and the longest held-out prompt of {longest} tokens exceed the {limit} "
            f"tokens that {str(model)!r} can hold; lower sampling.max_new_tokens, or task.max_prompt_tokens"
        )


def _questions(config: Config, model: Path, chosen: Chosen, overlap_check: bool) -> Questions:
    task = (config if overlap_check else without_training(config)).task
    try:
        built = build(task, model)
    except (ConfigError, TaskError) as exc:
        hint = "\nThe training data is read for the overlap check alone; --no-overlap-check leaves it out"
        raise ConfigError(f"{exc}{hint if overlap_check and config.task.train else ''}") from exc
    for note in built.notes:
        log.info("%s", note)
    asked = questions(config, built.eval, chosen)
    _check_lengths(config, model, asked)
    return asked


def _ask(what: Subject, model: Path, asked: Questions, answers: Answers, console: Console) -> int:
    keys = asked.keys()
    done, failed = answers.done, answers.failed
    missing = [(key, prompt) for key, prompt in keys if key not in done]
    if had := len(keys) - len(missing):
        console.print(f"{had} of {len(keys)} answers are there already", highlight=False)
    if failed:
        console.print(f"{len(failed)} without a reward are asked again", highlight=False)
    if not missing:
        return 0
    from asyncrl.evaluate.ask import ask
    from asyncrl.evaluate.tied import served

    config = what.config
    with _progress(console, had, len(keys)) as told:
        if config.generator.engine == "torch":
            return ask(config, missing, answers, told)
        with served(model, what.out) as folder:
            generator = config.generator.model_copy(update={"model": str(folder)})
            return ask(config.model_copy(update={"generator": generator}), missing, answers, told)


def _tell(out: Path, asked: Questions, answers: Answers, about: dict[str, Any], console: Console, own: bool) -> int:
    prompts = {name: len(p) for name, p in asked.prompts.items()}
    found = table.numbers(answers.records, asked.asked, prompts, own)
    title = f"Evaluation of {about['evaluated']}"
    table.write(out, found, about, title)
    for each in table.drawn(found, title, console.width):
        console.print(each)
    failures = found["failures"]
    if failures:
        console.print(f"{len(failures)} answers have no reward and count nowhere:", highlight=False)
    for line in table.reasons(failures):
        console.print(f"  {line}", markup=False, highlight=False)
    if failures:
        console.print(f"the same command asks for them again; each is in {out / FILE}", highlight=False, soft_wrap=True)
    console.print(f"answers: {out / FILE}\ntables: {out / table.MARKDOWN}, {out / table.JSON}", highlight=False)
    return 1 if failures else 0


def _say_stopped(answers: Answers, asked: Questions, console: Console) -> None:
    console.print(
        f"stopped: {len(answers.done)} of {len(asked.keys())} answers are in {answers.path}; the same command goes on "
        "from there",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


@contextmanager
def _progress(console: Console, had: int, total: int) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after each answer: a bar on a terminal, else a line now and then."""
    done, said = had, time.monotonic()
    if console.is_terminal:
        columns = (TextColumn("answers"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("answers", total=total, completed=had)
            yield lambda: bar.advance(task)
        return

    def told() -> None:
        nonlocal done, said
        done += 1
        if time.monotonic() - said >= SAID_S:
            said = time.monotonic()
            console.print(f"answers {done}/{total}", highlight=False)

    yield told
