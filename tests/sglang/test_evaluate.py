"""`asyncrl eval` with a server that it starts and that gets no weights. The model is tied; SGLang does not tie it."""

import json
import subprocess
import sys

import psutil
import pytest

from asyncrl.config import save_config, validate
from asyncrl.process import role_environment
from tests.helpers.sglang_server import QUICKSTART, TOOLS
from tests.system.conftest import ROOT

pytestmark = pytest.mark.timeout(900)


def evaluate(config, out, *more):
    command = [sys.executable, "-m", "asyncrl", "eval", str(QUICKSTART), str(config), "--out", str(out), *more]
    done = subprocess.run(
        command, cwd=ROOT, env=role_environment(1) | {"COLUMNS": "120"}, capture_output=True, text=True, timeout=800,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    return json.loads((out / "table.json").read_text())["sets"]["chain_sum"], lines


def test_a_server_answers_as_the_embedded_engine_does_and_is_gone_afterwards(can_serve, tmp_path):
    sections = {
        "task": {"eval_size": 40, "train_size": 200}, "eval": {"samples": 2}, "run": {"shutdown_s": 30},
        "generator": {
            "groups_in_flight": 4,
            "sglang": {
                "command": [str(TOOLS / "serve")], "start_timeout_s": 600,
                "args": {"max-running-requests": 16, "max-total-tokens": 2048},
            },
        },
        "weights": {"carrier": "disk"}, "algorithm": {"group_size": 4}, "learner": {"take_timeout_s": 900},
    }  # fmt: skip
    config = tmp_path / "small.yaml"
    save_config(validate({"model": {"path": "nowhere"}, **sections}), config)
    ours, answers = evaluate(config, tmp_path / "torch")
    watched = "run.watchdog_s=700"
    theirs, served = evaluate(config, tmp_path / "sglang", "generator.engine=sglang", watched)
    greedy = [{r["prompt_id"]: r["response"] for r in lines if r["greedy"]} for lines in (answers, served)]
    same = sum(greedy[0][p] == greedy[1][p] for p in greedy[0])
    assert len(served) == 120 and same >= 38  # a near tie may go the other way
    assert abs(ours["greedy"] - theirs["greedy"]) <= 0.05 and theirs["greedy"] > 0.5
    assert not (tmp_path / "sglang" / "served.part").exists()
    assert _servers(tmp_path) == []


def _servers(folder):
    """Processes that still name the folder of an evaluation."""
    found = []
    for p in psutil.process_iter(["cmdline", "status"]):
        if p.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in part for part in p.info["cmdline"] or []):
            found.append(p.pid)
    return found
