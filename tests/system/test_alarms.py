"""An alarm in a whole run: it runs a command, ends the run, and the run goes on from before it."""

import json
import re
import subprocess
import sys

from tests.system.conftest import ROOT

TELL = "import os, sys; sys.stdout.write(os.environ['ASYNCRL_ALARM'] + ' ' + sys.stdin.read())"


def alarms(run, name=""):
    """Lines of alarms.jsonl, of one alarm or of all."""
    file = run.folder / "alarms.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if name in ("", line["name"])]


def tune(run, *values):
    """`asyncrl tune`, from the folder."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "tune", str(run.folder), *values],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alarm_stops_the_run_which_goes_on_from_the_checkpoint_before_it(start_run):
    watched = {
        "alarms.truncation": "{above: 1, updates: 4, window: 4, actions: [text, command, stop]}",
        "alarms.command": json.dumps([sys.executable, "-c", TELL]),
    }
    changes = {"learner.updates": 400, "learner.checkpoint_every": 1, "learner.keep_checkpoints": 1, "eval.every": 0}
    run = start_run("stopped", **watched, **changes, **{"sampling.max_new_tokens": 3})
    run.wait_for(lambda: len(run.updates()) >= 4)
    tune(run, "alarms.truncation.above=0")
    assert run.wait() == 1, run.text()

    (line,) = alarms(run, "truncation")
    records = run.updates()
    # A threshold that is tuned counts from its take on: four bad updates, and no other record after them.
    assert (line["name"], line["on"], line["update"] - line["since"]) == ("truncation", True, 3)
    assert line["update"] == records[-1]["update"] and records[-1]["alarm/truncation"] == 1.0
    assert [r["alarm/truncation"] for r in records[:-1]] == [0.0] * (len(records) - 1)
    assert "run failed: the learner ended with status 1" in run.output.read_text()
    assert f"alarm truncation ended the run (alarms.truncation.actions has stop): {line['text']}" in run.text()
    name, _, told = (run.folder / "logs" / "alarms.log").read_text().partition(" ")
    assert name == "truncation" and json.loads(told)["since"] == line["since"]
    # One checkpoint is kept, and the one before the first bad update; the others are set aside.
    left = {f.name for f in (run.folder / "checkpoints").iterdir() if not f.name.endswith(".part")}
    good = [int(n[1:]) for n in left if re.fullmatch(r"u\d+", n)]
    assert len(good) == 1 and good[0] < line["since"]
    assert all(int(n[1:].removesuffix(".alarm")) >= line["since"] for n in left if n.endswith(".alarm"))

    again = start_run("stopped", resume=True, **{"alarms.truncation.actions": "[log]"})
    again.wait_for(lambda: sum(r.get("run/epoch") == 1 for r in again.updates()) >= 6)
    again.wait_for(lambda: len(alarms(again, "truncation")) >= 3)
    new = [r for r in again.updates() if r.get("run/epoch") == 1]
    assert new[0]["update"] == good[0] and new[0]["alarm/truncation"] == 0.0
    # What an alarm of the undone updates said is taken back; the tuned threshold is in force still.
    assert [a["on"] for a in alarms(again, "truncation")] == [True, False, True]
    assert [r["alarm/truncation"] for r in new[:6]] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
