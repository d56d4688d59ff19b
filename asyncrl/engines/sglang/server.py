"""A server process of our own: started, watched, ended with everything it started. Knows no request and no weights.

The guard between this process and the server sees to it that nothing outlives either.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp

from asyncrl.engines.sglang import guard
from asyncrl.errors import EngineError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
ATTEMPTS = 3
"""Starts when another process gets the port that was free a moment ago."""
_POLL_S = 0.25
_ANSWER_S = 5.0
_SAY_S = 30.0
"""A start that takes long says so this often."""
_MUTE_S = 60.0
"""A server that knows its model and says 503 for this long is paused: it was asked for its health then."""
_WATCH_S = 0.1
_PORT_S = 10.0
"""How long a fixed port may still belong to a server that was killed just now."""
_KILL_S = 1.0
_TAIL_BYTES = 2**16
_TAKEN = re.compile(r"address already in use|port \S+ is (already )?in use|error while attempting to bind", re.I)

State = Literal["ready", "paused"]


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server. command: what runs, with all flags but those of its address and keys.

    port: 0 takes a free one. setting: what the port is called in messages. keys: flag to secret; they go by a file that
    only this user can read, since everybody can read command lines. grace_s: from SIGTERM to SIGKILL.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path
    port: int = 0
    setting: str = "generator.sglang.port"
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    start_timeout_s: float = 600.0
    grace_s: float = 1.0


class Server:
    """One server process from `start` to `stop`. Start it in the main thread: it dies with the thread that did."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start, self._port = 0, 0

    @property
    def url(self) -> str:
        """http://HOST:PORT"""
        return f"http://{HOST}:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the guard; the server descends from it."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it is ready, at most start_timeout_s.

        EngineError with the end of its log when it ends before, is not ready in time, or its port is taken. Nothing is
        left of it then.
        """
        deadline = time.monotonic() + self._launch.start_timeout_s
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._attempt(deadline)
                return
            except EngineError:
                taken = _TAKEN.search(self._own_log())
                await self.stop()
                if self._launch.port or not taken or attempt == ATTEMPTS:
                    raise
                log.warning("port %d of server %s was taken meanwhile; trying another", self._port, self._launch.name)
            except BaseException:
                await self.stop()
                raise

    async def _attempt(self, deadline: float) -> None:
        with await self._reserved() as reserved, self._key_file() as key_file:
            self._port = reserved.getsockname()[1]
            self._spawn(key_file)
            log.info("starting a server at %s (log %s)", self.url, self._launch.log)
            if await wait_ready(self.url, deadline - time.monotonic(), self.check, self._launch.name) == "paused":
                raise EngineError(f"the server of {self._launch.name} is paused, though it was started just now")

    async def _reserved(self) -> socket.socket:
        """A socket bound to the port of the server, which does not listen.

        Nobody else is given that port, and the server can bind it, since both allow its reuse. Waits up to _PORT_S for
        a fixed one. EngineError when somebody listens there.
        """
        port, deadline = self._launch.port, time.monotonic() + _PORT_S
        while True:
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind((HOST, port))
                return held
            except OSError as exc:
                held.close()
                if not port or exc.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    what = "is taken" if exc.errno == errno.EADDRINUSE else "cannot be had"
                    raise EngineError(
                        f"port {port} for the server of {self._launch.name} {what} ({exc.strerror}); set "
                        f"{self._launch.setting} to another one, or to 0 for a free one"
                    ) from exc
            await asyncio.sleep(_POLL_S)

    @contextlib.contextmanager
    def _key_file(self) -> Iterator[Path | None]:
        """A file of flags for the server with its keys, while it starts; None when it has none."""
        if not self._launch.keys:
            yield None
            return
        # JSON is YAML.
        file = self._launch.log.with_suffix(".keys.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            json.dump(dict(self._launch.keys), stream)
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)

    def _spawn(self, key_file: Path | None) -> None:
        assert threading.current_thread() is threading.main_thread(), "its guard would end with this thread"
        plan = self._launch
        guarded = [sys.executable, "-m", guard.__name__, str(os.getpid()), str(plan.grace_s), *plan.command]
        guarded += ["--host", HOST, "--port", str(self._port)]
        guarded += ["--config", str(key_file.resolve())] if key_file is not None else []
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        with open(plan.log, "ab") as out:
            if plan.keys:  # a server logs its arguments
                os.fchmod(out.fileno(), 0o600)
            self._log_start = out.tell()
            self._process = subprocess.Popen(
                guarded, env=dict(plan.env), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def check(self) -> None:
        """EngineError with its exit status and the end of its log when the server has ended."""
        status = self._process.poll() if self._process is not None else 0
        if status is not None:
            raise EngineError(self._obituary(status))

    async def watch(self) -> EngineError:
        """Waits for the end of the process, however long it lives; what `check` then raises."""
        while True:
            try:
                self.check()
            except EngineError as exc:
                return exc
            await asyncio.sleep(_WATCH_S)

    async def stop(self) -> None:
        """End it: SIGTERM, after grace_s SIGKILL to all that it started. Waits for its end, at most grace_s + 2 s."""
        process = self._process
        if process is None:
            return
        if (status := process.poll()) is not None:
            if status < 0:  # somebody killed the guard: what does not end with it is left in its group
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            return
        family = guard.descendants(process.pid)
        process.terminate()
        if await _ended(process, self._launch.grace_s + _KILL_S):
            return
        # The guard did not do it.
        for pid in {*family, *guard.descendants(process.pid), process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not await _ended(process, _KILL_S):
            log.warning("the server of %s (pid %d) does not end", self._launch.name, process.pid)

    def _obituary(self, status: int) -> str:
        plan = self._launch
        # The guard's own status is the server's.
        number = -status if status < 0 else status - 128
        how = f"signal {number}" if status < 0 or status > 128 else f"status {status}"
        return f"the server of {plan.name} ended with {how}: {self.cause()} (log {plan.log})"

    def cause(self) -> str:
        """Why it ended, in one line from the end of its log, without its keys."""
        text = cause_in(self._own_log())
        for secret in self._launch.keys.values():
            text = text.replace(secret, "***")
        return text

    def _own_log(self) -> str:
        """The end of this attempt's part of the log."""
        try:
            with open(self._launch.log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError as exc:
            return f"(no log: {exc})"


async def wait_ready(url: str, timeout_s: float, check: Callable[[], None], name: str) -> State:
    """Wait until the server at url is ready, or answers and is paused, at most timeout_s; says meanwhile that it waits.

    check raises EngineError when waiting is useless. EngineError after timeout_s, or when it is no SGLang server.
    """
    started = said = time.monotonic()
    last = "no answer yet"
    mute: float | None = None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
        while True:
            check()
            try:
                ready = await _status(session, f"{url}/ready")
                if ready == 200:
                    check()  # that another process answers there is as good as no answer
                    return "ready"
                if ready == 404:
                    raise EngineError(f"{url} has no /ready: it is no SGLang server, or too old a one (docs/sglang.md)")
                # /ready is 503 of a paused server too: its last generator was killed in the middle of an update.
                if ready == 503 and await _status(session, f"{url}/ping") == 200:
                    return "paused"
                # One that was asked for its health while it was paused says 503 to both for ever, but knows its model.
                told = ready == 503 and await _status(session, f"{url}/model_info") in (200, 401)
                mute = (mute or time.monotonic()) if told else None
                if mute is not None and time.monotonic() - mute >= _MUTE_S:
                    return "paused"
                last = f"/ready is {ready}"
            except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                last = str(exc) or type(exc).__name__
            now = time.monotonic()
            if now - started >= timeout_s:
                raise EngineError(
                    f"the server of {name} at {url} was not ready within {timeout_s:.0f} s "
                    f"(generator.sglang.start_timeout_s): {last}"
                )
            if now - said >= _SAY_S:
                said = now
                log.info("waiting for the server at %s for %.0f s: %s", url, now - started, last)
            await asyncio.sleep(_POLL_S)


async def _status(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as answer:
        return answer.status


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def cause_in(text: str, lines: int = 3) -> str:
    """The cause of a server's end in its log, as one line: the last of its last traceback, or its last words."""
    block = text.rpartition("Traceback (most recent call last)")
    kept = [line.strip() for line in (block[2] if block[1] else text).splitlines() if line.strip()]
    if block[1]:
        # Log lines of other processes follow; they begin with a time in brackets.
        end = next((i for i, line in enumerate(kept) if i and line.startswith("[20")), len(kept))
        kept = kept[:end]
    return " | ".join(kept[-lines:])[-600:] or "(it wrote nothing)"
