"""Starting and ending process families: nothing outlives the supervisor's stop, or its death."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from asyncrl.launcher import status_of
from asyncrl.process import cause_in, role_environment, start, stop_all
from asyncrl.restarts import was_killed

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"],
    start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""

ORPHAN = """
import subprocess, sys, time
from asyncrl.process import role_environment
code = ("from asyncrl.parent import die_with_parent; die_with_parent(); import time; "
        "print('up', flush=True); time.sleep(60)")
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_until(condition, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_role_environment_sets_what_must_stand_before_torch_is_imported():
    env = role_environment(3)
    assert (env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"], env["OMP_NUM_THREADS"]) == ("passive", "0", "3")


def test_stop_ends_a_stubborn_child_and_the_grandchild_in_its_own_session(tmp_path):
    child = start("stubborn", [sys.executable, "-c", STUBBORN], dict(os.environ), tmp_path / "log")
    assert wait_until(lambda: (tmp_path / "log").read_text().strip().isdigit())
    grandchild = int((tmp_path / "log").read_text())
    assert stop_all([child], 1.0) == ["stubborn"]
    assert child.returncode == -signal.SIGKILL
    assert wait_until(lambda: gone(grandchild))


def test_stop_of_a_child_that_already_ended_keeps_its_status(tmp_path):
    child = start("quick", [sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), tmp_path / "log")
    child.process.wait(120)
    assert stop_all([child], 1.0) == []
    assert child.returncode == 3


def test_a_role_dies_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    assert wait_until(lambda: gone(pid))


# What a process with torch does on a busy host: its interpreter takes seconds to end.
SLOW = "import atexit, sys, time; atexit.register(time.sleep, 3600); "


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("from asyncrl.process import end; print('said', end=''); end(143)", 143, "said"),
        ("from asyncrl.cli import main; sys.argv = ['asyncrl', 'config']; main()", 2, "either CONFIG files or --model"),
        ("from asyncrl.cli import main; sys.argv = ['asyncrl', 'config', 'no.yaml']; main()", 2, "config error"),
        ("from asyncrl.cli import main; sys.argv = ['asyncrl', '--help']; main()", 0, "configs/quickstart.yaml"),
    ],
)
def test_a_command_ends_with_its_output_and_without_the_clean_up_of_its_interpreter(code, status, said):
    done = subprocess.run([sys.executable, "-c", SLOW + code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == status and said in done.stdout + done.stderr


def test_the_cause_is_the_roles_own_error_line_and_not_what_comes_after():
    log = "x\n12:00 learner-0 ERROR asyncrl: TransportError: no take\nTraceback (most recent\nChildFailedError: banner"
    assert cause_in(log) == "12:00 learner-0 ERROR asyncrl: TransportError: no take"


def test_the_cause_is_the_last_traceback_before_torchruns():
    log = "Traceback (a)\n  File x\nValueError: betas\nTraceback (b)\n run(args)\ntorch...ChildFailedError: see\n===="
    assert cause_in(log).splitlines()[-1] == "ValueError: betas"


def test_without_either_the_last_lines_stand_for_the_cause(tmp_path):
    code = "print(*range(40), sep=chr(10))"
    child = start("chatty", [sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    child.process.wait(120)
    assert child.cause().splitlines()[-2:] == ["38", "39"]


def test_the_cause_is_that_of_the_last_attempt_in_a_log_that_goes_on(tmp_path):
    log = tmp_path / "log"
    for word in ("first", "second"):
        code = f"print('12:00 replay ERROR asyncrl: RunError: {word}'); raise SystemExit(1)"
        child = start("replay", [sys.executable, "-c", code], dict(os.environ), log)
        child.process.wait(120)
    assert log.read_text().count("RunError") == 2
    assert child.cause() == "12:00 replay ERROR asyncrl: RunError: second"
    assert child.erred
    # A crash after an attempt that ended with its own error is not one of its own.
    child = start("replay", [sys.executable, "-c", "raise KeyError('x')"], dict(os.environ), log)
    child.process.wait(120)
    assert child.returncode == 1 and not child.erred
    assert "KeyError" in child.cause() and "RunError" not in child.cause()


def test_an_error_of_its_own_counts_whatever_the_status_is(tmp_path):
    # Of a rank that failed and one that hung and was killed, torchrun makes the status of a kill.
    code = "print('12:00 learner-0 ERROR asyncrl: TrainingError: lost', flush=True); raise SystemExit({})"
    for status, erred in ((137, True), (3, True), (0, False)):
        command = [sys.executable, "-c", code.format(status)]
        child = start("learner", command, dict(os.environ), tmp_path / f"log{status}")
        child.process.wait(60)
        assert child.erred == erred


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        ([1], 1),
        ([-9], 137),
        ([1, -9], 137),
        ([1, -15], 1),
        ([-15, -15], 143),
        ([143], 143),
        ([-11, -15], 139),
        ([2], 2),
        ([2, 1], 2),
    ],
)
def test_the_launchers_status_says_whether_a_rank_was_killed(codes, status):
    assert status_of(codes) == status
    assert was_killed(status) == (status > 2)
