"""The supervisor with stand-ins for the roles: who is started again, and with which cause a run ends."""

import sys
import time

import pytest

from asyncrl import supervisor as module
from asyncrl.config import validate
from asyncrl.errors import RunError
from asyncrl.supervisor import Supervisor

OWN = "print('12:00 learner-0 ERROR asyncrl: TrainingError: lost', flush=True); "
STAY = "import time; time.sleep(300)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs stand-ins: for every role the code of its first attempt, its second, ... the last one again and again."""
    started = []

    def go(run=None, until=lambda supervisor: False, **scripts):
        attempts = dict.fromkeys(scripts, 0)

        def role_command(name, config, file):
            codes = scripts.get(name, [STAY])
            attempts[name] = attempts.get(name, 0) + 1
            return [sys.executable, "-c", codes[min(attempts[name], len(codes)) - 1]]

        monkeypatch.setattr(module, "role_command", role_command)
        tree = {"model": {"path": "m"}, "run": {"dir": str(tmp_path), "shutdown_s": 2} | (run or {})}
        supervisor = Supervisor(validate(tree | {"generator": {"count": 2}}), tmp_path / "run")
        started.append(supervisor)
        supervisor.start()
        deadline = time.monotonic() + 120
        while not (supervisor.check() or until(supervisor)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return attempts

    yield go
    for supervisor in started:
        supervisor.stop()
        assert all(child.returncode is not None for child in supervisor.children.values())


def test_a_killed_learner_is_started_again(run):
    assert run(learner=["raise SystemExit(137)", ""])["learner"] == 2


def test_a_learner_with_its_own_error_ends_the_run_also_when_a_rank_was_killed(run, capfd):
    with pytest.raises(RunError, match=r"learner ended with status 137:\n.*TrainingError: lost"):
        run(learner=[OWN + "raise SystemExit(137)", ""])
    assert "started again" not in capfd.readouterr().err


def test_a_generator_whose_config_is_refused_is_set_aside_and_the_run_goes_on(run, capfd):
    attempts = run(
        {"max_generator_restarts": 3},
        until=lambda s: s.policy.judged("g0") and not s.policy.due,
        g0=["raise SystemExit(2)"],
    )
    assert attempts["g0"] == 1
    assert "generator g0 ended with status 2; set aside" in capfd.readouterr().err


def test_the_last_generator_ends_the_run(run):
    with pytest.raises(RunError, match=r"every generator ended; g. with status 3"):
        run({"max_generator_restarts": 0}, g0=["raise SystemExit(3)"], g1=["raise SystemExit(3)"])


def test_a_replay_with_its_own_error_ends_the_run(run):
    with pytest.raises(RunError, match="replay ended with status 1"):
        run(replay=[OWN + "raise SystemExit(1)"])
