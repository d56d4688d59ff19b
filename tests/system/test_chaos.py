"""The minute version of tools/chaos.py: every kind of fault at least once, and the whole proof."""

import json

import pytest
from chaos_lib import faults
from chaos_lib.evidence import lines, load
from chaos_lib.run import play
from chaos_lib.stage import Plan
from chaos_lib.verify import table, verify

from tests.system.conftest import SMALL


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("seed", "carrier"), [(3, "shm")])
def test_a_run_survives_every_kind_of_fault_and_proves_it(tmp_path, char_model, seed, carrier):
    base = tmp_path / "base.yaml"
    base.write_text("{}\n")
    settings = SMALL | {
        "model.path": char_model,
        "run.dir": tmp_path,
        "run.name": "chaos",
        "run.seed": seed,
        "run.shutdown_s": 20,
        "generator.count": 2,
        "weights.carrier": carrier,
        "replay.heartbeat_timeout_s": 4,
        "learner.checkpoint_every": 2,
        "eval.every": 0,
    }
    plan = Plan([str(base)], settings, 30, seed, faults.SHORT_CARDS, faults.SHORT_PACE, tail=8)
    run_dir = play(plan)
    proof = verify(load(run_dir))
    logs = "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in sorted((run_dir / "logs").glob("*.log")))
    assert all(line.ok for line in proof), f"{table(proof)}\n{logs}"
    played = [(r["kind"], r["target"]) for r in lines(run_dir / "chaos" / "faults.jsonl") if r["event"] == "fault"]
    assert set(faults.SHORT_CARDS) <= set(played)
    assert {kind for kind, _ in played} == {*faults.PROCESS, *faults.LINK}
    assert json.loads((run_dir / "chaos" / "facts.json").read_text())["processes"] == []
