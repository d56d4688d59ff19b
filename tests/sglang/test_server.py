"""A real server as a child of a generator: what starts it, what ends it, and what is left (nothing)."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest

from asyncrl.config import validate
from asyncrl.engines.sglang.command import environment, flags
from asyncrl.engines.sglang.server import Launch, Server
from asyncrl.errors import EngineError
from asyncrl.generator.open_engine import open_engine
from asyncrl.models.describe import describe
from asyncrl.types import SamplingParams, Version
from tests.helpers.sglang_server import QUICKSTART, START_S, TOOLS, free_port

pytestmark = pytest.mark.usefixtures("can_serve")

ROOT = Path(__file__).parents[2]
SMALL = {"max-running-requests": 8, "max-total-tokens": 2048}
GONE_S = 20.0


def launch(tmp_path, args=None, **rest):
    words = flags(str(QUICKSTART), dtype="float32", seed=0, return_routes=True, args=SMALL | (args or {}))
    env = environment(os.environ, {}, loopback=True, gpus=None)
    command = [str(TOOLS / "serve"), *words]
    return Launch("g0", command, env, tmp_path / "sglang-g0.log", start_timeout_s=START_S, **rest)


def status(url, key=None):
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as exc:
        return exc.code


def family_of(pid):
    """The guard, the HTTP server, the scheduler, the detokenizer and whatever else there is."""
    guard = psutil.Process(pid)
    return [guard, *guard.children(recursive=True)]


def left(family):
    return [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_gone(family):
    deadline = time.monotonic() + GONE_S
    while left(family):
        assert time.monotonic() < deadline, f"{left(family)} live on"
        time.sleep(0.05)


def test_it_is_started_with_keys_in_no_command_line_and_stopped_with_nothing_left(tmp_path):
    async def run():
        plan = launch(tmp_path, keys={"api-key": "sesame", "admin-api-key": "open"})
        server = Server(plan)
        await server.start()
        family = family_of(server.pid)
        try:
            assert len(family) >= 4
            assert not any("sesame" in word for process in family for word in process.cmdline())
            assert [status(f"{server.url}/model_info", key) for key in (None, "sesame")] == [401, 200]
            assert plan.log.stat().st_mode & 0o077 == 0 and "ready to roll" in plan.log.read_text()
        finally:
            await server.stop()
        assert not left(family)
        assert [file.name for file in tmp_path.iterdir()] == ["sglang-g0.log"]

    asyncio.run(run())


STARTER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.sglang.test_server import Server, launch

async def main():
    server = Server(launch(Path({tmp!r})))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_it_ends_with_a_generator_that_is_killed(tmp_path):
    code = STARTER.format(root=str(ROOT), tmp=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as generator:
        try:
            family = family_of(int(generator.stdout.readline()))
            assert len(family) >= 4
        finally:
            generator.kill()
    wait_gone(family)


def test_a_taken_port_and_a_bad_flag_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.engines.sglang.server._PORT_S", 0.5)
    with socket.create_server(("127.0.0.1", free_port())) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=rf"port {port} for the server of g0 is taken .*generator\.sglang\.port"):
            asyncio.run(Server(launch(tmp_path, port=port)).start())
    with pytest.raises(EngineError, match=r"ended with status 2: .*unrecognized arguments: --no-such-flag 1"):
        asyncio.run(Server(launch(tmp_path, {"no-such-flag": 1})).start())


def test_a_scheduler_that_cannot_start_is_quoted(tmp_path):
    with pytest.raises(EngineError, match=r"the server of g0 ended with .*KeyError: 'no-such-backend'|no-such-backend"):
        asyncio.run(Server(launch(tmp_path, {"attention-backend": "no-such-backend"})).start())


def settings(**sglang):
    return validate(
        {
            "model": {"path": str(QUICKSTART)},
            "generator": {"engine": "sglang", "groups_in_flight": 1, "sglang": sglang},
            "weights": {"carrier": "collective"},
            "run": {"watchdog_s": 2 * START_S},
        }
    )


SAMPLING = SamplingParams(1.0, 16, ())
PROMPT = np.array([1, 2, 3, 4], np.int32)


def test_an_engine_on_a_server_of_its_own_fails_at_once_when_that_is_killed(tmp_path):
    config = settings(command=[str(TOOLS / "serve")], args=SMALL, start_timeout_s=START_S)

    async def run():
        async with open_engine(config, tmp_path, "g0", describe(QUICKSTART), SAMPLING) as engine:
            assert engine.version == Version(0, -1)
            done = await engine.generate(PROMPT, 2, SAMPLING)
            assert [len(c.token_ids) for c in done] == [16, 16]
            (guard,) = [p for p in psutil.Process().children() if "asyncrl.engines.sglang.guard" in p.cmdline()]
            family = family_of(guard.pid)
            waits = asyncio.create_task(engine.generate(PROMPT, 4, SamplingParams(1.0, 100, ())))
            await asyncio.sleep(0.1)
            for process in family[1:]:
                process.send_signal(signal.SIGSTOP)  # so that no lost connection tells
            family[1].kill()
            async with asyncio.timeout(GONE_S):
                with pytest.raises(EngineError, match=r"the server of g0 ended with signal 9: .*sglang-g0\.log"):
                    await waits
                with pytest.raises(EngineError, match="ended with signal 9"):
                    await engine.generate(PROMPT, 1, SAMPLING)
        assert not left(family)

    asyncio.run(run())


def test_a_running_server_that_was_left_paused_goes_on_and_lives_on(server, tmp_path):
    config = settings(urls=[server.url])

    async def run():
        assert server.call("/pause_generation", {"mode": "in_place"})[0] == 200
        deadline = time.monotonic() + GONE_S
        while server.call("/ready")[0] == 200:
            assert time.monotonic() < deadline
        async with open_engine(config, tmp_path, "g0", describe(QUICKSTART), SAMPLING) as engine:
            assert len((await engine.generate(PROMPT, 1, SAMPLING))[0].token_ids) == 16

    asyncio.run(run())
    assert server.call("/ready")[0] == 200 and list(tmp_path.iterdir()) == []
