from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from asyncrl.learner.stop import StopSignal


@pytest.fixture
def stop():
    old = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGALRM)}
    made = StopSignal()
    yield made
    made.closing()
    for number, handler in old.items():
        signal.signal(number, handler)


def test_a_signal_ends_the_process_at_once(stop):
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143


def test_a_signal_in_a_held_block_ends_the_process_behind_it(stop):
    done = []
    with pytest.raises(SystemExit) as ended:
        with stop.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("saved")
        done.append("went on")
    assert ended.value.code == 143 and done == ["saved"]


def test_without_a_signal_the_block_changes_nothing(stop):
    with stop.held():
        pass
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)


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
