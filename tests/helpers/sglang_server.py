"""A real SGLang server on this CPU as a child of the tests: started, asked over HTTP, ended with all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools" / "sglang_cpu"
QUICKSTART = ROOT / "models" / "quickstart"
START_S = 300.0
STOP_S = 20.0
PORT_TAKEN = ("already in use", "is not available", "error while attempting to bind")


def missing() -> str | None:
    """Why no server can be started here, with the command that mends it; None when one can."""
    asked = subprocess.run([str(TOOLS / "environment")], capture_output=True, text=True, timeout=60, check=False)
    if asked.returncode:
        return asked.stderr.strip() + " (make test-sglang does)"
    if not (QUICKSTART / "model.safetensors").exists():
        return f"no model in {QUICKSTART}: make it with `make model` (make test-sglang does)"
    return None


@dataclass
class Server:
    """A running server. url has no path; pid is the HTTP process, whose children are the scheduler and others."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    model: Path
    key: str | None = None
    admin_key: str | None = None
    scratch: Path | None = None

    @property
    def url(self) -> str:
        """http://HOST:PORT"""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the HTTP server, which is that of its group and session, too."""
        return self.process.pid

    def call(
        self, path: str, body: dict[str, Any] | None = None, *, key: str | None = None, timeout_s: float = 60.0
    ) -> tuple[int, Any]:
        """(HTTP status, decoded JSON or None) of a GET, or of a POST when body is given.

        key defaults to the server's own. Waits up to timeout_s for the answer.
        """
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        chosen = self.key if key is None else key
        if chosen:
            asked.add_header("Authorization", f"Bearer {chosen}")
        try:
            with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
                return answer.status, _decoded(answer.read())
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, _decoded(exc.read())

    def generate(self, input_ids: list[int], max_new_tokens: int, **rest: Any) -> dict[str, Any]:
        """/generate of exactly max_new_tokens, with log-probs and routes; rest are fields of the body."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        status, answer = self.call("/generate", {**body, "return_routed_experts": True, **rest})
        assert status == 200, answer
        return answer

    def processes(self) -> list[psutil.Process]:
        """The living processes of this server, zombies aside: of its session, and descendants."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            found = {p.pid: p for p in (own, *own.children(recursive=True))}
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self.pid:
                    found[process.pid] = process
        return [p for p in found.values() if _lives(p)]

    def is_ready(self) -> bool:
        """True when /ready says so and it is this server that listens: another could have got the port."""
        try:
            mine = any(
                c.laddr and c.laddr.port == self.port and c.status == psutil.CONN_LISTEN
                for c in psutil.Process(self.pid).net_connections("tcp")
            )
            return mine and self.call("/ready", timeout_s=5)[0] == 200
        except (OSError, psutil.Error):
            return False

    def tail(self, lines: int = 40) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """SIGKILL to all its processes at once; nothing of it is left when this returns.

        SIGTERM would take 5 to 8 seconds: SGLang looks for it every 5.
        """
        family = self.processes()
        shared = {path for process in family for path in _shared_memory(process)}
        trackers = [p for p in family if _is_tracker(p)]
        for process in family:
            if process not in trackers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.kill()
        self.process.wait(STOP_S)
        # Python's own tracker ends by itself now, after it unlinked the others' semaphores.
        for process in psutil.wait_procs(trackers, timeout=5)[1]:
            process.kill()
        psutil.wait_procs(family, timeout=STOP_S)
        assert not self.processes(), f"processes of the server on port {self.port} are left: {self.processes()}"
        for path in shared:
            path.unlink(missing_ok=True)
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


def start(
    log: Path,
    model: Path = QUICKSTART,
    flags: tuple[str, ...] = (),
    key: str | None = None,
    admin_key: str | None = None,
    env: dict[str, str] | None = None,
) -> Server:
    """Start a server for model and wait until it is ready, at most START_S; flags come last, so they win.

    env is added to this process's environment. Call it in the main thread: the server dies with the thread that
    started it. A port that somebody else took meanwhile is tried again with another, twice. Fails with the log's tail.
    """
    for attempt in range(3):
        server = _launch(log.with_name(f"{log.stem}-{attempt}.log"), model, flags, key, admin_key, env or {})
        try:
            _wait_ready(server)
            return server
        except BaseException:
            server.stop()
            if attempt < 2 and any(words in server.tail() for words in PORT_TAKEN):
                continue
            raise
    raise AssertionError("unreachable")


def _launch(
    log: Path, model: Path, flags: tuple[str, ...], key: str | None, admin_key: str | None, env: dict[str, str]
) -> Server:
    port = free_port()
    command = [str(TOOLS / "serve"), "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-running-requests", "256", "--max-total-tokens", "30000"]
    command += ["--api-key", key] if key else []
    command += ["--admin-api-key", admin_key] if admin_key else []
    # A test run that is killed takes its servers along.
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    # Its sockets are files that SGLang leaves behind; short, for a socket's path has at most 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="sgl"))
    with open(log, "ab") as out:
        process = subprocess.Popen(
            [*tied, *command, *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(process, port, log, model, key, admin_key, scratch)


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while not server.is_ready():
        status = server.process.poll()
        assert status is None, f"the server ended with status {status} before it was ready:\n{server.tail()}"
        assert time.monotonic() < deadline, f"the server was not ready after {START_S:.0f} s:\n{server.tail()}"
        time.sleep(0.25)


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on right now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _shared_memory(process: psutil.Process) -> list[Path]:
    """Files of shared memory that the process maps: SGLang leaves them when it is killed."""
    try:
        return [Path(m.path) for m in process.memory_maps() if m.path.startswith("/dev/shm/")]
    except psutil.Error:
        return []


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
