"""`asyncrl run`: start replay, generators and the learner on one machine, watch them, stop them.

What dies is started again, a limited number of times and later each time that it dies soon: generators, replay, and
a learner that was killed. The first error that a role raises on purpose ends the run, as its cause.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from asyncrl.config import Config, save_config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launcher import STANDALONE
from asyncrl.preflight import preflight
from asyncrl.process import Child, Restarts, role_environment, start, stop_all, was_killed
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
        r = config.run
        self.fleet_restarts = Restarts(r.max_generator_restarts)
        self.replay_restarts, self.learner_restarts = Restarts(r.max_replay_restarts), Restarts(r.max_learner_restarts)
        self.due: dict[str, tuple[float, Callable[[], None]]] = {}
        self.set_aside: list[Child] = []
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
        self._start_learner()
        for i in range(c.generator.count):
            self._start_generator(f"g{i}")

    def _start_learner(self) -> None:
        env = role_environment(self.config.learner.threads)
        self.learner = start("learner", learner_command(self.config, self.file), env, self._log("learner"))

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
        now = time.monotonic()
        for name in [n for n, (at, _) in self.due.items() if at <= now]:
            self.due.pop(name)[1]()
        if "learner" not in self.due and self._learner_finished(self.learner):
            return True
        if "replay" not in self.due:
            self._check_replay(self.replay)
        self._check_generators()
        return False

    def _learner_finished(self, learner: Child) -> bool:
        """A learner that was killed goes on from its last checkpoint; its own error would come again."""
        status = learner.returncode
        if status is None or status == 0:
            return status == 0
        # A rank that hangs when another one failed is killed as well.
        again = was_killed(status) and not learner.erred
        if again and self._again(learner, self.learner_restarts, self._start_learner):
            return False
        raise RunError(f"the learner ended with status {status}:\n{learner.cause()}")

    def _again(self, child: Child, restarts: Restarts, begin: Callable[[], None]) -> bool:
        """Plan to start a role again. False when its restarts are used up."""
        now = time.monotonic()
        at = restarts.plan(child, now)
        if at is None:
            return False
        self.due[child.name] = (at, begin)
        who = f"generator {child.name}" if child.name in self.generators else child.name
        wait = f" in {at - now:.0f} s" if at > now else ""
        print(f"{who} ended with status {child.returncode}; started again{wait}", file=sys.stderr)
        return True

    def _check_replay(self, replay: Child) -> None:
        """Replay leaves with status 0 once the run is over; torchrun may take a little longer.

        Its snapshot lets it go on after a crash. A config that it refuses (2), or its own error (the watchdog's
        among them), would come again.
        """
        status = replay.returncode
        if status is None or (status == 0 and not self._for_long("replay")):
            return
        again = status not in (0, 2) and not replay.erred
        if not (again and self._again(replay, self.replay_restarts, self._start_replay)):
            raise RunError(f"replay ended with status {status}:\n{replay.cause()}")

    def _check_generators(self) -> None:
        """Start again what crashed. One that left with status 0 was told to, and is not replaced.

        One whose restarts are used up, or whose config is refused (2), is set aside; the run goes on without it.
        """
        ended = [c for c in self.generators.values() if c.returncode is not None and c.name not in self.due]
        for child in ended:
            if child.returncode != 0 and child not in self.set_aside:
                begin = partial(self._start_generator, child.name)
                if child.returncode == 2 or not self._again(child, self.fleet_restarts, begin):
                    print(f"generator {child.name} ended with status {child.returncode}; set aside", file=sys.stderr)
                    self.set_aside.append(child)
        if not ended or len(ended) < len(self.generators) or any(c.name in self.due for c in ended):
            return
        first = (self.set_aside or ended)[0]
        if self.set_aside or self._for_long("generators"):
            raise RunError(f"every generator ended; {first.name} with status {first.returncode}:\n{first.cause()}")

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
    launch = [sys.executable, "-m", "asyncrl.launcher", *STANDALONE, "--nproc-per-node", ranks, "-m", "asyncrl"]
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
    started, failure = time.monotonic(), ""
    view, tail = View(config.learner.updates), Tail(run_dir / "metrics.jsonl")
    status = 1
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
    print_summary(view, console, run_dir, time.monotonic() - started, used.ru_utime + used.ru_stime)
    if failure:
        console.print(f"run failed: {failure}", style="red", highlight=False, markup=False, soft_wrap=True)
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
