"""Starting and ending process families: nothing outlives the supervisor's stop, or its death."""

import os
import signal
import subprocess
import sys
import time

import psutil

from asyncrl.process import cause_in, role_environment, start, stop_all

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
code = ("from asyncrl.process import die_with_parent; die_with_parent(); import time; "
        "print('up', flush=True); time.sleep(60)")
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_until(condition, timeout_s=10.0):
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
    assert wait_until(lambda: gone(grandchild), 5)


def test_stop_of_a_child_that_already_ended_keeps_its_status(tmp_path):
    child = start("quick", [sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), tmp_path / "log")
    child.process.wait(20)
    assert stop_all([child], 1.0) == []
    assert child.returncode == 3


def test_a_role_dies_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    assert wait_until(lambda: gone(pid), 10)


def test_the_cause_is_the_roles_own_error_line_and_not_what_comes_after():
    log = "x\n12:00 learner-0 ERROR asyncrl: TransportError: no take\nTraceback (most recent\nChildFailedError: banner"
    assert cause_in(log) == "12:00 learner-0 ERROR asyncrl: TransportError: no take"


def test_the_cause_is_the_last_traceback_before_torchruns():
    log = "Traceback (a)\n  File x\nValueError: betas\nTraceback (b)\n run(args)\ntorch...ChildFailedError: see\n===="
    assert cause_in(log).splitlines()[-1] == "ValueError: betas"


def test_without_either_the_last_lines_stand_for_the_cause(tmp_path):
    code = "print(*range(40), sep=chr(10))"
    child = start("chatty", [sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    child.process.wait(20)
    assert child.cause().splitlines()[-2:] == ["38", "39"]
