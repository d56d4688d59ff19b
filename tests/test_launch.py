"""launch/local.sh with stand-ins for the roles: order, exit status, signals, nothing left behind."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]

# A python that starts stand-ins instead of roles. LEARNER_STATUS and so on say how each one ends; "stay" is for ever,
# "die" is killed the first time and ends with 0 the second time.
STAND_IN = """#!/bin/bash
run_dir="{runs}/quickstart"
end() {{
    [ "$1" = stay ] && exec sleep 300
    sleep 0.3
    [ "$1" = die ] && {{ [ -e "$run_dir/died" ] && exit 0; touch "$run_dir/died"; kill -KILL $$; }}
    exit "$1"
}}
case "$*" in
    "-m asyncrl config"*) exit 0 ;;
    "-m asyncrl replay"*)
        [ -e "$run_dir/replay.address" ] && echo "an old address was left" && exit 9
        [ "$REPLAY_STATUS" = stay ] && echo tcp://127.0.0.1:1 > "$run_dir/replay.address"
        end "$REPLAY_STATUS" ;;
    "-m asyncrl generate"*) echo "$*"; end "$GENERATOR_STATUS" ;;
    "-m asyncrl learn"*)
        echo "$*"
        # A learner never ends before the last generator is there.
        until grep -qs -- "--id g1" "$run_dir/logs/g1.log"; do sleep 0.1; done
        end "$LEARNER_STATUS" ;;
    *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def launch(tmp_path):
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(runs=tmp_path / "runs", python=sys.executable))
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    started = []

    def start(learner="0", replay="stay", generator="stay", *overrides):
        roles = {"LEARNER_STATUS": learner, "REPLAY_STATUS": replay, "GENERATOR_STATUS": generator}
        env = {**os.environ, **roles, "PYTHON": str(stand_in)}
        words = [f"run.dir={tmp_path}/runs", "run.shutdown_s=2", "generator.count=2", "learner.ranks=2", *overrides]
        # A shell cannot trap what was ignored when it started, as SIGINT is in background jobs of scripts.
        command = ["env", "--default-signal=INT", "bash", "launch/local.sh", "configs/quickstart.yaml", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        assert process.poll() is not None, "the script did not end"
        left = [p.info for p in psutil.process_iter(["pid", "cmdline"]) if is_in_session(p, process.pid)]
        assert not left


def is_in_session(process, session):
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def end(process):
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def test_a_finished_learner_ends_the_rest_with_status_0(launch, tmp_path):
    status, out, err = end(launch(learner="0"))
    assert status == 0, err
    names = [line.split()[1] for line in out.splitlines() if line.startswith("started ")]
    assert names == ["replay", "g0", "g1", "learner"]
    logs = tmp_path / "runs/quickstart/logs"
    assert (logs / "g1.log").read_text().rstrip().endswith("--id g1")
    learner = (logs / "learner.log").read_text()
    assert learner.startswith("-m asyncrl learn configs/quickstart.yaml") and "learner.ranks=2" in learner


@pytest.mark.parametrize(
    ("learner", "replay", "generator", "expected", "words"),
    [
        ("3", "stay", "stay", 3, "the learner ended with status 3"),
        ("stay", "0", "stay", 1, "replay ended before it was ready"),
        ("stay", "stay", "1", 1, "every generator ended"),
    ],
)
def test_a_role_that_fails_ends_the_run_with_its_cause(launch, learner, replay, generator, expected, words):
    status, _, err = end(launch(learner, replay, generator))
    assert status == expected
    assert words in err


def test_a_killed_learner_is_started_again(launch):
    status, out, err = end(launch(learner="die"))
    assert status == 0, err
    assert "learner ended with status 137; started again" in err
    assert [line.split()[1] for line in out.splitlines() if line.startswith("started ")][-2:] == ["learner", "learner"]


def test_a_learner_is_not_started_again_more_often_than_the_config_says(launch):
    status, _, err = end(launch("die", "stay", "stay", "run.max_learner_restarts=0"))
    assert status == 137 and "started again" not in err
    assert "the learner ended with status 137" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_ends_everything_with_128_plus_n(launch, number):
    process = launch(learner="stay")
    for line in process.stdout:
        if line.startswith("started learner"):
            break
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    status, _, _ = end(process)
    assert status == 128 + number


@pytest.mark.parametrize(("words", "status"), [(["-h"], 0), (["configs/quickstart.yaml", "--help"], 0), ([], 2)])
def test_help_prints_the_usage_and_starts_nothing(words, status):
    command = ["bash", "launch/local.sh", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    text, other = (done.stderr, done.stdout) if status else (done.stdout, done.stderr)
    assert done.returncode == status and text.startswith("usage: launch/local.sh CONFIG...") and not other


def test_a_folder_with_a_run_in_it_is_refused(launch, tmp_path):
    run = tmp_path / "runs/quickstart"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    status, out, err = end(launch())
    assert status == 2 and "run.name=NAME" in err and "started" not in out


def test_an_address_of_an_earlier_replay_is_not_believed(launch, tmp_path):
    run = tmp_path / "runs/quickstart"
    run.mkdir(parents=True)
    (run / "replay.address").write_text("tcp://127.0.0.1:9")
    status, _, err = end(launch(learner="0"))
    assert status == 0, err
