from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from asyncrl.learner.stop import StopSignal, time_to_leave


@pytest.fixture
def stop():
    old = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    made = StopSignal()
    yield made
    made.closing()
    for number, handler in old.items():
        signal.signal(number, handler)


def test_a_signal_ends_the_process_at_once(stop):
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143


def test_in_an_orderly_block_a_signal_is_noted_and_ends_the_process_behind_it(stop):
    done = []
    with pytest.raises(SystemExit) as ended:
        with stop.orderly(60):
            assert not stop.asked
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked
            done.append("saved")
        done.append("went on")
    assert ended.value.code == 130 and done == ["saved"] and not stop.gave_up


def test_what_takes_too_long_in_an_orderly_block_is_cut_off(stop):
    with pytest.raises(SystemExit) as ended, stop.orderly(0.05):
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.01)
    assert ended.value.code == 143 and stop.gave_up


def test_without_a_signal_the_block_changes_nothing(stop):
    with stop.orderly(0.01):
        time.sleep(0.05)
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_rank_with_nothing_to_close_ends_at_once():
    code = (
        "import os, signal\n"
        "from asyncrl.learner.stop import StopSignal\n"
        "stop = StopSignal(hard=True)\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\nfinally:\n    print('cleaned up')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (143, "")


@pytest.mark.parametrize(("shutdown_s", "expected"), [(1, 0.5), (4, 2), (6, 4), (60, 58)])
def test_the_time_to_leave_leaves_time_to_close(shutdown_s, expected):
    assert time_to_leave(shutdown_s) == expected


LOST = """
import os, signal, time
from asyncrl.learner.stop import StopSignal

class Finalizer:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

stop = StopSignal()
try:
    Finalizer()
    print("lost", flush=True)
    while True:
        time.sleep(0.01)
finally:
    stop.closing()
    os.kill(os.getpid(), signal.SIGTERM)
    print("closed", flush=True)
"""


def test_an_exit_that_a_finalizer_swallowed_comes_again_and_nothing_interrupts_the_end():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 143 and done.stdout.split() == ["lost", "closed"]
