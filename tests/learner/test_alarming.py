"""What alarms do: file, texts, command, pause and stop; and what a resumed learner makes of the file."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config import validate
from asyncrl.errors import TransportError
from asyncrl.learner.alarm_command import Commands
from asyncrl.learner.alarming import FILE, Alarming, ended_by
from asyncrl.metrics.sink import Sink
from asyncrl.wire import AlarmMsg

BAD = {"policy/reward": 0.5, "mismatch/f_2": 0.3}
GOOD = {"policy/reward": 0.5, "mismatch/f_2": 0.0}


class Replay:
    """Stands where the connection to replay is: keeps what it is asked to tune, or refuses."""

    def __init__(self, refuses=False):
        self.epoch, self.tuned, self.refuses = 0, [], refuses

    def tune(self, values, by):
        if self.refuses:
            raise TransportError("no answer")
        self.tuned.append((dict(values), by))
        return "done"


def config(actions=("log", "text"), **alarms):
    f_2 = {"updates": 2, "window": 4, "actions": list(actions)}
    return validate({"model": {"path": "m"}, "run": {"name": "r"}, "alarms": {"f_2": f_2} | alarms})


def feed(alarming, records, settings, first=0):
    """Check and act on each record; the texts that were said."""
    said = []
    for update, record in enumerate(records, first):
        news = alarming.check(update, record, settings)
        alarming.act(update, news, lambda u, text: said.append((u, text)))
    return said


def lines(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_an_alarm_is_written_logged_and_said_once_when_it_goes_on_and_once_when_it_goes_off(tmp_path, caplog):
    caplog.set_level("INFO")
    settings = config()
    alarming = Alarming(tmp_path, Replay(), settings, 0, False)
    said = feed(alarming, [GOOD, BAD, BAD, BAD] + [GOOD] * 6, settings)
    assert [(r["update"], r["name"], r["on"], r["since"]) for r in lines(tmp_path)] == [
        (2, "f_2", True, 1),
        (8, "f_2", False, 1),
    ]
    assert lines(tmp_path)[0]["actions"] == ["log", "text"] and lines(tmp_path)[0]["epoch"] == 0
    assert [u for u, _ in said] == [2, 8]
    assert said[0][1].startswith("**f_2** is on since update 1: 30.0% of the tokens") and "What to do: " in said[0][1]
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 1 and warned[0].startswith("alarm f_2 since update 1: 30.0%")
    assert alarming.scalars()["alarm/f_2"] == 0.0 and alarming.ending is None


def test_alarms_that_are_found_elsewhere_are_told_and_written_with_the_others(tmp_path):
    settings = config()
    alarming = Alarming(tmp_path, Replay(), settings, 0, False)
    other = AlarmMsg("generator/g3", 4, "z of 40", "restart it")
    said = []
    for update, others in enumerate(([], [other], [other], [])):
        news = alarming.check(update, BAD, settings, others)
        alarming.act(update, news, lambda u, text: said.append((u, text)))
        if update == 2:
            assert [m.name for m in news.messages()] == ["f_2", "generator/g3"]
    assert [(r["update"], r["name"], r["on"]) for r in lines(tmp_path)] == [
        (1, "f_2", True),
        (1, "generator/g3", True),
        (3, "generator/g3", False),
    ]
    assert (3, "**generator/g3** is off.") in said


def test_pause_asks_replay_once_and_a_refusal_is_counted(tmp_path, caplog):
    settings = config(["pause"])
    replay = Replay()
    alarming = Alarming(tmp_path, replay, settings, 0, False)
    assert feed(alarming, [BAD] * 6, settings) == []
    assert replay.tuned == [({"weights.paused": True}, "alarm f_2")]
    assert "alarm f_2: publishing is paused" in caplog.text and "since update" not in caplog.text
    deaf = Alarming(tmp_path / "other", Replay(refuses=True), settings, 0, False)
    feed(deaf, [BAD] * 3, settings)
    assert deaf.scalars()["run/alarm_action_failures"] == 1.0


def test_stop_names_the_alarm_that_ends_the_run_and_what_it_may_yet_undo(tmp_path):
    settings = config(["stop"])
    alarming = Alarming(tmp_path, Replay(), settings, 0, False)
    assert alarming.suspect() == 0
    feed(alarming, [GOOD, GOOD], settings)
    assert alarming.suspect() == 2  # what comes next may be bad
    feed(alarming, [BAD, GOOD], settings, first=2)
    assert alarming.ending is None and alarming.suspect() == 2
    feed(alarming, [BAD], settings, first=4)
    assert alarming.ending is not None and alarming.suspect() == 2
    text = ended_by(alarming.ending, "u2")
    assert text.startswith("alarm f_2 ended the run (alarms.f_2.actions has stop): 30.0%")
    assert "It began at update 2" in text and text.endswith("goes on from u2")
    # Without the action nothing is kept for it.
    assert feed(alarming, [BAD], config(["log"]), first=5) == [] and alarming.suspect() is None


def test_a_resumed_learner_agrees_with_the_file_and_forgets_what_is_undone(tmp_path):
    settings = config()
    with Sink(tmp_path, tensorboard=False) as sink:
        first = Alarming(tmp_path, Replay(), settings, 0, False)
        for update, record in enumerate([GOOD, BAD, GOOD, BAD, BAD]):
            sink.write(update, record)
            feed(first, [record], settings, first=update)
    assert [(r["update"], r["on"]) for r in lines(tmp_path)] == [(3, True)]
    # Update 2 is where the checkpoint was: one bad update is in the window, the alarm is not on any more.
    second = Alarming(tmp_path, Replay(), settings, 2, True)
    assert [(r["update"], r["on"]) for r in lines(tmp_path)] == [(3, True), (2, False)]
    assert feed(second, [BAD], settings, first=2) and lines(tmp_path)[-1]["since"] == 1
    # Killed now and resumed at 5, it is on by the records, and the file says so already.
    with Sink(tmp_path, tensorboard=False, first_update=5, resumed=True):
        third = Alarming(tmp_path, Replay(), settings, 5, True)
    assert third.scalars()["alarm/f_2"] == 1.0 and len(lines(tmp_path)) == 3
    with (tmp_path / FILE).open("a") as out:
        out.write('{"half a li')
    assert Alarming(tmp_path, Replay(), settings, 5, True).scalars()["alarm/f_2"] == 1.0


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path, caplog):
    settings = config()
    alarming = Alarming(tmp_path / "gone", Replay(), settings, 0, False)
    assert len(feed(alarming, [BAD] * 3, settings)) == 1
    assert "alarms.jsonl cannot be written" in caplog.text


# --- the command ------------------------------------------------------------------------------------

TELL = (
    "import json, os, sys; told = json.load(sys.stdin); print('hello from', os.environ['ASYNCRL_ALARM']); "
    "open(sys.argv[1], 'w').write(json.dumps(told))"
)


def test_the_command_gets_the_alarm_and_its_output_is_kept(tmp_path):
    told = tmp_path / "told; rm -rf $HOME"  # no shell reads this
    settings = config(["command"], command=[sys.executable, "-c", TELL, str(told)])
    alarming = Alarming(tmp_path, Replay(), settings, 0, False)
    feed(alarming, [BAD] * 3, settings)
    alarming.close(60)
    payload = json.loads(told.read_text())
    assert (payload["name"], payload["since"], payload["update"], payload["run"]) == ("f_2", 0, 1, "r")
    assert payload["text"].startswith("30.0%") and payload["remedy"] and Path(payload["folder"]) == tmp_path
    assert (tmp_path / "logs" / "alarms.log").read_text() == "hello from f_2\n"
    assert alarming.scalars()["run/alarm_action_failures"] == 0.0


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


HANG = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(600)"
)


def wait_for(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def test_a_command_that_hangs_is_killed_with_what_it_started_and_nobody_waits_for_it(tmp_path, caplog):
    commands, file = Commands(tmp_path / "log"), tmp_path / "pid"
    commands.start([sys.executable, "-c", HANG, str(file)], "f_2", {}, 10.0)  # returns at once
    commands.start([sys.executable, "-c", TELL, str(tmp_path / "next")], "truncation", {"n": 1}, 60.0)
    wait_for(lambda: file.exists() and file.read_text())
    assert commands.failures == 0
    wait_for((tmp_path / "next").exists)  # its turn came
    assert commands.failures == 1 and gone(int(file.read_text()))
    assert "took longer than alarms.command_timeout_s=10 and was killed" in caplog.text
    commands.close(10)


def test_at_the_end_a_running_command_is_killed_after_the_wait(tmp_path):
    commands, file = Commands(tmp_path / "log"), tmp_path / "pid"
    commands.start([sys.executable, "-c", HANG, str(file)], "f_2", {}, 600.0)
    commands.start([sys.executable, "-c", TELL, str(tmp_path / "next")], "truncation", {}, 600.0)
    wait_for(lambda: file.exists() and file.read_text())
    commands.close(0.1)
    wait_for(lambda: gone(int(file.read_text())))
    assert not (tmp_path / "next").exists()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/no/such/program"], "/no/such/program cannot be started"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with status 3"),
        (["bad\0name"], "cannot be started"),
    ],
)
def test_a_command_that_fails_is_counted_and_said(tmp_path, caplog, command, why):
    commands = Commands(tmp_path / "log")
    commands.start(command, "f_2", {"text": "x" * 200_000}, 30.0)  # more than a pipe holds, and nobody reads it
    commands.close(60)
    assert commands.failures == 1 and why in caplog.text and "alarm f_2: " in caplog.text
