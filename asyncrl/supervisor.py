"""`asyncrl run`: start replay, generators and the learner on one machine, watch them, stop them.

asyncrl.restarts says what is started again and what ends the run.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from asyncrl.config import Config, save_config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launcher import STANDALONE
from asyncrl.preflight import preflight
from asyncrl.process import Child, role_environment, start, stop_all
from asyncrl.progress import Raised, Tail, View, print_summary, progress_bar, watching
from asyncrl.restarts import RestartPolicy, Verdict
from asyncrl.resume import own, resumable
from asyncrl.watch.first_failure import FirstFailure

POLL_S = 0.1
REPLAY_S = 2.0
"""Time that replay has for its end when the others took all of run.shutdown_s."""


class Supervisor:
    """The children of one run."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self.generators = [f"g{i}" for i in range(config.generator.count)]
        self.children: dict[str, Child] = {}
        """The last attempt of every role."""
        self.policy = RestartPolicy(config.run, self.generators)
        self.signal = 0

    def start(self) -> None:
        """Start every role. All wait for replay's address themselves; importing torch overlaps with that."""
        for name in ("replay", "learner", *self.generators):
            self._start(name)

    def _start(self, name: str) -> None:
        c = self.config
        threads = {"learner": c.learner.threads, "replay": 1}.get(name, c.generator.threads)
        command = role_command(name, c, self.run_dir / "config.yaml")
        self.children[name] = start(name, command, role_environment(threads), self.run_dir / "logs" / f"{name}.log")

    def check(self) -> bool:
        """True when the learner finished. Raises RunError with the cause when the run cannot go on."""
        now = time.monotonic()
        for name in self.policy.starts(now):
            self._start(name)
        # What the learner says of the run's end goes before the others.
        for name in sorted(self.children, key=lambda n: n != "learner"):
            status = self.children[name].returncode
            if status is not None and not self.policy.judged(name) and self._judge(self.children[name], status, now):
                return True
        if (gone := self.policy.missing(now)) is not None:
            what = "replay ended" if gone == "replay" else f"every generator ended; {gone}"
            raise _failed(what, self.children[gone])
        return False

    def _judge(self, child: Child, status: int, now: float) -> bool:
        """Do what the policy says of a role that ended. True when the run is over; RunError when it failed."""
        verdict = self.policy.ended(child.name, status, child.erred, child.lived_s, now)
        who = f"generator {child.name}" if child.name in self.generators else child.name
        match verdict:
            case Verdict.FINISHED:
                return True
            case Verdict.FAILED:
                raise _failed(f"the {who} ended" if who == "learner" else f"{who} ended", child)
            case Verdict.AGAIN:
                delay = self.policy.due[child.name] - now
                wait = f" in {delay:.0f} s" if delay > 0 else ""
                print(f"{who} ended with status {status}; started again{wait}", file=sys.stderr)
            case Verdict.ASIDE:
                print(f"{who} ended with status {status}; set aside", file=sys.stderr)
        return False

    def stop(self) -> None:
        """End every child and what it started; remove published weights.

        Replay last: the learner commits the update that is running, and saves it.
        """
        limit = self.config.run.shutdown_s
        deadline = time.monotonic() + limit
        killed = stop_all([c for name, c in self.children.items() if name != "replay"], limit)
        replay = [c for name, c in self.children.items() if name == "replay"]
        for name in [*killed, *stop_all(replay, max(REPLAY_S, deadline - time.monotonic()))]:
            print(f"{name} did not stop within {limit:g} s and was killed", file=sys.stderr)
        clean_weights(self.run_dir)


def _failed(what: str, child: Child) -> RunError:
    return RunError(f"{what} with status {child.returncode}:\n{child.cause()}")


