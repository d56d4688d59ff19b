"""`asyncrl run`: start replay, generators and the learner on one machine, watch them, stop them.

A generator or a replay that dies is started again, a limited number of times; the learner dying ends the run with
its cause.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from rich.console import Console

from asyncrl.config import Config, save_config
from asyncrl.errors import ConfigError, RunError
from asyncrl.preflight import preflight
from asyncrl.process import Child, role_environment, start, stop_all
from asyncrl.progress import Tail, View, print_summary, progress_bar

POLL_S = 0.1
GRACE_S = 20.0
"""How long the learner may outlive a replay or a fleet that left in order."""


class Supervisor:
    """The children of one run."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self.file = run_dir / "config.yaml"
        self.replay: Child | None = None
        self.learner: Child | None = None
        self.generators: dict[str, Child] = {}
        self.restarts, self.replay_restarts = 0, 0
        self.signal = 0
        self.gone_since: dict[str, float] = {}

    def children(self) -> list[Child]:
        """All that were started and not replaced."""
        some = [c for c in (self.learner, self.replay) if c is not None]
        return some + list(self.generators.values())

    def start(self) -> None:
        """Start every role. Waits for replay's address, at most run.start_timeout_s."""
        c = self.config
        self._start_replay()
        # The learner and the generators wait for the address themselves; importing torch overlaps with that.
        env = role_environment(c.learner.threads)
        self.learner = start("learner", learner_command(c, self.file), env, self._log("learner"))
        for i in range(c.generator.count):
            self._start_generator(f"g{i}")

    def _start_replay(self) -> None:
        self.replay = self._role("replay", ["replay", str(self.file)], 1)

    def _start_generator(self, name: str) -> None:
        arguments = ["generate", str(self.file), "--id", name]
        self.generators[name] = self._role(name, arguments, self.config.generator.threads)

    def _role(self, name: str, arguments: list[str], threads: int) -> Child:
        command = [sys.executable, "-m", "asyncrl", *arguments]
        return start(name, command, role_environment(threads), self._log(name))

    def _log(self, name: str) -> Path:
        return self.run_dir / "logs" / f"{name}.log"

    def check(self) -> bool:
        """True when the learner finished. Raises RunError with the cause when the run cannot go on."""
        assert self.replay is not None and self.learner is not None
        status = self.learner.returncode
        if status is not None:
            if status == 0:
                return True
            raise RunError(f"the learner ended with status {status}:\n{self.learner.cause()}")
        self._check_replay(self.replay)
        self._check_generators()
        return False

    def _check_replay(self, replay: Child) -> None:
        """Replay leaves with status 0 once the run is over; torchrun may take a little longer.

        Its snapshot lets it go on after a crash. A config that it refuses (2) would be refused again.
        """
        status = replay.returncode
        if status is None or (status == 0 and not self._for_long("replay")):
            return
        if status in (0, 2) or self.replay_restarts >= self.config.run.max_replay_restarts:
            raise RunError(f"replay ended with status {status}:\n{replay.cause()}")
        self.replay_restarts += 1
        print(f"replay ended with status {status}; started again", file=sys.stderr)
        self._start_replay()

    def _check_generators(self) -> None:
        """Start again what crashed. One that left with status 0 was told to, and is not replaced."""
        ended = {n: c for n, c in self.generators.items() if c.returncode is not None}
        for name, child in ended.items():
            if child.returncode != 0 and self.restarts < self.config.run.max_generator_restarts:
                self.restarts += 1
                print(f"generator {name} ended with status {child.returncode}; started again", file=sys.stderr)
                self._start_generator(name)
                return
        if not ended or len(ended) < len(self.generators):
            return
        last = max(ended.values(), key=lambda c: abs(c.returncode or 0))
        if last.returncode != 0 or self._for_long("generators"):
            raise RunError(f"every generator ended; {last.name} with status {last.returncode}:\n{last.cause()}")

    def _for_long(self, what: str) -> bool:
        """True when this is asked again GRACE_S after the first time."""
        first = self.gone_since.setdefault(what, time.monotonic())
        return time.monotonic() - first > GRACE_S

    def stop(self) -> None:
        """End every child and what it started; remove published weights."""
        limit = self.config.run.shutdown_s
        for name in stop_all(self.children(), limit):
            print(f"{name} did not stop within {limit:g} s and was killed", file=sys.stderr)
        clean_weights(self.run_dir)


def learner_command(config: Config, file: Path) -> list[str]:
    """torchrun over the learner's ranks on this machine."""
    ranks = str(config.learner.ranks)
    launch = [sys.executable, "-m", "asyncrl.launcher", "--standalone", "--nproc-per-node", ranks, "-m", "asyncrl"]
    return [*launch, "learn", str(file)]


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


def run(config: Config) -> int:
    """Run to the end. Returns the exit status: 0, 1 after a failure, 128 + n after signal n.

    Waits for the learner without a limit of its own: every role's waits have limits.
    """
    preflight(config)
    config = fresh_run(config)
    run_dir = config.run_dir
    save_config(config, run_dir / "config.yaml")
    console = Console()
    console.print(f"run folder: {run_dir} (config.yaml, metrics.jsonl, tb/, logs/)", highlight=False, soft_wrap=True)
    supervisor = Supervisor(config, run_dir)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        supervisor.signal = number

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    started = time.monotonic()
    view, tail = View(config.learner.updates), Tail(run_dir / "metrics.jsonl")
    status = 1
    try:
        supervisor.start()
        status = _watch(supervisor, view, tail, console)
    except RunError as exc:
        console.print(f"run failed: {exc}", style="red", highlight=False, markup=False, soft_wrap=True)
    finally:
        supervisor.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
    for record in tail.read():
        view.add(record)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print_summary(view, console, run_dir, time.monotonic() - started, used.ru_utime + used.ru_stime)
    return status


def _watch(supervisor: Supervisor, view: View, tail: Tail, console: Console) -> int:
    with progress_bar(view, console, supervisor.config.logging.progress) as show:
        while True:
            finished = supervisor.check()
            for record in tail.read():
                view.add(record)
            show()
            if finished:
                return 0
            if supervisor.signal:
                console.print(f"stopped by signal {supervisor.signal} after {view.done} of {view.updates} updates")
                return 128 + supervisor.signal
            time.sleep(POLL_S)
