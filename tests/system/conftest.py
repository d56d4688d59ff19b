"""Whole runs of small jobs: real processes, real sockets, real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from asyncrl.metrics.sink import read_jsonl
from asyncrl.process import role_environment
from tests.helpers.char_model import save_char_model

ROOT = Path(__file__).parents[2]

SMALL = {
    "task.train_size": 64,
    "task.max_terms": 3,
    "task.eval_size": 8,
    "sampling.max_new_tokens": 10,
    "generator.groups_in_flight": 4,
    "staleness.sync_every": 2,
    "staleness.max_lag": 4,
    "algorithm.groups_per_update": 4,
    "algorithm.group_size": 4,
    "algorithm.rdc.q": 0.2,
    "learner.updates": 6,
    "eval.every": 2,
    "run.shutdown_s": 30,
}


TIMEOUT_S = 900
"""Of one test. A run waits for its own deadlines; this one is for hangs, on a host that others load as well."""


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@dataclass
class Run:
    """A started `asyncrl run` and its folder."""

    process: subprocess.Popen
    folder: Path
    output: Path

    def wait(self, timeout_s=300):
        return self.process.wait(timeout_s)

    def records(self):
        file = self.folder / "metrics.jsonl"
        return read_jsonl(file) if file.exists() else []

    def updates(self):
        return [r for r in self.records() if "policy/reward" in r]

    def committed(self):
        file = self.folder / "committed.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def processes(self):
        """Every live process that names this run's folder in its command line."""
        out = []
        for p in psutil.process_iter(["cmdline", "status"]):
            if p.info["status"] != psutil.STATUS_ZOMBIE and any(
                str(self.folder) in part for part in p.info["cmdline"] or []
            ):
                out.append(p)
        return out

    def role(self, word):
        """The process of a role: replay, learn or a generator's id."""
        found = [p for p in self.processes() if word in p.info["cmdline"]]
        return found[0] if found else None

    def wait_for(self, condition, timeout_s=240):
        """Waits until condition() is true; the run must still be going. At most timeout_s."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if condition():
                return
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)
        raise AssertionError(f"waited {timeout_s} s in vain; logs:\n{self.text()}")

    def text(self):
        logs = [self.output, *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in logs if f.exists())


@pytest.fixture(scope="session")
def char_model(tmp_path_factory):
    """A random Qwen3-MoE with the character tokenizer of chain_sum."""
    return save_char_model(tmp_path_factory.mktemp("char") / "model")


@pytest.fixture
def start_run(tmp_path, char_model):
    """Start runs; whatever they leave behind is ended at teardown (and was a failure before)."""
    started = []

    def start(name="r", *files, resume=False, **changes) -> Run:
        """A new run, or, with resume, the one of that name from its own config with changes."""
        settings = SMALL | {"model.path": char_model, "run.dir": tmp_path, "run.name": name} | changes
        base = tmp_path / "base.yaml"
        base.write_text("{}\n")
        output = tmp_path / f"{name}.out"
        arguments = [str(base), *map(str, files), *(f"{k}={v}" for k, v in settings.items())]
        if resume:
            arguments = [str(tmp_path / name / "config.yaml"), "--resume", *(f"{k}={v}" for k, v in changes.items())]
        with open(output, "a") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl", "run", *arguments],
                cwd=ROOT, env=role_environment(1), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        run = Run(process, tmp_path / name, output)
        started.append(run)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            try:
                run.process.wait(40)
            except subprocess.TimeoutExpired:
                run.process.kill()
        for p in run.processes():
            os.kill(p.pid, signal.SIGKILL)
