"""Sink: one line and one TensorBoard point per update, one writer, resume, NaN, failures."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServersAccumulator

from asyncrl.errors import RunError
from asyncrl.metrics.sink import Sink, hold, read_jsonl, timeline

ROOT = Path(__file__).parents[2]


def events(run_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run_dir / "tb"), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def points(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    return [(e.step, e.value) for e in events(run_dir).Scalars(tag)]


def test_the_same_numbers_in_both_files(tmp_path):
    with Sink(tmp_path) as sink:
        sink.write(0, {"policy/reward": 0.25, "optim/lr": 1e-4})
        sink.write(1, {"policy/reward": 0.5})
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["update"] for r in records] == [0, 1]
    assert [r["policy/reward"] for r in records] == [0.25, 0.5]
    assert records[0]["optim/lr"] == 1e-4
    assert points(tmp_path, "policy/reward") == [(0, 0.25), (1, 0.5)]


def test_numpy_scalars_are_plain_numbers_in_the_file(tmp_path):
    with Sink(tmp_path, tensorboard=False) as sink:
        sink.write(0, {"policy/reward": np.float32(0.5), "filter/dropped": np.int64(3)})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["policy/reward"] == 0.5 and line["filter/dropped"] == 3.0
    assert not (tmp_path / "tb").exists()


def test_nan_and_inf_are_written_as_such_and_counted(tmp_path):
    with Sink(tmp_path) as sink:
        sink.write(0, {"policy/loss": math.nan, "drift/mean": math.inf, "drift/p50": -math.inf, "drift/max": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert strict["policy/loss"] == "NaN" and strict["drift/mean"] == "Infinity" and strict["drift/p50"] == "-Infinity"
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert math.isnan(record["policy/loss"]) and record["drift/mean"] == math.inf and record["drift/p50"] == -math.inf
    assert record["metrics/nan"] == 3.0
    assert math.isnan(points(tmp_path, "policy/loss")[0][1])


def test_histograms_and_texts_reach_tensorboard(tmp_path):
    with Sink(tmp_path) as sink:
        sink.write(
            3,
            {},
            {"staleness/lag": np.array([0.0, 1.0, 1.0, 4.0, np.nan]), "drift/empty": np.array([])},
            {"run/config": "sync_every: 4"},
        )
    tags = events(tmp_path).Tags()
    assert set(tags["tensors"]) >= {"staleness/lag", "run/config"}
    assert "drift/empty" not in tags["tensors"]


def test_a_second_writer_of_a_run_folder_is_refused(tmp_path):
    with Sink(tmp_path, tensorboard=False), pytest.raises(RunError, match=r"run\.name"):
        Sink(tmp_path, tensorboard=False)
    Sink(tmp_path, tensorboard=False).close()


def test_after_a_resume_each_update_is_read_once(tmp_path):
    with Sink(tmp_path) as sink:
        for update in range(10):
            sink.write(update, {"policy/reward": float(update)})
    with Sink(tmp_path, first_update=5) as sink:
        for update in range(5, 8):
            sink.write(update, {"policy/reward": update + 0.5})
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.5), (6, 6.5), (7, 7.5)]
    assert [(r["update"], r["policy/reward"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == expected
    assert points(tmp_path, "policy/reward") == expected
    assert len(read_jsonl(tmp_path / "metrics-1.jsonl")) == 10  # what was set aside is not lost


def test_a_resumed_writer_appends_and_the_timeline_leaves_out_what_was_undone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Sink(tmp_path) as sink:
        for update in range(4):
            sink.write(update, {"policy/reward": float(update), "run/epoch": 0.0})
            sink.write(update + 1, {"eval/version": update + 1.0, "eval/epoch": 0.0})
    with path.open("a") as file:
        file.write('{"update": 4, "ti')  # killed in the middle of a line
    lock = hold(tmp_path)
    with pytest.raises(RunError, match=r"run\.name"):
        Sink(tmp_path)
    with Sink(tmp_path, first_update=2, resumed=True, lock=lock) as sink:
        sink.write(2, {"policy/reward": 2.5, "run/epoch": 1.0})
        sink.write(2, {"policy/reward": 2.75, "run/epoch": 1.0})  # the first one was skipped
        sink.write(3, {"eval/version": 3.0, "eval/epoch": 1.0})
    assert not list(tmp_path.glob("metrics-*.jsonl"))
    records = read_jsonl(path)
    assert len(records) == 11
    kept = timeline(records)
    assert [(r["update"], r["policy/reward"]) for r in kept if "policy/reward" in r] == [
        (0, 0.0), (1, 1.0), (2, 2.5), (2, 2.75)
    ]  # fmt: skip
    assert [(r["update"], r["eval/epoch"]) for r in kept if "eval/version" in r] == [(1, 0), (2, 0), (3, 1)]
    assert [x for x, _ in points(tmp_path, "policy/reward")] == [0, 1, 2, 2]
    # The same evaluations are left in both: that of version 2 is of the timeline that goes on.
    assert points(tmp_path, "eval/epoch") == [(1, 0.0), (2, 0.0), (3, 1.0)]


def test_after_two_kills_every_step_has_one_value_in_both_files(tmp_path):
    for epoch, (first, last) in enumerate([(0, 9), (5, 7), (3, 7)]):
        with Sink(tmp_path, first_update=first, resumed=epoch > 0) as sink:
            for update in range(first, last + 1):
                value = math.nan if update == 4 else update + epoch / 10
                sink.write(update, {"policy/reward": value, "run/epoch": float(epoch)})
    kept = timeline(read_jsonl(tmp_path / "metrics.jsonl"))
    expected = [0.0, 1.0, 2.0, 3.2, math.nan, 5.2, 6.2, 7.2]
    assert [r["update"] for r in kept] == list(range(8))
    assert [r["policy/reward"] for r in kept] == pytest.approx(expected, nan_ok=True)
    assert [r.get("metrics/nan") for r in kept] == [None] * 4 + [1.0] + [None] * 3
    steps, values = zip(*points(tmp_path, "policy/reward"), strict=True)
    assert list(steps) == list(range(8)) and list(values) == pytest.approx(expected, nan_ok=True)
    assert points(tmp_path, "metrics/nan") == [(4, 1.0)]


def texts(run_dir: Path, tag: str) -> list[tuple[int, str]]:
    accumulator = ServersAccumulator(str(run_dir / "tb"), size_guidance={"tensors": 0})
    accumulator.Reload()
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in accumulator.Tensors(tag)]


def test_texts_are_not_doubled_by_a_resume(tmp_path):
    with Sink(tmp_path) as sink:
        sink.text(0, "run/config", "max_lag: 8")
        sink.text(3, "run/tuned", "max_lag: 4")
        sink.text(6, "run/tuned", "max_lag: 2")  # undone by the resume
        sink.text(6, "run/alarms", "f_2 is on")
    with Sink(tmp_path, first_update=5, resumed=True) as sink:
        sink.text(5, "run/config", "max_lag: 8")
        sink.text(5, "run/tuned", "max_lag: 4")
        sink.text(7, "run/alarms", "f_2 is on")
        sink.text(9, "run/alarms", "f_2 is off")
    assert texts(tmp_path, "run/config") == [(0, "max_lag: 8")]
    assert texts(tmp_path, "run/tuned") == [(3, "max_lag: 4")]
    assert texts(tmp_path, "run/alarms") == [(7, "f_2 is on"), (9, "f_2 is off")]
    with Sink(tmp_path, first_update=8, resumed=True) as sink:
        sink.text(8, "run/config", "max_lag: 16")  # another one is a text of its own
        sink.text(8, "run/alarms", "f_2 is off")
    assert texts(tmp_path, "run/config") == [(0, "max_lag: 8"), (8, "max_lag: 16")]
    assert texts(tmp_path, "run/alarms") == [(7, "f_2 is on"), (8, "f_2 is off")]
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_the_same_text_twice_in_one_run_is_two_texts(tmp_path):
    with Sink(tmp_path) as sink:
        for update in (1, 2, 3):
            sink.text(update, "run/alarms", f"f_2 is {'on' if update % 2 else 'off'}")
    with Sink(tmp_path, resumed=True) as sink:  # from the start model: nothing of before is left
        sink.text(0, "run/alarms", "f_2 is on")
        sink.text(1, "run/alarms", "f_2 is on")
    assert texts(tmp_path, "run/alarms") == [(0, "f_2 is on"), (1, "f_2 is on")]


def test_what_was_written_survives_kill_9(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from asyncrl.metrics.sink import Sink\n"
        "sink = Sink(sys.argv[1])\n"
        "for update in range(21): sink.write(update, {'policy/reward': float(update)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [r["update"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(21))
    assert [step for step, _ in points(tmp_path, "policy/reward")] == list(range(21))
    Sink(tmp_path, tensorboard=False, first_update=21).close()  # the lock went with the process


def test_a_line_cut_by_a_crash_is_left_out_and_not_glued_to_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 0, "time": 1.0, "policy/reward": 0.5}\n{"update": 1, "ti')
    assert [r["update"] for r in read_jsonl(path)] == [0]
    with Sink(tmp_path, tensorboard=False, first_update=1) as sink:
        sink.write(1, {"policy/reward": 0.75})
    assert [(r["update"], r["policy/reward"]) for r in read_jsonl(path)] == [(0, 0.5), (1, 0.75)]


def test_a_broken_tensorboard_folder_is_logged_once_and_does_not_stop_the_records(tmp_path, caplog):
    (tmp_path / "tb").write_text("in the way")
    with Sink(tmp_path) as sink:
        sink.write(0, {"policy/reward": 1.0})
        sink.write(1, {"policy/reward": 1.0})
    assert [r.getMessage() for r in caplog.records if "TensorBoard" in r.getMessage()] == [
        "metrics: TensorBoard cannot be written, training goes on without it"
    ]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2


def test_a_full_disk_is_logged_once_and_does_not_raise(tmp_path):
    code = (
        "import logging, resource, sys\n"
        "from asyncrl.metrics.sink import Sink\n"
        "logging.basicConfig(format='%(message)s')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
        "sink = Sink(sys.argv[1], tensorboard=False)\n"
        "for update in range(20): sink.write(update, {'policy/reward': 1.0})\n"
        "sink.close()\n"
        "print('still here')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout == "still here\n"
    assert done.stderr.count("metrics.jsonl cannot be written, training goes on without it") == 1
    written = [r["update"] for r in read_jsonl(tmp_path / "metrics.jsonl")]
    assert written == list(range(len(written))) and 0 < len(written) < 20
