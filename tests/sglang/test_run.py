"""Whole runs of `asyncrl run` with a real SGLang server behind each generator."""

import math

import pytest

from tests.helpers.sglang_server import TOOLS
from tests.system.conftest import ROOT, char_model, start_run  # noqa: F401
from tests.system.test_run import assert_lag_bound

pytestmark = pytest.mark.timeout(900)

SGLANG = {
    "generator.engine": "sglang",
    "generator.sglang.command": f"[{TOOLS / 'serve'}]",
    "generator.sglang.args.max-running-requests": 16,
    "generator.sglang.args.max-total-tokens": 2048,
    "weights.carrier": "collective",
    "generator.sglang.start_timeout_s": 600,
    "run.watchdog_s": 700,
    "run.shutdown_s": 30,
}
ON_POLICY = {"staleness.max_lag": 0, "staleness.sync_every": 1, "learner.updates": 4}


@pytest.fixture
def sglang_run(can_serve, start_run):  # noqa: F811
    """start_run with SGLang as the engine."""

    def start(name, *files, **changes):
        return start_run(name, *files, **(SGLANG | changes))

    return start


def servers(run, generator="g0"):
    """The processes of the server that a generator of the run started."""
    role = run.role(generator)
    return role.children(recursive=True) if role is not None else []


def assert_agrees(updates):
    """At lag 0 both sides have the same weights: what is left is rounding."""
    for r in updates:
        assert r["staleness/lag_max"] == 0
        assert r["drift/mean"] <= 1e-3 and r["mismatch/kl_k3"] < 1e-8 and r["mismatch/f_1.2"] == 0


@pytest.mark.parametrize("carrier", ["collective", pytest.param("disk", marks=pytest.mark.long)])
def test_on_policy_both_sides_agree_and_nothing_is_left(sglang_run, carrier):
    run = sglang_run("onpolicy", **ON_POLICY, **{"weights.carrier": carrier})
    run.wait_for(lambda: len(run.updates()) >= 1, 400)
    family = servers(run)
    assert len(family) >= 3  # HTTP, scheduler, detokenizer
    assert run.wait(400) == 0, run.text()
    updates = run.updates()
    assert [r["update"] for r in updates] == [0, 1, 2, 3]
    assert_agrees(updates)
    assert {c["outcome"] for c in run.committed()} == {"trained"}
    assert run.processes() == [] and not any(p.is_running() for p in family)


@pytest.mark.long
def test_asynchronous_with_replayed_routes(sglang_run):
    run = sglang_run("r3", ROOT / "configs/methods/r3.yaml", **{"learner.updates": 8})
    assert run.wait(600) == 0, run.text()
    updates = run.updates()
    assert len(updates) == 8
    assert all(r["r3/forced_fraction"] > 0.99 and math.isfinite(r["mismatch/kl_k3"]) for r in updates)
    assert_lag_bound(run, 4)
    evaluated = sorted(r["update"] for r in run.records() if "eval/sampled_accuracy" in r)
    assert evaluated[0] == 0 and evaluated[-1] == 8


@pytest.mark.parametrize("mode", ["abort", pytest.param("drain", marks=pytest.mark.long)])
def test_one_version_per_response(sglang_run, mode):
    run = sglang_run("mode", **{"weights.on_load": mode, "staleness.sync_every": 1, "learner.updates": 6})
    assert run.wait(600) == 0, run.text()
    assert len(run.updates()) == 6
    # How many loads the last record knows depends on when a heartbeat came; the lag bound needs two.
    assert run.updates()[-1]["generator/g0/loads"] >= 1
    assert all(r["staleness/mixed_responses"] == 0 for r in run.updates())
    assert_lag_bound(run, 4)
