"""The launcher of a fleet: starts every role through its agent, waits until they are ready, watches and stops them.

asyncrl.restarts says what is started again and what ends the run. It knows nothing of ssh or SLURM.
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
from asyncrl.process import Child
from asyncrl.remote.agent import BEAT_S
from asyncrl.remote.job import Job, read_keys
from asyncrl.remote.plan import Fleet, at_address
from asyncrl.remote.reach import Reach
from asyncrl.restarts import RestartPolicy, Verdict, was_killed

POLL_S = 0.2
BEAT = b"\n"
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
        self.lifelines: dict[str, Lifeline] = {}
        self.policy = RestartPolicy(config.run, [n for n in self.hosts if n not in ("replay", "learner")])
        self.joined: set[str] = set()
        self.follower: Follower
        self.signal = 0
        self.beat_at = 0.0

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
        again = name in self.children
        job = self._job(name, again).to_line()
        if again:
            self.lifelines[name].let_go()
        log = self.logs / f"{name}.log"
        try:
            with open(log, "ab") as out:
                begin = out.tell()
                process = subprocess.Popen(
                    self.reach.command(name, self.hosts[name]), stdin=subprocess.PIPE, stdout=out,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        except OSError as exc:
            raise RunError(f"{name} on {self.hosts[name]} cannot be started from here: {exc}") from exc
        self.children[name] = Child(name, process, log, begin)
        self.lifelines[name] = Lifeline(process, job)
        if name == "replay":
            self.follower = Follower(log, begin)
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
            env=self._env(name, role),
            threads=threads,
            stop_s=c.run.shutdown_s,
            fresh="" if again or self.resume or not holds else str(c.run_dir / holds),
        )

    def _env(self, name: str, role: str) -> dict[str, str]:
        if role != "generate":
            return self.env
        return {"ASYNCRL_LOCAL_INDEX": str(self.fleet.number_on_host(name))} | self.env

    # --- watching -------------------------------------------------------------------------------

    def check(self) -> bool:
        """True when the learner finished. Raises RunError with the cause when the run cannot go on."""
        self._beat()
        self._note_joined()
        now = time.monotonic()
        for name in self.policy.starts(now):
            self._start(name)
        # What the learner says of the run's end goes before the others.
        for name in sorted(self.children, key=lambda n: n != "learner"):
            status = self.children[name].returncode
            if status is not None and not self.policy.judged(name) and self._judge(name, status, now):
                return True
        if (gone := self.policy.missing(now)) is not None:
            raise _failure(gone if gone == "replay" else f"every generator ended; {gone}", self.children[gone])
        return False

    def _judge(self, name: str, status: int, now: float) -> bool:
        """Do what the policy says of a role that ended. True when the run is over; RunError when it failed."""
        child, who = self.children[name], f"{name} on {self.hosts[name]}"
        verdict = self.policy.ended(name, status, child.erred, child.lived_s, now)
        if verdict is Verdict.FAILED:
            raise _failure(name, child)
        self.joined.discard(name)
        if verdict is Verdict.AGAIN:
            say(f"{who} ended with status {status} and is started again")
        elif verdict is Verdict.ASIDE:
            say(f"{who} ended with status {status} and is set aside")
        if verdict is Verdict.ASIDE or (verdict is Verdict.AGAIN and not was_killed(status)):
            say(child.cause())
        return verdict is Verdict.FINISHED

    def _note_joined(self) -> None:
        """Replay's log says who joined."""
        for line in self.follower.lines():
            match = re.search(r": (\S+) joined$", line)
            if match and match[1] in self.hosts and match[1] not in self.joined:
                self.joined.add(match[1])
                say(f"{match[1]} on {self.hosts[match[1]]} joined")

    def _beat(self) -> None:
        beat = time.monotonic() - self.beat_at >= BEAT_S
        if beat:
            self.beat_at = time.monotonic()
        for lifeline in self.lifelines.values():
            lifeline.push(beat)

    # --- stopping -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let go of every lifeline; what has not ended run.shutdown_s and a margin later is killed here."""
        for lifeline in self.lifelines.values():
            lifeline.let_go()
        deadline = time.monotonic() + self.config.run.shutdown_s + MARGIN_S
        for child in self.children.values():
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"no answer from {child.name} on {self.hosts[child.name]}; given up", error=True)
                _end(child.process)


class Lifeline:
    """The pipe to an agent: first the job, then a beat now and then. Never waits, whatever the pipe holds.

    A pipe holds 64 KiB, and 4 KiB once this user has many of them.
    """

    def __init__(self, process: subprocess.Popen[bytes], job: bytes) -> None:
        assert process.stdin is not None
        self._pipe, self._left = process.stdin, job
        os.set_blocking(self._pipe.fileno(), False)
        self.push()

    def push(self, beat: bool = False) -> None:
        """Write what fits of the job. beat: say that the launcher lives, once the job is through."""
        data = self._left or (BEAT if beat else b"")
        # A beat that does not fit is one of many; a pipe that broke shows as an end of the process.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ValueError):
            while data:
                data = data[os.write(self._pipe.fileno(), data) :]
                self._left = data

    def let_go(self) -> None:
        """Close it: the agent stops its role."""
        with contextlib.suppress(OSError):
            self._pipe.close()


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