def role_command(name: str, config: Config, file: Path) -> list[str]:
    """What runs a role: for the learner torchrun over its ranks on this machine."""
    python = [sys.executable, "-m"]
    match name:
        case "learner":
            ranks = ["--nproc-per-node", str(config.learner.ranks)]
            return [*python, "asyncrl.launcher", *STANDALONE, *ranks, "-m", "asyncrl", "learn", str(file)]
        case "replay":
            return [*python, "asyncrl", "replay", str(file)]
        case _:
            return [*python, "asyncrl", "generate", str(file), "--id", name]


def clean_weights(run_dir: Path) -> None:
    """Remove published weights that a killed learner could not remove itself."""
    from asyncrl.weights.place import remove

    remove(run_dir / "weights")


def fresh_run(config: Config) -> Config:
    """Make a run folder that did not exist and name the run after it: name, name-2, name-3, ...

    Raises ConfigError when run.dir cannot hold folders.
    """
    name, n = config.run.name, 1
    while True:
        try:
            Path(config.run.dir).mkdir(parents=True, exist_ok=True)
            (Path(config.run.dir) / name).mkdir()
            break
        except FileExistsError:
            n += 1
            name = f"{config.run.name}-{n}"
        except OSError as exc:
            raise ConfigError(f"run.dir={config.run.dir!r} cannot hold run folders: {exc}; set another one") from exc
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def run(config: Config, resume: bool = False, overrides: Sequence[str] = ()) -> int:
    """Run to the end. Returns the exit status: 0, 1 after a failure, 128 + n after signal n.

    resume: go on in the run folder of this name; ConfigError when that cannot be. overrides: the KEY=VALUE words of the
    command line, which `config` has already. Waits for the learner without a
    limit of its own: every role's waits have limits.
    """
    model = preflight(config, generates=config.generator.count > 0)
    said: list[str] = []
    if not resume:
        config = fresh_run(config)
        save_config(config, config.run_dir / "config.yaml")
    elif not config.run_dir.is_dir():
        raise ConfigError(
            f"nothing to resume: there is no folder {config.run_dir}; run without --resume to begin a run"
        )
    with own(config.run_dir):
        if resume:
            said = resumable(config, model, overrides)
        return _run(config, resume, said)


def _run(config: Config, resume: bool, said: list[str]) -> int:
    run_dir = config.run_dir
    console = Console()
    word = "resuming in" if resume else "run folder:"
    watch = watching(run_dir, config.logging.tensorboard)
    for line in (f"{word} {run_dir} (config.yaml, metrics.jsonl, tb/, logs/)", *said, *watch):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    supervisor = Supervisor(config, run_dir)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        supervisor.signal = number

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    started, failure = time.monotonic(), ""
    view, tail = View(config.learner.updates), Tail(run_dir / "metrics.jsonl")
    status, raised = 1, Raised(run_dir)
    try:
        supervisor.start()
        status = _watch(supervisor, view, tail, console)
    except RunError as exc:
        failure = str(exc)
    finally:
        supervisor.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
    for record in tail.read():
        view.add(record)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print_summary(view, console, run_dir, time.monotonic() - started, used.ru_utime + used.ru_stime, raised.names())
    if failure:
        console.print(f"run failed: {failure}", style="red", highlight=False, markup=False, soft_wrap=True)
    return status


def _watch(supervisor: Supervisor, view: View, tail: Tail, console: Console) -> int:
    showing = progress_bar(view, console, supervisor.config.logging.progress)
    with showing as show, FirstFailure(supervisor.run_dir) as failure:
        while True:
            finished = supervisor.check()
            for record in tail.read():
                view.add(record)
            show()
            if said := failure.news():
                console.print(said, highlight=False, soft_wrap=True, markup=False)
            if finished:
                return 0
            if supervisor.signal:
                console.print(f"stopped by signal {supervisor.signal} after {view.done} of {view.updates} updates")
                console.print(
                    f"to go on: asyncrl run {supervisor.run_dir / 'config.yaml'} --resume",
                    highlight=False,
                    soft_wrap=True,
                )
                return 128 + supervisor.signal
            time.sleep(POLL_S)
