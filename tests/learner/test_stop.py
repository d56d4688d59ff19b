from __future__ import annotations

import os
import signal

import pytest

from asyncrl.learner.stop import StopSignal


@pytest.fixture
def stop():
    old = signal.getsignal(signal.SIGTERM)
    yield StopSignal()
    signal.signal(signal.SIGTERM, old)


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
