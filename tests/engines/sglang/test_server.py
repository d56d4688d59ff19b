"""A server process: started, watched, ended with all it started, whoever dies. Against a stand-in (B49)."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.engines.sglang import guard
from asyncrl.engines.sglang import server as server_module
from asyncrl.engines.sglang.command import environment, flags, number_of, program, url_of, visible_gpus
from asyncrl.engines.sglang.server import Launch, Server, cause_in, wait_ready
from asyncrl.errors import ConfigError, EngineError

ROOT = Path(__file__).parents[3]
FAKE = Path(__file__).with_name("fake_server.py")
WAIT_S = 60.0


def launch(tmp_path, mode, env=None, **rest):
    rest = {"start_timeout_s": WAIT_S, "grace_s": 0.5} | rest
    env = {**os.environ, "FAKE_OUT": str(tmp_path / "seen"), "PYTHONWARNINGS": "", **(env or {})}
    return Launch("g0", [sys.executable, str(FAKE), mode], env, tmp_path / "logs" / "sglang-g0.log", **rest)


def seen(tmp_path):
    return json.loads((tmp_path / "seen").read_text())


def until(done, what):
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_is_started_and_nothing_is_left_of_it(tmp_path):
    async def run():
        server = Server(launch(tmp_path, "children"))
        await server.start()
        said = seen(tmp_path)
        assert f"http://127.0.0.1:{said['words'][3]}" == server.url
        family = [server.pid, said["pid"], *said["children"]]
        assert all(lives(pid) for pid in family)
        await server.stop()
        assert not any(lives(pid) for pid in family)
        await server.stop()  # once more does nothing

    asyncio.run(run())


def test_one_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    async def run():
        server = Server(launch(tmp_path, "stubborn children", grace_s=0.2))
        await server.start()
        family = [server.pid, seen(tmp_path)["pid"], *seen(tmp_path)["children"]]
        await server.stop()
        assert not any(lives(pid) for pid in family)

    asyncio.run(run())


STARTER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.engines.sglang.test_server import Server, launch

async def main():
    server = Server(launch(Path({tmp!r}), "stubborn children"))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["generator", "guard", "server"])
def test_nothing_outlives_whoever_is_killed(tmp_path, victim):
    code = STARTER.format(root=str(ROOT), tmp=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as generator:
        try:
            guard_pid = int(generator.stdout.readline())
            said = seen(tmp_path)
            os.kill({"generator": generator.pid, "guard": guard_pid, "server": said["pid"]}[victim], signal.SIGKILL)
            family = [guard_pid, said["pid"], *said["children"]]
            if victim == "guard":  # what ends by itself with its parent does; the rest is the guard's business
                family = family[:2]
            until(lambda: not any(lives(pid) for pid in family), f"{family} live on")
        finally:
            generator.kill()
            for pid in seen(tmp_path)["children"]:
                if lives(pid):
                    os.kill(pid, signal.SIGKILL)


def test_a_generator_that_died_before_the_guard_came_up_gets_no_server(tmp_path):
    command = [sys.executable, "-m", guard.__name__, "1", "1", "touch", str(tmp_path / "started")]
    done = subprocess.run(command, cwd=ROOT, timeout=WAIT_S, check=False)
    assert done.returncode == 137 and not (tmp_path / "started").exists()


@pytest.mark.parametrize(("code", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_guard_reports_how_the_command_ended(code, status):
    command = [sys.executable, "-m", guard.__name__, str(os.getpid()), "1", "sh", "-c", code]
    assert subprocess.run(command, cwd=ROOT, timeout=WAIT_S, check=False).returncode == status


def test_the_guard_imports_nothing_heavy():
    code = f"import sys, {guard.__name__}; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=WAIT_S, check=True)
    assert not {"torch", "numpy", "aiohttp", "psutil", "pydantic"} & set(done.stdout.decode().split())


# --- a start that fails --------------------------------------------------------------------------


def test_a_command_that_is_not_there_says_so(tmp_path):
    plan = Launch("g0", ["/nowhere/serve"], os.environ, tmp_path / "log", start_timeout_s=WAIT_S)
    with pytest.raises(EngineError, match=r"ended with status 127: cannot start '/nowhere/serve': No such file"):
        asyncio.run(Server(plan).start())


def test_the_cause_of_a_failed_start_is_quoted_without_its_keys(tmp_path):
    plan = launch(tmp_path, "raises", keys={"api-key": "sesame"})
    with pytest.raises(EngineError) as caught:
        asyncio.run(Server(plan).start())
    assert "the server of g0 ended with status 1: " in str(caught.value)
    assert "ValueError: no such flag; the key is ***" in str(caught.value)
    assert str(plan.log) in str(caught.value) and "sesame" not in str(caught.value)
    assert plan.log.stat().st_mode & 0o077 == 0
    assert [f.name for f in plan.log.parent.iterdir()] == [plan.log.name]


def test_only_this_attempts_part_of_the_log_is_quoted(tmp_path):
    plan = launch(tmp_path, "raises")
    plan.log.parent.mkdir()
    plan.log.write_text("Traceback (most recent call last):\nKeyError: of yesterday\n")
    with pytest.raises(EngineError, match="no such flag") as caught:
        asyncio.run(Server(plan).start())
    assert "yesterday" not in str(caught.value) and "yesterday" in plan.log.read_text()


def test_a_server_that_does_not_get_ready_is_ended(tmp_path):
    with pytest.raises(
        EngineError, match=r"not ready within .* \(generator\.sglang\.start_timeout_s\): Cannot connect"
    ):
        asyncio.run(Server(launch(tmp_path, "hangs", start_timeout_s=2.0)).start())
    assert not (tmp_path / "seen").exists() or not lives(seen(tmp_path)["pid"])


def test_something_else_than_sglang_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"has no /ready: it is no SGLang server"):
        asyncio.run(Server(launch(tmp_path, "other")).start())


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path):
    async def run():
        task = asyncio.create_task(Server(launch(tmp_path, "hangs children")).start())
        await asyncio.to_thread(until, (tmp_path / "seen").exists, "it did not come up")
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(lives(pid) for pid in [seen(tmp_path)["pid"], *seen(tmp_path)["children"]])

    asyncio.run(run())


# --- ports (B49) ---------------------------------------------------------------------------------


def test_a_port_that_another_got_meanwhile_is_tried_again_with_another_one(tmp_path):
    async def run():
        server = Server(launch(tmp_path, "taken"))
        await server.start()
        await server.stop()

    asyncio.run(run())
    assert (tmp_path / "seen.count").read_text() == ".."


def test_it_gives_up_after_three_ports(tmp_path):
    with pytest.raises(EngineError, match="address already in use"):
        asyncio.run(Server(launch(tmp_path, "taken", {"FAKE_TAKEN": "9"})).start())
    assert (tmp_path / "seen.count").read_text() == "..."


def test_a_fixed_port_that_is_taken_names_port_and_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.engines.sglang.server._PORT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=rf"port {port} .* is taken .*set generator\.sglang\.port to another"):
            asyncio.run(Server(launch(tmp_path, "", port=port)).start())
    assert not (tmp_path / "seen").exists()


def test_a_fixed_port_is_waited_for_while_its_last_server_ends(tmp_path):
    async def run():
        other = socket.create_server(("127.0.0.1", 0))
        server = Server(launch(tmp_path, "", port=other.getsockname()[1]))
        asyncio.get_running_loop().call_later(0.5, other.close)
        await server.start()
        await server.stop()

    asyncio.run(run())


def test_servers_that_start_at_once_get_different_ports(tmp_path):
    async def run():
        servers = [Server(launch(tmp_path / str(i), "", {"FAKE_OUT": str(tmp_path / f"seen{i}")})) for i in range(4)]
        try:
            await asyncio.gather(*(server.start() for server in servers))
            assert len({server.url for server in servers}) == 4
        finally:
            await asyncio.gather(*(server.stop() for server in servers))

    asyncio.run(run())


# --- while it runs -------------------------------------------------------------------------------


def test_the_watch_tells_how_the_server_ended_and_what_it_said_last(tmp_path):
    async def run():
        server = Server(launch(tmp_path, "dies children"))
        await server.start()
        watch = asyncio.create_task(server.watch())
        await asyncio.sleep(0.3)
        assert not watch.done()
        Path(f"{tmp_path}/seen.die").touch()
        async with asyncio.timeout(WAIT_S):
            error = await watch
        assert isinstance(error, EngineError)
        assert "the server of g0 ended with signal 9: out of memory" in str(error)
        assert not any(lives(pid) for pid in seen(tmp_path)["children"])

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["paused", "mute"])
def test_a_paused_server_counts_as_up_and_is_told_apart(tmp_path, monkeypatch, mode):
    # SGLang calls itself unhealthy when it was asked while it was paused.
    monkeypatch.setattr(server_module, "_MUTE_S", 0.5)

    async def run():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [sys.executable, str(FAKE), mode, "--host", "127.0.0.1", "--port", str(port)]
        with subprocess.Popen(words, env={**os.environ, "FAKE_OUT": str(tmp_path / "seen")}) as process:
            try:
                assert await wait_ready(f"http://127.0.0.1:{port}", WAIT_S, lambda: None, "g0") == "paused"
            finally:
                process.kill()
        with pytest.raises(EngineError, match="is paused, though it was started just now"):
            await Server(launch(tmp_path, mode)).start()

    asyncio.run(run())


def test_keys_are_in_no_command_line(tmp_path):
    async def run():
        server = Server(launch(tmp_path, "", keys={"api-key": "sesame", "admin-api-key": "tahini"}))
        await server.start()
        said = seen(tmp_path)
        assert said["config"] == {"api-key": "sesame", "admin-api-key": "tahini"} and said["mode"] == "0o600"
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (server.pid, said["pid"])]
        assert not any("sesame" in line or "tahini" in line for line in lines)
        await server.stop()

    asyncio.run(run())
    assert [f.name for f in (tmp_path / "logs").iterdir()] == ["sglang-g0.log"]


# --- command line, environment, numbers ------------------------------------------------------------


def test_flags_of_a_server():
    args = {"tp-size": 4, "mem-fraction-static": 0.8, "enable-metrics": True, "disable-radix-cache": False}
    assert flags("/m", dtype="bfloat16", seed=7, return_routes=True, args=args) == [
        "--model-path", "/m", "--random-seed", "7", "--dtype", "bfloat16", "--enable-return-routed-experts",
        "--tp-size", "4", "--mem-fraction-static", "0.8", "--enable-metrics",
    ]  # fmt: skip
    assert flags("/m", dtype=None, seed=0, return_routes=False, args={}) == ["--model-path", "/m", "--random-seed", "0"]


def test_python_is_this_interpreter_and_paths_stay_as_written():
    assert program(("python", "-m", "sglang.launch_server")) == [sys.executable, "-m", "sglang.launch_server"]
    assert program(("tools/serve", "python")) == ["tools/serve", "python"]


def test_the_environment_keeps_what_is_given():
    base = {"PATH": "/bin", "OMP_NUM_THREADS": "4"}
    found = environment(base, {"A": "1"}, loopback=True, gpus="2,3")
    assert found["GLOO_SOCKET_IFNAME"] == "lo" and found["OMP_NUM_THREADS"] == "4" and found["A"] == "1"
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_WAIT_POLICY"], found["PATH"]) == ("2,3", "passive", "/bin")
    assert environment({"GLOO_SOCKET_IFNAME": "eth0"}, {}, loopback=True, gpus=None)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environment(base, {"GLOO_SOCKET_IFNAME": "ib0"}, loopback=True, gpus=None)["GLOO_SOCKET_IFNAME"] == "ib0"
    assert "SGLANG_MAX_NEW_TOKENS_LIMIT" not in environment(
        {"SGLANG_MAX_NEW_TOKENS_LIMIT": "8"}, {}, loopback=True, gpus=None
    )
    far = environment(base, {}, loopback=False, gpus=None)
    assert "GLOO_SOCKET_IFNAME" not in far and "CUDA_VISIBLE_DEVICES" not in far


@pytest.mark.parametrize(
    ("count", "first", "index", "visible", "gives"),
    [
        (0, 0, 1, "0,1", None),
        (2, 0, 0, None, "0,1"),
        (2, 4, 1, None, "6,7"),
        (1, 1, 1, "4,5,6", "6"),
        (1, 0, 0, "GPU-aa, GPU-bb", "GPU-aa"),
    ],
)
def test_each_server_on_a_host_has_gpus_of_its_own(count, first, index, visible, gives):
    assert visible_gpus(count, first, index, visible) == gives


def test_gpus_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match=r"gpus=2 .* number 1 .* GPUs 2 to 3, but CUDA_VISIBLE_DEVICES=0,1,2 has 3"):
        visible_gpus(2, 0, 1, "0,1,2")


@pytest.mark.parametrize(
    ("name", "number"), [("g0", 0), ("g12", 12), ("node7-g3", 3), ("host-12345", None), ("host", None), ("7", None)]
)
def test_the_number_of_a_generator(name, number):
    assert number_of(name) == number


def test_the_url_of_a_generator():
    urls = ["http://a:1", "http://b:1"]
    assert [url_of(urls, name, 2) for name in ("g0", "x-g1")] == urls
    assert url_of(urls[:1], "host-123", 1) == url_of(urls[:1], "host-123", 0) == urls[0]
    with pytest.raises(ConfigError, match=r"'g2' has no server: generator\.sglang\.urls=.* has 2; .* from g0 to g1"):
        url_of(urls, "g2", 2)
    with pytest.raises(ConfigError, match=r"'host-123' does not say which of the 2 .*--id g0"):
        url_of(urls, "host-123", 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "(it wrote nothing)"),
        ("usage: x\nserve: error: no argument --bad\n", "usage: x | serve: error: no argument --bad"),
        (
            "[2026-01-01 TP0] Scheduler hit an exception: Traceback (most recent call last):\n  File 'x'\n    y()\n"
            "RuntimeError: Not enough memory\n\n[2026-01-01] Received sigquit from a child process.\nKilled\n",
            "File 'x' | y() | RuntimeError: Not enough memory",
        ),
    ],
)  # fmt: skip
def test_the_cause_in_a_log(text, says):
    assert cause_in(text) == says
