"""The launcher of a fleet: starts every role through its agent, waits until they are ready, watches and stops them.

It owns the policy (what is started again, what ends the run) and knows nothing of ssh or SLURM.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from asyncrl.config import Config, to_yaml
from asyncrl.errors import RunError
from asyncrl.process import Child, Restarts, was_killed
from asyncrl.remote.agent import BEAT_S, LOST
from asyncrl.remote.job import Job, read_keys
from asyncrl.remote.plan import Fleet, at_address
from asyncrl.remote.reach import Reach

POLL_S = 0.2
GRACE_S = 20.0
"""How long the learner may outlive a replay or a fleet that left in order."""
PIPE_BYTES = 2**20
"""A job must fit into the pipe, so that writing it never waits."""
MARGIN_S = 8.0
"""Time beyond run.shutdown_s that an agent and the way to it get for the end."""


class Launcher:
    """The roles of one run. Every role has an agent on its host; the pipe to it is its lifeline."""

    def __init__(self, config: Config, fleet: Fleet, reach: Reach, logs: Path, env: dict[str, str], resume: bool):
        self.config, self.fleet, self.reach, self.logs = config, fleet, reach, logs
        self.env, self.resume = env, resume
        self.hosts = fleet.hosts()
        replay = config.replay
        folder = replay.keys if replay.security == "curve" else None
        # Read once, so that a folder made for this run need not outlive its start. By whether the host serves.
        self.keys = {s: read_keys(folder, replay.client, s) if folder else {} for s in (True, False)}
        self.children: dict[str, Child] = {}
        r = config.run
        # Every generator has its own, so that a dead node does not use up those of the others.
        limits = {"replay": r.max_replay_restarts, "learner": r.max_learner_restarts}
        self.restarts = {name: Restarts(limits.get(name, r.max_generator_restarts)) for name in self.hosts}
        self.due: dict[str, float] = {}
        self.joined: set[str] = set()
        self.follower: Follower
        self.signal = 0
        self.beat_at = 0.0
        self.gone_since: dict[str, float] = {}

    # --- starting -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start replay, wait until it serves, start the rest. RunError with the cause; at most run.start_timeout_s."""
        self._start("replay")
        deadline = time.monotonic() + self.config.run.start_timeout_s
        while not (address := self._address()):
            self._beat()
            replay = self.children["replay"]
            if self.signal:
                return
            if replay.returncode is not None:
                raise _failure("replay", replay)
            if time.monotonic() > deadline:
                limit = f"run.start_timeout_s={self.config.run.start_timeout_s:g}"
                raise RunError(f"replay on {self.fleet.replay} did not serve within {limit}; see {replay.log}")
            time.sleep(POLL_S)
        self.config = at_address(self.config, address)
        say(f"replay serves at {self.config.replay.connect}")
        for name in self.hosts:
            if name != "replay":
                self._start(name)

    def _address(self) -> str:
        """What replay's log says once it serves."""
        for line in self.follower.lines():
            if match := re.search(r"serving at (\S+)$", line):
                return match[1]
        return ""

    def _start(self, name: str) -> None:
        log = self.logs / f"{name}.log"
        with open(log, "ab") as out:
            begin = out.tell()
            process = subprocess.Popen(
                self.reach.command(name, self.hosts[name]), stdin=subprocess.PIPE, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True, pipesize=PIPE_BYTES,
            )  # fmt: skip
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        again = name in self.children
        if again:
            _let_go(self.children[name].process)
        self.children[name] = Child(name, process, log, begin)
        if name == "replay":
            self.follower = Follower(log, begin)
        job = self._job(name, again).to_line()
        if len(job) > PIPE_BYTES:
            raise RunError(f"the config and keys of {name} are {len(job)} bytes; at most {PIPE_BYTES} can be sent")
        _write(process, job)
        say(f"started {name} on {self.hosts[name]} (log {log})")

    def _job(self, name: str, again: bool) -> Job:
        c = self.config
        role = {"replay": "replay", "learner": "learn"}.get(name, "generate")
        threads = {"replay": 1, "learn": c.learner.threads, "generate": c.generator.threads}[role]
        holds = {"replay": "replay.snapshot", "learn": "metrics.jsonl"}.get(role, "")
        return Job(
            role=role,
            config=to_yaml(c),
            words=["--id", name] if role == "generate" else [],
            # The learner serves weights with replay's key.
            keys=self.keys[role != "generate"],
            env=self.env,
            threads=threads,
            stop_s=c.run.shutdown_s,
            fresh="" if again or self.resume or not holds else str(c.run_dir / holds),
        )

    # --- watching -------------------------------------------------------------------------------

    def check(self) -> bool:
        """True when the learner finished. Raises RunError with the cause when the run cannot go on."""
        self._beat()
        self._note_joined()
        now = time.monotonic()
        for name in [n for n, at in self.due.items() if at <= now]:
            del self.due[name]
            self._start(name)
        if self._check_learner(now):
            return True
        self._check_replay(now)
        self._check_generators(now)
        return False

    def _check_learner(self, now: float) -> bool:
        learner = self.children["learner"]
        status = learner.returncode
        if status is None or "learner" in self.due:
            return False
        if status == 0:
            return True
        lost = was_killed(status) or status == LOST
        if not (lost and self._again("learner", now)):
            raise _failure("learner", learner)
        return False

    def _check_replay(self, now: float) -> None:
        replay = self.children["replay"]
        status = replay.returncode
        if status is None or "replay" in self.due or (status == 0 and not self._for_long("replay", now)):
            return
        if status in (0, 2) or replay.erred or not self._again("replay", now):
            raise _failure("replay", replay)

    def _check_generators(self, now: float) -> None:
        """Start again what died. What cannot be is set aside; the run goes on while one is left."""
        fleet = {n: c for n, c in self.children.items() if n not in ("replay", "learner")}
        for name, child in fleet.items():
            if child.returncode and name not in self.due and name not in self.gone_since:
                self.joined.discard(name)
                if not self._again(name, now):
                    self.gone_since[name] = now
                    limit = f"run.max_generator_restarts={self.config.run.max_generator_restarts}"
                    say(f"{name} on {self.hosts[name]} is set aside: it was started again {limit} times")
        ended = [c for n, c in fleet.items() if c.returncode is not None and n not in self.due]
        if not fleet or len(ended) < len(fleet):
            return
        if any(c.returncode for c in ended) or self._for_long("generators", now):
            last = max(ended, key=lambda c: abs(c.returncode or 0))
            raise RunError(f"every generator ended; {last.name} with status {last.returncode}:\n{last.cause()}")

    def _again(self, name: str, now: float) -> bool:
        child = self.children[name]
        at = self.restarts[name].plan(child, now)
        if at is None:
            return False
        self.due[name] = at
        status = child.returncode or 0
        say(f"{name} on {self.hosts[name]} ended with status {status} and is started again")
        if not was_killed(status):
            say(child.cause())
        return True

    def _for_long(self, what: str, now: float) -> bool:
        return now - self.gone_since.setdefault(what, now) > GRACE_S

    def _note_joined(self) -> None:
        """Replay's log says who joined."""
        for line in self.follower.lines():
            match = re.search(r": (\S+) joined$", line)
            if match and match[1] in self.hosts and match[1] not in self.joined:
                self.joined.add(match[1])
                say(f"{match[1]} on {self.hosts[match[1]]} joined")

    def _beat(self) -> None:
        if time.monotonic() - self.beat_at >= BEAT_S:
            self.beat_at = time.monotonic()
            for child in self.children.values():
                _write(child.process, b"\n")

    # --- stopping -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let go of every lifeline; what has not ended run.shutdown_s and a margin later is killed here."""
        for child in self.children.values():
            _let_go(child.process)
        deadline = time.monotonic() + self.config.run.shutdown_s + MARGIN_S
        for child in self.children.values():
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"no answer from {child.name} on {self.hosts[child.name]}; given up", error=True)
                _end(child.process)


