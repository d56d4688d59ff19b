"""A small model, and `asyncrl eval` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.config import save_config, validate
from asyncrl.process import role_environment
from tests.helpers.char_model import save_char_model

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
"""Of one test, for hangs; each starts a few processes, on a host that others load as well."""


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_char_model(tmp_path_factory.mktemp("evaluate") / "model", steps=200)


SMALL = {
    "task": {"train_size": 64, "max_terms": 3, "eval_size": 8},
    "sampling": {"max_new_tokens": 10},
    "generator": {"groups_in_flight": 4},
    "algorithm": {"group_size": 4},
    "eval": {"samples": 4},
    "run": {"shutdown_s": 8},
}


@pytest.fixture
def config(tmp_path):
    """A file with the settings of a small evaluation; its model is another one."""
    file = tmp_path / "small.yaml"
    save_config(validate({"model": {"path": "nowhere"}, **SMALL}), file)
    return file


@dataclass
class Eval:
    """A started `asyncrl eval` with its folder."""

    process: subprocess.Popen
    out: Path

    def wait(self):
        output, _ = self.process.communicate(timeout=TIMEOUT_S - 60)
        self.text = output
        return self.process.returncode

    def lines(self):
        file = self.out / "answers.jsonl"
        whole = file.read_bytes().decode().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in whole]


@pytest.fixture
def start(tmp_path):
    """start(MODEL_OR_RUN, *arguments, out=): ended with the test."""
    started = []

    def begin(*arguments, out=None):
        out = out or tmp_path / "out"
        command = [sys.executable, "-m", "asyncrl", "eval", *map(str, arguments), "--out", str(out)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=role_environment(1) | {"COLUMNS": "120"}, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.append(Eval(process, out))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(30)
