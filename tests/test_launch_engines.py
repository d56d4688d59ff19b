"""launch/engines.sh with stand-ins for the generators: ids, numbers, restarts, exit status, nothing left behind."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]

# The plan of a generator is a file of words, one per start: an exit status, `kill`, or `stay`.
STAND_IN = """#!/bin/bash
case "$*" in
    "-m asyncrl config"*) exit 0 ;;
    "-m asyncrl generate"*)
        id="${{@: -1}}"
        echo "start $id $ASYNCRL_LOCAL_INDEX"
        plan="{plans}/$id"
        word=$(head -n 1 "$plan"); sed -i 1d "$plan"
        [ "$word" = stay ] && exec sleep 300
        [ "$word" = kill ] && kill -KILL $$
        exit "$word" ;;
    *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def engines(tmp_path):
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(plans=tmp_path, python=sys.executable))
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    started = []

    def start(*plans, restarts=3, words=()):
        for i, plan in enumerate(plans):
            (tmp_path / f"here-g{i}").write_text("\n".join(plan.split()) + "\n")
        words = [*words, f"run.dir={tmp_path}/runs", "run.shutdown_s=2", f"run.max_generator_restarts={restarts}"]
        command = ["env", "--default-signal=INT", "bash", "launch/engines.sh", str(len(plans))]
        process = subprocess.Popen(
            [*command, "configs/quickstart.yaml", *words], cwd=ROOT, text=True, start_new_session=True,
            env={**os.environ, "PYTHON": str(stand_in), "NAME": "here-g"}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        assert process.poll() is not None, "the script did not end"
        process.stdout.close()
        process.stderr.close()
        assert not [p for p in psutil.process_iter() if in_session(p, process.pid)]


def in_session(process, session):
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def starts(tmp_path, number):
    return (tmp_path / f"runs/quickstart/logs/here-g{number}.log").read_text().splitlines()


def test_each_generator_has_its_id_and_its_number_on_this_host(engines, tmp_path):
    process = engines("0", "0", "0")
    assert process.wait(60) == 0
    assert [starts(tmp_path, i) for i in range(3)] == [[f"start here-g{i} {i}"] for i in range(3)]


def test_what_failed_or_was_killed_is_started_again_until_the_run_is_over(engines, tmp_path):
    process = engines("1 kill 0")
    assert process.wait(60) == 0
    assert len(starts(tmp_path, 0)) == 3
    assert "here-g0 ended with status 1; started again in 1 s" in process.stderr.read()


def test_nothing_is_started_again_for_a_run_that_is_over(engines, tmp_path):
    process = engines("0", "kill stay")
    assert process.wait(60) == 0
    assert len(starts(tmp_path, 1)) == 1


def test_each_generator_needs_a_server_of_its_own(engines, tmp_path):
    words = ["generator.engine=sglang", "generator.sglang.urls=[http://h:1]", "weights.carrier=collective"]
    process = engines("0", "0", words=words)
    assert process.wait(60) == 2
    assert "generator.sglang.urls has 1 servers for 2 generators" in process.stderr.read()
    assert not (tmp_path / "runs").exists()


def test_restarts_are_counted_and_a_refused_config_is_not_tried_again(engines, tmp_path):
    process = engines("1 1 1 1 1", "2", restarts=1)
    assert process.wait(60) == 2
    assert len(starts(tmp_path, 0)) == 2 and len(starts(tmp_path, 1)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_of_them(engines, tmp_path, number):
    process = engines("stay", "stay")
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"runs/quickstart/logs/here-g{i}.log").exists() for i in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 128 + number


@pytest.mark.parametrize("words", [[], ["0", "x.yaml"], ["two", "x.yaml"], ["2"]])
def test_wrong_words_show_the_usage(words):
    done = subprocess.run(
        ["bash", "launch/engines.sh", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "usage: launch/engines.sh COUNT CONFIG" in done.stderr