class Follower:
    """The new whole lines of a log that grows, from byte `at` on."""

    def __init__(self, file: Path, at: int) -> None:
        self._file, self._at = file, at

    def lines(self) -> list[str]:
        """What was completed since the last call."""
        with open(self._file, "rb") as log:
            log.seek(self._at)
            whole = log.read().rpartition(b"\n")
        self._at += len(whole[0]) + len(whole[1])
        return whole[0].decode(errors="replace").splitlines()


def watch(launcher: Launcher) -> int:
    """Run to the end. Returns the exit status: the learner's, 1 or 2 after a failure, 128 + n after signal n."""
    with _signals(launcher):
        try:
            launcher.start()
            while not launcher.signal:
                if launcher.check():
                    return 0
                time.sleep(POLL_S)
            say(f"stopped by signal {launcher.signal}", error=True)
            return 128 + launcher.signal
        except RunError as exc:
            say(f"run failed: {exc}", error=True)
            return exc.status if isinstance(exc, _RoleFailed) else 1
        finally:
            launcher.stop()


class _RoleFailed(RunError):
    """A role whose end is the end of the run. status: what the launcher exits with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def _failure(name: str, child: Child) -> _RoleFailed:
    """The learner's status is the run's; a config that replay refused is status 2, everything else 1."""
    status = child.returncode or 0
    shown = 2 if status == 2 else (status if name == "learner" and 0 < status < 256 else 1)
    return _RoleFailed(f"{name} ended with status {status}:\n{child.cause()}", shown)


@contextlib.contextmanager
def _signals(launcher: Launcher) -> Iterator[None]:
    def on_signal(number: int, _frame: FrameType | None) -> None:
        launcher.signal = launcher.signal or number

    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        wanted.append(signal.SIGHUP)
    old = {n: signal.signal(n, on_signal) for n in wanted}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    """What does not fit is left out: a beat of many. A pipe that broke shows as an end of the process."""
    assert process.stdin is not None
    with contextlib.suppress(BlockingIOError, BrokenPipeError, ValueError):
        os.write(process.stdin.fileno(), data)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Close the lifeline."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(2)


def say(text: str, error: bool = False) -> None:
    """A line for whoever watches the launch."""
    print(text, file=sys.stderr if error else sys.stdout, flush=True)
