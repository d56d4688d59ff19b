"""The drift sentinel against real faults: one faulty generator among sound ones of a running job, one fault at a time.

The fleet samples with fp8 fake-quantised weights, as engines do, and the quickstart's model, which `make model` makes.
Prints the table of docs/sentinel.md:

    pytest -s tests/long/test_sentinel_faults.py
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.metrics.sink import read_jsonl
from asyncrl.process import role_environment
from asyncrl.sections.sentinel import SentinelSection

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models/quickstart"
SOUND = int(os.environ.get("SENTINEL_SOUND", "5"))
SETTINGS = [
    "generator.count=0", "generator.groups_in_flight=6", "algorithm.groups_per_update=16", "learner.updates=1000",
    "eval.every=0", "sentinel.action=alarm", "learner.checkpoint_every=0", "logging.tensorboard=false",
    "logging.progress=false", "staleness.sync_every=2",
]  # fmt: skip
# Updates that a fault is watched for: what is stale must become so first.
FAULTS = {
    "fp8+stale:16": 46, "fp8+stale:8": 38, "fp8+swap": 30, "fp8+noise:1.0": 30, "int4": 30, "fp8+noise:0.3": 30,
    "fp8+never": 30,
}  # fmt: skip
SIGNALS = ("drift", "log_ratio", "joint")
LAST = 5
"""Updates at the end of a fault whose mean z counts: the window holds nothing from before then."""
LIMIT = SentinelSection().z
LIMIT_S = 600
"""Of one fault: the run must get so many updates done, on a host that others load as well."""

pytestmark = [
    pytest.mark.timeout(LIMIT_S * len(FAULTS) + 600),
    pytest.mark.skipif(not MODEL.is_dir(), reason="needs models/quickstart (make model)"),
]


class Job:
    """A run whose generators are all started by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._processes, self._outputs = folder / "faults", {}, []
        self._settings = ["configs/quickstart.yaml", f"run.dir={folder}", "run.name=faults", *SETTINGS]
        self._logs = folder
        self.start("run", [sys.executable, "-m", "asyncrl", "run", *self._settings])

    def start(self, name: str, command: list[str]) -> None:
        output = (self._logs / f"{name}.log").open("w")
        self._outputs.append(output)
        self._processes[name] = subprocess.Popen(
            command, cwd=ROOT, env=role_environment(1), stdout=output, stderr=subprocess.STDOUT
        )

    def generator(self, name: str, fault: str) -> None:
        helper = [sys.executable, "-m", "tests.helpers.faulty_generator", fault]
        self.start(name, [*helper, *self._settings, "--id", name])

    def end(self, name: str) -> None:
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait(60)

    def close(self) -> None:
        for name in reversed(list(self._processes)):
            self.end(name)
        for output in self._outputs:
            output.close()

    def records(self) -> list[dict]:
        file = self.folder / "metrics.jsonl"
        return read_jsonl(file) if file.exists() else []

    def wait_for(self, condition, what: str) -> None:
        """Waits at most LIMIT_S; the run must go on meanwhile."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if condition():
                return
            dead = [n for n, p in self._processes.items() if p.poll() is not None]
            assert not dead, f"{dead} ended while waiting for {what}"
            time.sleep(0.5)
        raise AssertionError(f"waited {LIMIT_S} s in vain for {what}")


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.close()


def scores(records: list[dict], name: str) -> list[dict[str, float]]:
    """z by signal of one generator, update by update."""
    both = [{s: r[k] for s in SIGNALS if (k := f"sentinel/{name}/{s}_z") in r} for r in records]
    return [zs for zs in both if zs]


def test_each_fault_stands_out_and_no_sound_generator_does(job, tmp_path):
    job.wait_for(lambda: (job.folder / "replay.address").exists(), "replay")
    control = tmp_path / "fault"
    control.write_text("fp8")
    for i in range(SOUND):
        job.generator(f"g{i}", "fp8")
    job.generator("bad", f"@{control}")
    job.wait_for(lambda: len(scores(job.records(), "bad")) >= 16, "the first updates")
    sound = [f"g{i}" for i in range(SOUND)]
    table = {"fp8": (mean_z(job.records()[-LAST:], "bad"), top(job.records(), [*sound, "bad"]))}
    for fault, updates in FAULTS.items():
        begun = len(job.records())
        control.write_text(fault)
        job.wait_for(lambda: len(job.records()) >= begun + updates, f"{updates} updates with {fault}")  # noqa: B023
        records = job.records()[begun:]
        table[fault] = mean_z(records[-LAST:], "bad"), top(records, sound)
        print(f"{fault:15} {table[fault]}", flush=True)
    assert max(highest for _, highest in table.values()) < LIMIT, table
    missed = [fault for fault in FAULTS if max(table[fault][0].values()) < LIMIT]
    assert not missed, table


def mean_z(records: list[dict], name: str) -> dict[str, float]:
    """Mean z by signal."""
    zs = scores(records, name)
    return {s: round(sum(z[s] for z in zs) / len(zs), 1) for s in SIGNALS}


def top(records: list[dict], names: list[str]) -> float:
    """The highest z of any of these."""
    return round(max(z for name in names for zs in scores(records, name) for z in zs.values()), 1)
